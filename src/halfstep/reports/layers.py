"""The heat map of layers and steps: what of each tensor falls below or beyond its format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfstep.reports.document import Chart, Table
from halfstep.reports.history import History
from halfstep.reports.numbers import count, number, share, spark
from halfstep.reports.samples import View
from halfstep.reports.series import rounded

ROWS, COLUMNS = 60, 240  # of a heat map; more layers than that: the worst are shown; more steps: neighbours share a column, which shows the worst


def chart(run: History, name: str, title: str) -> Chart | None:
    """The heat map of a run, one view of it at a time; None where no layers were sampled."""
    found = run.views
    if not found:
        return None
    ranked = sorted(found, key=lambda view: -view.worst[0])  # the worst is drawn first
    says = "\n".join(_told(found))
    rows = [row for view in found for row in _rows(view)]
    table = Table("Layers: the worst of each kind", ("what", "layer", "worst", "step", "not finite"), tuple(rows), frozenset({2, 3}), folded=True)
    sparks = tuple((view.title, spark(_worst_by_step(view))) for view in found)
    figure = {"views": [_figure(view) for view in ranked], "layout": {"xaxis": {"title": {"text": "step"}}}}
    return Chart(name, title, says, "heat", figure, table, sparks)


def _told(found: Sequence[View]) -> list[str]:
    """A line for each kind of tensor and format."""
    lines: dict[tuple[str, str], list[View]] = {}
    for view in found:
        lines.setdefault((view.kind, view.format), []).append(view)
    told = []
    for (kind, form), members in lines.items():
        seen = f"{kind.capitalize()} in {form} ({count(len(members[0].names), 'layer')}, {count(len(members[0].steps), 'sampled step')})"
        bad = members[0].nonfinite
        tail = f" Values that are not finite: first in {bad[0] or 'the model'} at step {number(bad[1])}." if bad else ""
        told.append(f"{seen}: {'; '.join(view.told() for view in members)}.{tail}")
    return told


def _worst_by_step(view: View) -> list[float]:
    known = np.nan_to_num(view.shares, nan=0.0)
    return known.max(axis=0).tolist() if known.size else []


def _rows(view: View, most: int = 5) -> list[tuple[str, ...]]:
    """Table rows of the worst layers of a view; those with values that are not finite first."""
    known = np.nan_to_num(view.shares, nan=0.0)
    worst, bad = known.max(axis=1), view.bad.max(axis=1)
    order = sorted(range(len(view.names)), key=lambda i: (-bad[i], -worst[i]))[:most]
    return [
        (view.title, view.names[i] or "the model", share(float(worst[i])), number(view.steps[int(known[i].argmax())]), share(float(bad[i])))
        for i in order
        if worst[i] or bad[i]
    ] or [(view.title, "all layers", share(0.0), "–", share(0.0))]


def _figure(view: View) -> dict[str, Any]:
    """What is drawn of a view: of too many layers the worst, of too many steps the worst of neighbours."""
    known, bad = np.nan_to_num(view.shares, nan=-1.0), view.bad
    order = np.arange(len(view.names))
    if len(order) > ROWS:
        rank = np.lexsort((-known.max(axis=1), -bad.max(axis=1)))[:ROWS]
        order = np.sort(rank)
    edges = np.unique(np.linspace(0, len(view.steps), min(COLUMNS, len(view.steps)) + 1).astype(int))[:-1]
    shares = np.maximum.reduceat(known[order], edges, axis=1)
    broken = np.maximum.reduceat(bad[order], edges, axis=1)
    note = f"the worst {ROWS} of {len(view.names)} layers; " if len(view.names) > ROWS else ""
    note += f"{math.ceil(len(view.steps) / len(edges))} sampled steps a column, the worst of them" if len(edges) < len(view.steps) else ""
    where = np.argwhere(broken > 0)
    return {
        "title": view.title,
        "measure": view.measure,
        "note": note.rstrip("; "),
        "x": [view.steps[i] for i in edges],
        "y": [view.names[i] or "(model)" for i in order],
        "z": [[None if v is not None and v < 0 else v for v in rounded(row, 3)] for row in shares],
        "bad": [[int(j), int(i)] for i, j in where],
    }
