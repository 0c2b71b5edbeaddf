"""Series of numbers over steps, and what of them can be seen: thinned to pixels without losing a peak or a value that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NAMES = {"nan": np.nan, "NaN": np.nan, "inf": np.inf, "Infinity": np.inf, "-inf": -np.inf, "-Infinity": -np.inf}
WHOLE = 2**53  # steps beyond it are no steps
MARKS = 2000  # rows of values that are not finite drawn one by one; above it the nearest are joined


@dataclass(frozen=True, eq=False)
class Series:
    """Values [n] at steps [n], in the order of the steps; NaN and inf stand as such."""

    name: str
    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def finite(self) -> Series:
        """The finite values only."""
        good = np.isfinite(self.values)
        return Series(self.name, self.steps[good], self.values[good])

    @property
    def bad(self) -> int:
        """How many values are not finite."""
        return len(self) - len(self.finite)


EMPTY = Series("", np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Mark:
    """Records one after another that are not finite: from step `first` to `last`, `count` of them, of one kind ("nan", "inf", "-inf")."""

    first: float
    last: float
    count: int
    kind: str


def columns(records: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Every number of some records as a series by its key, by step. A record without a step gets the number of its line."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for i, record in enumerate(records):
        step = record.get("step", i)
        if (type(step) is not int and type(step) is not float) or not -WHOLE < step < WHOLE:
            step = i
        for key, value in record.items():
            kind = type(value)
            if kind is str and value in NAMES:
                value = NAMES[value]
            elif kind is not float and kind is not int:
                continue
            if key not in found:
                found[key] = ([], [])
            found[key][0].append(step)
            found[key][1].append(value)
    return {key: _in_order(Series(key, np.asarray(steps, float), _floats(values))) for key, (steps, values) in found.items()}


def _in_order(series: Series) -> Series:
    """By step; lines of a run that went on from an earlier one may stand in another order."""
    if not np.any(np.diff(series.steps) < 0):
        return series
    order = np.argsort(series.steps, kind="stable")
    return Series(series.name, series.steps[order], series.values[order])


def _floats(values: list[float]) -> Floats:
    """An array of numbers; whole ones that no float holds are infinite."""
    try:
        return np.asarray(values, float)
    except OverflowError:
        return np.asarray([v if isinstance(v, float) else math.inf * (1 if v > 0 else -1) if abs(v) > 2**1023 else float(v) for v in values])


def thinned(series: Series, parts: int) -> Series:
    """At most 2 * parts + 2 finite values that draw the same line: the smallest and the largest of each part, the first and the last."""
    s = series.finite
    n = len(s)
    if n <= 2 * parts + 2:
        return s
    edges = np.arange(parts + 1) * n // parts
    width = int(np.max(np.diff(edges)))
    grid = np.minimum(edges[:-1, None] + np.arange(width)[None, :], edges[1:, None] - 1)  # the last element of a short part stands twice
    values = s.values[grid]
    rows = np.arange(parts)
    picked = np.concatenate([grid[rows, values.argmin(1)], grid[rows, values.argmax(1)], [0, n - 1]])
    kept = np.unique(picked)
    return Series(s.name, s.steps[kept], s.values[kept])


def trend(series: Series, parts: int = 120) -> Series:
    """The median of the finite values of each part, at its middle step; empty for series that are short enough to be read as they are."""
    s = series.finite
    n = len(s)
    if n < 4 * parts:
        return EMPTY
    edges = np.arange(parts + 1) * n // parts
    steps, values = ([float(np.median(part)) for part in np.split(whole, edges[1:-1])] for whole in (s.steps, s.values))
    return Series(s.name, np.asarray(steps), np.asarray(values))


def marks(series: Series, most: int = MARKS) -> list[Mark]:
    """Every value that is not finite, in rows of neighbours of one kind; their counts add up to `series.bad`.

    Of more than `most` rows those with the smallest gaps between them are joined; a joined row of several kinds is called NaN.
    """
    where = np.flatnonzero(~np.isfinite(series.values))
    if not len(where):
        return []
    values = series.values[where]
    kind = np.where(np.isnan(values), 0, np.where(values > 0, 1, 2))
    cuts = np.flatnonzero((np.diff(where) > 1) | (np.diff(kind) != 0)) + 1
    if len(cuts) + 1 > most:
        gaps = np.diff(where)[cuts - 1]
        cuts = np.sort(cuts[np.argsort(-gaps, kind="stable")[: most - 1]])
    found = []
    for part in np.split(np.arange(len(where)), cuts):
        kinds = set(kind[part].tolist())
        name = ("nan", "inf", "-inf")[kinds.pop()] if len(kinds) == 1 else "nan"
        steps = series.steps[where[part]]
        found.append(Mark(float(steps.min()), float(steps.max()), len(part), name))
    return found


def rows_of(series: Series, most: int = 16) -> list[tuple[float, float, str]]:
    """Rows for a table: (step, value, remark), evenly spaced, with the first, the last, the lowest, the highest and the first that is not finite."""
    n = len(series)
    if not n:
        return []
    remarks: dict[int, str] = {int(i): "" for i in np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))}
    finite = np.flatnonzero(np.isfinite(series.values))
    if len(finite):
        remarks[int(finite[series.values[finite].argmin()])] = "lowest"
        remarks[int(finite[series.values[finite].argmax()])] = "highest"
    if series.bad:
        bad = np.flatnonzero(~np.isfinite(series.values))
        remarks[int(bad[-1])] = "last that is not finite"
        remarks[int(bad[0])] = "first that is not finite"
    return [(float(series.steps[i]), float(series.values[i]), remarks[i]) for i in sorted(remarks)]


def rounded(values: Floats, digits: int = 5) -> list[float | None]:
    """For JSON: that many significant digits; None for what is not finite; whole numbers as such."""
    return [_short(v, digits) if math.isfinite(v) else None for v in values.tolist()]


def _short(value: float, digits: int) -> float:
    if value == int(value) and abs(value) < WHOLE:
        return int(value)
    short = float(f"{value:.{digits}g}")
    return short if math.isfinite(short) else value
