"""A report as Markdown: sentences, tables, and curves as lines of block characters."""

from __future__ import annotations

import re

from halfstep.reports.document import Answers, Block, Chart, Document, Events, Table, Text
from halfstep.reports.numbers import count

WORDS = {"good": "good", "watch": "look at this", "bad": "bad", "unknown": "not known"}


def markdown(document: Document) -> str:
    """The text of a report.md. What comes from the run is escaped: it cannot become a heading, a link or HTML."""
    parts = [f"# {safe(document.title)}", safe(document.lead)]
    for section in document.sections:
        if section.title:
            parts.append(f"## {safe(section.title)}")
        for block in section.blocks:
            parts += _block(block, len(document.runs) > 1)
    return "\n\n".join(part for part in parts if part) + "\n"


def safe(text: str) -> str:
    """Text that stands for itself in Markdown, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def _block(block: Block, several: bool) -> list[str]:
    if isinstance(block, Answers):
        lines = [f"- **{safe(a.question)} {safe(a.answer)}** ({WORDS[a.state]}) {safe(a.detail)}" for a in block.items]
        todo = "\n".join(f"{i}. {safe(line)}" for i, line in enumerate(block.todo, 1))
        return [f"### {safe(block.run)}" if several else "", "\n".join(lines), f"**What to do**\n\n{todo}"]
    if isinstance(block, Text):
        return [safe(paragraph) for paragraph in block.paragraphs]
    if isinstance(block, Table):
        return [f"{safe(block.caption)}:", table(block)]
    if isinstance(block, Chart):
        wide = max((len(name) for name, _ in block.sparks), default=0)
        drawn = "\n".join(f"    {name.replace(chr(10), ' '):<{wide}}  {line}" for name, line in block.sparks if line)
        return [*map(safe, block.says.splitlines()), drawn, table(block.table)]
    return _events(block, several)


def table(block: Table) -> str:
    """A table in Markdown."""
    rule = "|".join("---:" if i in block.numbers else "---" for i in range(len(block.columns)))
    rows = [f"| {' | '.join(map(safe, row))} |" for row in (block.columns, *block.rows)]
    return "\n".join([rows[0], f"|{rule}|", *rows[1:]])


def _events(block: Events, several: bool) -> list[str]:
    if not block.lines:
        return ["No events were recorded."]
    told = f"{count(len(block.lines), 'event')}" + (f"; {block.left_out:,} more are not shown" if block.left_out else "")
    lines = []
    for line in block.lines:
        where = f"{safe(line.run)}, step {line.step:,}" if several else f"step {line.step:,}"
        lines.append(f"- **{where}, {safe(line.kind)}**: {safe(line.text)}" + (f" *{safe(line.why)}*" if line.why else ""))
    return [f"{told}.", "\n".join(lines)]
