"""The heat map of layers and steps: what of each tensor falls below or beyond its format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.diagnostics.records import LayerSample
from halfstep.reports.document import Chart, Table
from halfstep.reports.history import History
from halfstep.reports.numbers import count, number, share, spark
from halfstep.reports.series import rounded

ROWS, COLUMNS = 60, 240  # of a heat map; more layers than that: the worst are shown; more steps: neighbours share a column, which shows the worst
MEASURES = {"underflow": "underflow", "overflow": "at or near overflow"}
WORDS = {
    "underflow": "of the non-zero values are too small for {format} to hold with all its bits",
    "overflow": "of the values are within a factor of 2 of {format}'s limit or beyond it",
}


@dataclass(frozen=True)
class View:
    """One map: shares [layer, step] of a kind of tensor in a format, NaN where nothing was measured; bad: shares that are not finite."""

    kind: str
    measure: str
    format: str
    names: tuple[str, ...]
    steps: tuple[int, ...]
    shares: NDArray[np.float64]
    bad: NDArray[np.float64]

    @property
    def title(self) -> str:
        """What is drawn."""
        return f"{self.kind}: {MEASURES[self.measure]} in {self.format}"

    @property
    def worst(self) -> tuple[float, str, int]:
        """(share, layer, step) of the worst cell; zeros where none was measured."""
        if not self.shares.size or np.isnan(self.shares).all():
            return 0.0, "", 0
        i, j = np.unravel_index(int(np.nanargmax(self.shares)), self.shares.shape)
        return float(self.shares[i, j]), self.names[int(i)], self.steps[int(j)]

    @property
    def nonfinite(self) -> tuple[str, int] | None:
        """(layer, step) of the first value that is not finite; None when all are."""
        found = np.argwhere(self.bad.T > 0)
        return (self.names[int(found[0][1])], self.steps[int(found[0][0])]) if len(found) else None

    def told(self) -> str:
        """The worst in words."""
        value, name, step = self.worst
        if value:
            return f"at worst {share(value)} {WORDS[self.measure].format(format=self.format)} ({name or 'the model'}, step {number(step)})"
        return "none comes near its limit" if self.measure == "overflow" else "none is too small for all its bits"


def views(samples: Sequence[LayerSample]) -> list[View]:
    """One view for each kind of tensor, format and measure, the kinds in the order of their first sample."""
    groups: dict[tuple[str, str], list[LayerSample]] = {}
    for sample in samples:
        groups.setdefault((sample.kind, sample.format), []).append(sample)
    made = []
    for (kind, form), members in groups.items():
        names = tuple(dict.fromkeys(name for sample in members for name in sample.layers))
        steps = tuple(sorted({sample.step for sample in members}))
        row, column = {name: i for i, name in enumerate(names)}, {step: j for j, step in enumerate(steps)}
        tables = {which: np.full((len(names), len(steps)), np.nan) for which in ("underflow", "overflow", "nonfinite")}
        for sample in members:
            j = column[sample.step]
            for name, numbers in sample.layers.items():
                for which, table in tables.items():
                    table[row[name], j] = getattr(numbers, which)
        bad = np.nan_to_num(tables["nonfinite"], nan=0.0)
        made += [View(kind, measure, form, names, steps, tables[measure], bad) for measure in MEASURES if form != "fp32" or measure == "overflow"]
    return made


def chart(run: History, name: str, title: str) -> Chart | None:
    """The heat map of a run, one view of it at a time; None where no layers were sampled."""
    found = views(run.records.layers)
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
