"""Samples of layers as maps: what of each tensor, in each sampled step, falls below or beyond its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.diagnostics.records import LayerSample
from halfstep.reports.numbers import number, share

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
                    value = getattr(numbers, which)
                    table[row[name], j] = value if 0 <= value <= 1 else np.nan  # what is no share was not measured
        bad = np.nan_to_num(tables["nonfinite"], nan=0.0)
        made += [View(kind, measure, form, names, steps, tables[measure], bad) for measure in MEASURES if form != "fp32" or measure == "overflow"]
    return made
