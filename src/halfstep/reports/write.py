"""`halfstep.report`: the report of runs as a file."""

from __future__ import annotations

from pathlib import Path

from halfstep.checkpoint import replace
from halfstep.diagnostics.reading import read_run
from halfstep.errors import CheckpointError, ConfigError, suggest
from halfstep.reports.content import document
from halfstep.reports.html import html, require
from halfstep.reports.markdown import markdown

FORMATS = ("html", "markdown", "terminal")
SUFFIXES = {"html": "report.html", "markdown": "report.md"}
TOLD = {".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown"}  # by the end of a file's name


def report(*runs: str | Path, output: str | Path | None = None, format: str | None = None) -> Path:
    """Write one report of one or more runs and return its path.

    runs: run folders, or files metrics.jsonl. output: the file (report.html or report.md in the first run's folder); an older one is replaced.
    format: "html", one page that opens from disk and needs no network (needs the extra `report`: plotly and jinja2), or "markdown"; default: by the
        name of the output (.html, .md), html without one.

    Raises ConfigError without runs, for an unknown format, or an output whose name tells of another, DataError for a folder without records,
    MissingExtraError without the packages, CheckpointError where the file cannot be written.
    """
    if not runs:
        raise ConfigError("a report needs a run", "Name at least one run folder.")
    format = _format(format, output)
    if format == "html":
        require()  # before anything is read
    records = [read_run(run) for run in runs]
    path = Path(output) if output is not None else records[0].folder / SUFFIXES[format]
    made = document(records)
    text = html(made) if format == "html" else markdown(made)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text)
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder", f"Name the file: {path / SUFFIXES[format]}.") from error
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}", "Free some space, or name another --output.") from error
    return path


def _format(asked: str | None, output: str | Path | None) -> str:
    """The format that is asked for, or that the name of the output tells."""
    if asked is not None and asked not in SUFFIXES:
        raise ConfigError(f"halfstep.report has no format {asked!r}", suggest(asked, SUFFIXES))
    end = "" if output is None or Path(output).is_dir() else Path(output).suffix.lower()
    told = TOLD.get(end)
    if end and asked != "markdown" and told is None:
        raise ConfigError(f"--output {output} is no name of a report", "Let it end in .html or .md; halfstep.report writes these two.")
    if asked is not None and told not in (None, asked):
        raise ConfigError(f"--format {asked} does not go with --output {output}", f"Leave --format out, or name another file: {SUFFIXES[asked]}.")
    return asked or told or "html"
