"""The published table: every record against every library, as measured, and the page that shows it."""

from __future__ import annotations

import contextlib
import io
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import Literal

import torch

from conformance.adapter import Library, Outcome, Record, Status, carry_out
from conformance.ledger import CASES, KINDS, LEDGER
from conformance.libraries.bare import TorchAmp
from conformance.libraries.huggingface import Accelerate, Transformers
from conformance.ours import Halfstep

Strategy = Literal["follow", "stock"]


def strategies(record: Record, door: str) -> tuple[Strategy, ...]:
    """The ways of finding the loss scale that a record says something about, through one door."""
    both = door == "loop" and record.kind in "DEF" and not record.calibrated
    return ("follow", "stock") if both else ("follow",)


def _halfstep(record: Record) -> list[Library]:
    return [Halfstep(door, strategy) for door in record.doors for strategy in strategies(record, door)]


def _fabric(record: Record) -> list[Library]:
    from conformance.libraries.fabric import LightningFabric

    return [LightningFabric("typed"), LightningFabric("plugin")]


@dataclass(frozen=True)
class Column:
    """One library of the table. ways: everything that a record is put through; the worst of them is the cell.

    package: as it is installed; module: as it is imported.
    """

    key: str
    title: str
    package: str
    module: str
    about: str
    ways: Callable[[Record], Sequence[Library]]


COLUMNS = (
    Column("halfstep", "halfstep", "halfstep", "halfstep", "the doors that a record concerns, and both ways of finding the loss scale", _halfstep),
    Column("torch", "torch.amp", "torch", "torch", "torch.autocast and torch.amp.GradScaler in the loop of the manual", lambda r: [TorchAmp()]),
    Column("accelerate", "Accelerate", "accelerate", "accelerate", "Accelerator(cpu=True); it scales no losses on a CPU", lambda r: [Accelerate()]),
    Column("transformers", "Trainer", "transformers", "transformers", "transformers.Trainer with use_cpu=True", lambda r: [Transformers()]),
    Column(
        "fabric",
        "Fabric",
        "lightning-fabric",
        "lightning_fabric",
        'Fabric(accelerator="cpu") with the precision as typed, and with its MixedPrecision plugin around torch\'s scaler',
        _fabric,
    ),
)


def missing(columns: Iterable[Column]) -> str:
    """What to install before these columns can be measured, in one line; empty when all is there."""
    absent = [c for c in columns if find_spec(c.module) is None]
    if not absent:
        return ""
    names = " and ".join(c.package for c in absent)
    without = " ".join(f"--without {c.key}" for c in absent)
    install = "pip install 'halfstep[conformance]'"
    return f"{names} {'is' if len(absent) == 1 else 'are'} not installed: {install}, or leave the column out with {without}"


@dataclass(frozen=True)
class Row:
    """A record and how it came out, by column key."""

    record: Record
    outcomes: dict[str, Outcome]


def measure(record: Record, columns: Sequence[Column]) -> Row:
    """Put one record through every column, and see that nothing of it is left in the process."""
    outcomes = {}
    for column in columns:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            outcomes[column.key] = worst([carry_out(record, library, quiet=True) for library in column.ways(record)])
        _nothing_left(f"{record.name} under {column.title}")
    return Row(record, outcomes)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The one that a user of the library would meet: wrong before right, right before not offered."""
    order: tuple[Status, ...] = ("wrong", "right", "not offered")
    return min(outcomes, key=lambda outcome: order.index(outcome.status))


def _nothing_left(where: str) -> None:
    left = {
        "a default dtype": torch.get_default_dtype() is not torch.float32,
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients switched off": not torch.is_grad_enabled(),
    }
    for what, there in left.items():
        if there:
            raise RuntimeError(f"{where}: left {what} behind, so that what follows would be measured under it")


def counts(rows: Sequence[Row], key: str) -> Counter[Status]:
    """How many records of a column came out in which way."""
    return Counter(row.outcomes[key].status for row in rows)


def page(rows: Sequence[Row], columns: Sequence[Column], seconds: float) -> str:
    """The page for the documentation: counts, then a table per kind, then what the marks mean."""
    notes = _notes(rows, columns)
    parts = [_head(rows, columns, seconds), _totals(rows, columns), _known(rows)]
    for kind, title in KINDS.items():
        of_kind = [row for row in rows if row.record.kind == kind]
        if of_kind:
            parts.append(_kind(f"{kind}. {title[0].upper()}{title[1:]}", of_kind, columns, notes))
    parts += ["## Not offered\n\n" + "\n".join(f"{number}. {why}" for why, number in notes.items()), _sources()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(rows: Sequence[Row], columns: Sequence[Column], seconds: float) -> str:
    versions = ", ".join(f"{c.package} {version(c.package)}" for c in columns if c.key != "torch")
    where = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    ways = "\n".join(f"  - {c.title}: {c.about}." for c in columns)
    return f"""# Which library passes what

{len(rows)} records of what goes wrong in 16-bit training, each brought about in every library and judged by the same check.
`make conformance` measured and wrote this page on {datetime.now(UTC):%Y-%m-%d}, on a CPU ({where}), in {seconds:.0f} s, with {versions}.

- **right**: the wanted result, or a refusal that says what the record asks for.
- **wrong**: another result, without a word or with an error that does not say what to do. An error of another library counts as a
  refusal when Python code of it or of torch raises it on purpose and its text has the words that the record asks for.
- **-** and a number: the library has no words for this record; the reason is in the list at the end. It says nothing against the library.
- A cell is the worst of all the ways in which a column is measured:
{ways}

The records were written beside halfstep, so its column says that it keeps its own promises; the others say what is left to their users.
They are code, `tests/conformance/`; all that they need of a library is one adapter, in `tests/conformance/libraries/`.
`python -m conformance WORD --seen` in the folder `tests` shows what was seen of the records with that word in their name."""


def _totals(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    lines = ["| library | right | wrong | not offered |", "|---|---:|---:|---:|"]
    for c in columns:
        n = counts(rows, c.key)
        lines.append(f"| {c.title} | {n['right']} | {n['wrong']} | {n['not offered']} |")
    return "\n".join(lines)


def _known(rows: Sequence[Row]) -> str:
    """What halfstep has wrong, each with the reason that the record gives."""
    wrong = [row for row in rows if row.outcomes["halfstep"].status != "right"]
    listed = [f"- {row.record.name}: {row.record.pending or 'not known before this run'}" for row in wrong]
    return "halfstep has wrong:\n\n" + "\n".join(listed) if listed else ""


def _kind(title: str, rows: Sequence[Row], columns: Sequence[Column], notes: dict[str, int]) -> str:
    lines = [
        f"## {title}",
        "",
        f"| record | what is done; what is right | {' | '.join(c.title for c in columns)} |",
        "|---|---|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [_cell(row.outcomes[c.key], notes) for c in columns]
        lines.append(f"| {row.record.name} | {_plain(row.record.title)}; *{_plain(row.record.right)}* | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome, notes: dict[str, int]) -> str:
    if outcome.status == "not offered":
        return f"- [{notes[outcome.seen]}]"
    return "**wrong**" if outcome.status == "wrong" else "right"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def _notes(rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, int]:
    reasons = {row.outcomes[c.key].seen for row in rows for c in columns if row.outcomes[c.key].status == "not offered"}
    return {why: number for number, why in enumerate(sorted(reasons), 1)}


def _sources() -> str:
    found = f"{len(LEDGER)} faults and {len(CASES)} cases that were found in public reports"
    return f"The records come from {found}, and from faults like them."


def summary(rows: Sequence[Row], columns: Sequence[Column], started: float) -> str:
    """The last lines on the terminal."""
    named = [f"{c.title}: {n['right']} right, {n['wrong']} wrong, {n['not offered']} not offered" for c in columns if (n := counts(rows, c.key))]
    return f"{len(rows)} records in {time.monotonic() - started:.0f} s\n" + "\n".join(named)
