"""A report on the terminal, by rich."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table as Grid
from rich.text import Text as Line

from halfstep.reports.document import Answers, Block, Chart, Document, Events, Table, Text
from halfstep.reports.numbers import count

SIGNS = {"good": ("✓", "green"), "watch": ("!", "yellow"), "bad": ("✕", "red"), "unknown": ("?", "dim")}
LONG = 20  # events that are shown: the last ones
SETTINGS = 40  # rows of a folded table that are shown


def show(document: Document, console: Console) -> None:
    """Print a report. Text of the run is printed as it is: no markup, no control characters."""
    console.print(_line(document.title, "bold"), _line(document.lead, "dim"), sep="\n")
    for section in document.sections:
        if section.title:
            console.print()
            console.print(Rule(_line(section.title, "bold"), align="left", style="dim"))
        for block in section.blocks:
            console.print(_block(block, len(document.runs) > 1))


def _line(text: str, style: str = "") -> Line:
    return Line("".join(c if c.isprintable() else " " for c in text), style)


def _block(block: Block, several: bool) -> RenderableType:
    if isinstance(block, Answers):
        return _answers(block, several)
    if isinstance(block, Text):
        return Group(*map(_line, block.paragraphs))
    if isinstance(block, Table):
        return _grid(block)
    if isinstance(block, Chart):
        drawn = Grid.grid(padding=(0, 2))
        for name, spark in block.sparks:
            if spark:
                drawn.add_row(_line(name, "dim"), _line(spark, "cyan"))
        return Group(_line(block.says), drawn, *([_grid(block.table)] if block.kind != "lines" else []))
    return _events(block, several)


def _answers(block: Answers, several: bool) -> RenderableType:
    grid = Grid.grid(padding=(0, 1))
    for item in block.items:
        sign, style = SIGNS[item.state]
        told = _line(f"{item.question} ", "bold").append_text(_line(item.answer, f"bold {style}")).append_text(_line(f" {item.detail}"))
        grid.add_row(Line(sign, style), told)
    for i, todo in enumerate(block.todo):
        grid.add_row(Line("→"), _line("What to do: " if i == 0 else "", "bold").append_text(_line(todo)))
    return Group(*([_line(block.run, "bold")] if several else []), Padding(grid, (1, 0)))


def _grid(block: Table) -> RenderableType:
    grid = Grid(title=_line(block.caption), title_justify="left", show_edge=False, pad_edge=False, header_style="dim")
    for i, name in enumerate(block.columns):
        grid.add_column(_line(name), justify="right" if i in block.numbers else "left", overflow="fold")
    shown = block.rows[:SETTINGS] if block.folded else block.rows
    for row in shown:
        grid.add_row(*map(_line, row))
    left = len(block.rows) - len(shown)
    return Padding(Group(grid, *([_line(f"{left:,} more: --format markdown shows all", "dim")] if left else [])), (1, 0, 0, 0))


def _events(block: Events, several: bool) -> RenderableType:
    if not block.lines:
        return _line("No events were recorded.")
    shown = block.lines[-LONG:]
    left = len(block.lines) - len(shown) + block.left_out
    lines = [_line(f"{count(left, 'earlier event')}: --format markdown or html shows them", "dim")] if left else []
    for event in shown:
        where = f"{event.run}, step {event.step:,}" if several else f"step {event.step:,}"
        lines.append(_line(f"{where}  ", "dim").append_text(_line(f"{event.kind}  ", "cyan")).append_text(_line(event.text)))
        if event.why:
            lines.append(_line(f"    {event.why}", "dim"))
    return Group(*lines)
