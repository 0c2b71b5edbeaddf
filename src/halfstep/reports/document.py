"""What a report consists of, as values: a renderer (HTML, Markdown, terminal) knows these few blocks and nothing of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["good", "watch", "bad", "unknown"]


@dataclass(frozen=True)
class Answer:
    """One of the questions of the first screen. answer: the first words, detail: the numbers behind it."""

    question: str
    state: State
    answer: str
    detail: str = ""


@dataclass(frozen=True)
class Answers:
    """The questions of the first screen for one run. todo: what to do, most urgent first; never empty."""

    run: str
    items: tuple[Answer, ...]
    todo: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows of texts. numbers: the columns that are set flush right. folded: shown when it is asked for, on a page."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawing, the sentences that say what it shows, and its numbers as a table.

    kind: "lines", "heat" or "bars". figure: {"data": [...], "layout": {...}} as plotly has it, without colours (the page has two themes); a heat map
    has "views", one of which is drawn at a time. sparks: (name, line of block characters) for renderers that cannot draw. can_log: the page offers a
    logarithmic axis.
    """

    name: str
    title: str
    says: str
    kind: Literal["lines", "heat", "bars"]
    figure: Mapping[str, Any]
    table: Table
    sparks: tuple[tuple[str, str], ...] = ()
    can_log: bool = False


@dataclass(frozen=True)
class EventLine:
    """Something that happened, with what it means and what to do."""

    run: str
    step: int
    kind: str
    text: str
    why: str = ""
    culprits: tuple[str, ...] = ()
    time: str = ""


@dataclass(frozen=True)
class Events:
    """What happened, in order. left_out: how many more there were, when not all are shown."""

    lines: tuple[EventLine, ...]
    left_out: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """How many of each kind, most frequent first."""
        counts: dict[str, int] = {}
        for line in self.lines:
            counts[line.kind] = counts.get(line.kind, 0) + 1
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


Block = Answers | Text | Table | Chart | Events


@dataclass(frozen=True)
class Section:
    """Blocks under a heading. name: for links to it."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole report. lead: one line about what was run. runs: the names of the runs, in the order of their colours."""

    title: str
    lead: str
    runs: tuple[str, ...]
    sections: tuple[Section, ...]

    @property
    def charts(self) -> list[Chart]:
        """All charts, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]

    def __str__(self) -> str:
        answers = [block for section in self.sections for block in section.blocks if isinstance(block, Answers)]
        return "\n".join(f"{a.run}: {' '.join(i.answer for i in a.items)}" for a in answers)
