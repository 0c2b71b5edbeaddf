"""A report as one HTML file that opens from disk: template, style, script, plotly and data in one, and nothing from a network.

The page forbids itself all else by a content security policy: scripts run by their hash only, so text of a run that came through as markup would
not run either. plotly.js is kept compressed (a third of its size) and unpacked by the browser.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import zlib
from functools import cache
from importlib import resources
from typing import Any

from halfstep.errors import MissingExtraError
from halfstep.reports.document import Answers, Chart, Document, Events, Table, Text

STATES = {"good": "good", "watch": "look at this", "bad": "bad", "unknown": "not known"}


def require() -> None:
    """Raise MissingExtraError with the line that installs it when a package that HTML needs is missing."""
    for name in ("jinja2", "plotly"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"a report in HTML needs the package {name}, and it is not installed",
                "Install it: pip install 'halfstep[report]' (in this folder: pip install '.[report]'); --format markdown and terminal need nothing.",
            ) from error


def html(document: Document) -> str:
    """The page. Raises MissingExtraError without jinja2 or plotly."""
    require()
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FunctionLoader(_part), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.tests |= {kind.__name__.lower(): (lambda block, kind=kind: isinstance(block, kind)) for kind in (Answers, Chart, Events, Table, Text)}
    script, (packed, plotly_hash) = _part("page.js"), _plotly()
    data = {
        "runs": list(document.runs),
        "charts": {c.name: {"kind": c.kind, "title": c.title, "log": c.can_log, **c.figure} for c in document.charts},
    }
    return environment.get_template("page.html").render(
        document=document,
        states=STATES,
        style=_part("page.css"),
        script=script,
        hashes=f"'{_hash(script.encode())}' '{plotly_hash}'",
        plotly=packed,
        data=embedded(data),
    )


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element whatever the texts in it say. Raises ValueError for NaN: those are marks, and no numbers."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return resources.files("halfstep.reports").joinpath("page", name).read_text(encoding="utf-8")


def _hash(source: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}"


@cache
def _plotly() -> tuple[str, str]:
    """(plotly.js, compressed and in base 64; the hash that its source is allowed to run by)."""
    source = importlib.import_module("plotly.offline").get_plotlyjs().encode()
    return base64.b64encode(zlib.compress(source, 9)).decode(), _hash(source)
