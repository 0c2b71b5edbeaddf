"""`halfstep report RUN [RUN...]`: what a run came to, as one HTML page, as Markdown, or on the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halfstep.reports import FORMATS, report


def main(argv: Sequence[str]) -> int:
    """Write the report and say where, or print it."""
    parser = argparse.ArgumentParser(
        "halfstep report",
        description="Say what one or more runs came to: did they train, were steps lost, was anything near its limit, what to do; "
        "with curves, layers, memory, events and settings. Several runs are compared.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a metrics.jsonl")
    parser.add_argument("--format", choices=FORMATS, help="html needs the packages of 'halfstep[report]' (default: by --output's name, else html)")
    parser.add_argument("--output", help="the file (default: report.html or report.md in the first run's folder; markdown with '-': the terminal)")
    options = parser.parse_args(argv)
    if options.format == "terminal" or options.output == "-":
        _print(options)
        return 0
    print(f"wrote {report(*options.runs, output=options.output, format=options.format)}")
    return 0


def _print(options: argparse.Namespace) -> None:
    from halfstep.diagnostics.reading import read_run
    from halfstep.errors import ConfigError
    from halfstep.reports.content import document
    from halfstep.reports.markdown import markdown
    from halfstep.reports.terminal import show

    if options.format in (None, "html") or (options.format == "terminal" and options.output):
        raise ConfigError(
            f"--format {options.format or 'html'} does not go with --output {options.output}", "Leave --output out, or take --format markdown."
        )
    made = document([read_run(run) for run in options.runs])
    if options.format == "markdown":
        print(markdown(made), end="")
        return
    from rich.console import Console

    show(made, Console(highlight=False, markup=False))
