"""How long a step takes: as a whole by the clock, with nothing that looks at it, and op by op for shares."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.tracing.ledger import Ledger, Op

SHORTEST = 0.06  # seconds that one turn lasts at least: shorter steps are repeated in it
PASSES = 5  # runs in which every op is timed


class Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The seconds of every op of a run, in order; on a GPU by events of its stream."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: torch would import its compiler for it, which takes seconds."""
        return False

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuda = device.type == "cuda"
        self.names: list[str] = []
        self._marks: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        if self.cuda:
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begun.record()
            result = func(*args, **kwargs)
            ended.record()
            self._marks.append((begun, ended))
        else:
            start = time.perf_counter()
            result = func(*args, **kwargs)
            self._marks.append(time.perf_counter() - start)
        self.names.append(str(func))
        return result

    @property
    def seconds(self) -> list[float]:
        """Of each op. On a GPU it is waited for."""
        if not self.cuda:
            return self._marks
        torch.cuda.synchronize()
        return [float(begun.elapsed_time(ended)) / 1e3 for begun, ended in self._marks]


def timed_ops(ledger: Ledger, watches: Sequence[Stopwatch], wholes: Sequence[float]) -> tuple[Op, ...]:
    """The ops of a ledger with their seconds as shares of a whole step: the median of several timed runs.

    wholes: seconds of a step by the clock, beside each of the runs. Where a run had other ops (it drew other numbers), those of one name are taken in
    order.
    """
    names = ledger.names
    columns: list[list[float]] = []
    for watch, whole in zip(watches, wholes, strict=True):
        taken = [seconds / whole for seconds in watch.seconds]
        if watch.names != names:
            waiting: dict[str, list[float]] = defaultdict(list)
            for name, share in zip(reversed(watch.names), reversed(taken), strict=True):
                waiting[name].append(share)
            taken = [waiting[name].pop() if waiting[name] else 0.0 for name in names]
        columns.append(taken)
    every = [statistics.median(values) for values in zip(*columns, strict=True)]
    return tuple(replace(op, seconds=every[place]) for op, place in zip(ledger.ops, ledger.places, strict=True))


@dataclass(frozen=True)
class Turns:
    """Seconds of one step, by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.seconds)


def turn(step: Callable[[], Any], device: torch.device, clear: Callable[[], Any], shortest: float = SHORTEST) -> float:
    """Seconds of one step: the least of a few where they are short, so that a turn lasts `shortest`. clear: runs after each, not timed."""
    with without_collection():
        best, total = float("inf"), 0.0
        while total <= shortest:
            _settle(device)
            begun = time.perf_counter()
            step()
            _settle(device)
            taken = time.perf_counter() - begun
            best, total = min(best, taken), total + taken
            clear()
    return best


def ratio(ours: Turns, theirs: Turns) -> float:
    """The median of the ratios within rounds: the machine's mood changes between them."""
    return statistics.median(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def without_collection() -> Iterator[None]:
    """The block in which Python does not look for garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def cost_of_modes(block: Callable[[], Any], device: torch.device) -> float:
    """Seconds that each function of torch takes longer when it is called inside `block()` than outside: what a mode costs."""
    x = torch.ones(1, device=device)

    def calls() -> float:
        begun = time.perf_counter()
        for _ in itertools.repeat(None, 200):
            torch.neg(x)
        return (time.perf_counter() - begun) / 200

    with torch.no_grad():
        bare = min(calls() for _ in range(3))
        with block():
            inside = min(calls() for _ in range(3))
    return max(0.0, inside - bare)
