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


def report(*runs: str | Path, output: str | Path | None = None, format: str = "html") -> Path:
    """Write one report of one or more runs and return its path.

    runs: run folders, or files metrics.jsonl. output: the file (report.html or report.md in the first run's folder); an older one is replaced.
    format: "html", one page that opens from disk and needs no network (needs the extra `report`: plotly and jinja2), or "markdown".

    Raises ConfigError without runs or for an unknown format, DataError for a folder without records, MissingExtraError without the packages,
    CheckpointError where the file cannot be written.
    """
    if not runs:
        raise ConfigError("a report needs a run", "Name at least one run folder.")
    if format not in SUFFIXES:
        raise ConfigError(f"halfstep.report has no format {format!r}", suggest(format, SUFFIXES))
    if format == "html":
        require()  # before anything is read
    records = [read_run(run) for run in runs]
    path = Path(output) if output is not None else records[0].folder / SUFFIXES[format]
    made = document(records)
    text = html(made) if format == "html" else markdown(made)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}", "Free some space, or name another --output.") from error
    return path
