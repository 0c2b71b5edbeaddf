"""The step stage (all between backward and the next forward), alone: how long it takes, and how that grows with the model."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import step_stage
from benchmarks.suite.doors import imported
from benchmarks.suite.machine import Rates
from benchmarks.suite.method import Contender, Role, Taken, Turn, take_turns
from benchmarks.suite.result import row_of
from benchmarks.suite.workers import apart

if TYPE_CHECKING:
    from benchmarks.suite.rows import Given, Row

PEER = "torch: unscale_, clip, fused AdamW, casts"
ENTRIES: list[tuple[str, Role, str]] = [
    ("split, by GradScaler", "ours", "split, by GradScaler"),
    ("split, by GradScaler again (A/A)", "twin", "split, by GradScaler"),
    (PEER, "peer", "peer"),
    ("fp32 weights, by GradScaler", "ours", "fp32, by GradScaler"),
    ("split and int8 states, by GradScaler", "ours", "split, int8, by GradScaler"),
    ("split, kernels alone", "ours", "split"),
    ("fp32 weights, kernels alone", "ours", "fp32"),
]
USED = ("torch._dynamo", "numba")  # beside what is imported here
GROWING = 4  # the first of these
SIZES = [1_000_000, 4_000_000, 16_000_000, 64_000_000, 135_000_000]
COUNTS = [4, 20, 100, 400]
AMPLE = 1e6  # seconds: nobody sits a round out
MOST = 5  # rounds at each size
TENSORS, SMALL = 100, 1000  # tensors of a model of SIZES; elements of each of COUNTS


def contenders(tensors: int, size: int, rates: Rates, entries: Sequence[tuple[str, Role, str]] = ENTRIES) -> list[Contender]:
    """The ways to take a step over so many tensors of so many elements. The floor is bytes alone: each tensor read or written once."""
    made = argparse.Namespace(tensors=tensors, size=size, dtype="bf16")
    moved = {"peer": 54, "split": 24, "fp32": 42, "int8": 16}

    def turn(kind: str) -> Turn:
        row = step_stage.ROWS[kind](made)
        return Turn(row.run, row.prepare)

    def floor(kind: str) -> float:
        per = moved["int8" if "int8" in kind else kind.partition(",")[0]]
        return rates.floor(0, per * tensors * size)

    return [Contender(name, partial(turn, kind), role, floor(kind)) for name, role, kind in entries]


def stage(row: Row, given: Given) -> dict[str, Any]:
    """20 M parameters in 100 tensors, each contender in a process of its own."""
    imported(USED)
    tensors, size = (4, 1000) if given.quick else (TENSORS, 200_000)
    taken, excluded = take_turns(apart(contenders(tensors, size, given.rates)), given.rounds, given.seconds, slow=math.inf, needed=[PEER])
    return row_of(taken, excluded, row.claims) | {"work": {"parameters": tensors * size, "tensors": tensors}}


def by_parameters(row: Row, given: Given) -> dict[str, Any]:
    """Nanoseconds that a parameter more adds."""
    imported(USED)
    return growth(row, given, [20_000, 40_000] if given.quick else SIZES, lambda n: (TENSORS, n // TENSORS), 1e9)


def by_tensors(row: Row, given: Given) -> dict[str, Any]:
    """Microseconds that a tensor of 1,000 elements more adds."""
    imported(USED)
    return growth(row, given, COUNTS[:2] if given.quick else COUNTS, lambda n: (n, SMALL), 1e6)


def growth(row: Row, given: Given, xs: Sequence[int], shape: Any, unit: float) -> dict[str, Any]:
    """One slope a round for every contender: of the straight line through its times at all sizes. One size at a time, to fit into memory."""
    by_name: dict[str, list[Taken]] = {}
    excluded: list[Any] = []
    for x in xs:
        made = contenders(*shape(x), given.rates, ENTRIES[:GROWING])
        for taken in take_turns(apart(made), min(given.rounds, MOST), AMPLE, slow=math.inf)[0]:
            by_name.setdefault(taken.name, []).append(taken)
    slopes = [sloped(xs, several, unit) for several in by_name.values()]
    series = [
        {"name": name, "x": list(xs), "median": (times := [statistics.median(t.known) for t in several]), "bend": bend(xs, times)}
        for name, several in by_name.items()
    ]
    return row_of(slopes, excluded, row.claims) | {"series": series}


def sloped(xs: Sequence[int], several: Sequence[Taken], unit: float) -> Taken:
    """The slopes of a contender's times at several sizes, round by round."""
    rounds = zip(*(t.known for t in several), strict=True)
    values: list[float | None] = [unit * statistics.linear_regression(xs, times).slope for times in rounds]
    floors = [t.floor or 0.0 for t in several]
    return Taken(several[0].name, several[0].role, unit * statistics.linear_regression(xs, floors).slope, values)


def bend(xs: Sequence[int], times: Sequence[float]) -> float:
    """The power of the size with which time grows between the last two sizes: 1 is linear, below 1 a fixed part still shows."""
    return math.log(times[-1] / times[-2]) / math.log(xs[-1] / xs[-2])
