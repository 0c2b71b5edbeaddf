"""How long a step takes: as a whole, with nothing that looks at it, and op by op for shares.

Where torch uses one thread of a CPU, time is the CPU time of this thread, which other processes' load does not change; elsewhere it is the clock's.
"""

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
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.amp.twins import TWINS
from halfstep.tracing.ledger import Ledger, Op

SHORTEST = 0.06  # seconds that one turn lasts at least: shorter steps are repeated in it
PASSES = 5  # runs in which every op is timed


def clock_for(device: torch.device) -> Callable[[], float]:
    """What gives the seconds that are compared."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


class Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The seconds of every op of a run, in order; on a GPU by events of its stream."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: torch would import its compiler for it, which takes seconds."""
        return False

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuda, self.clock = device.type == "cuda", clock_for(device)
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
            start = self.clock()
            result = func(*args, **kwargs)
            self._marks.append(self.clock() - start)
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
    clock = clock_for(device)
    with without_collection():
        best, total = float("inf"), 0.0
        while total <= shortest:
            _settle(device)
            begun = clock()
            step()
            _settle(device)
            taken = clock() - begun
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
    x, clock = torch.ones(1, device=device), clock_for(torch.device("cpu"))

    def calls() -> float:
        begun = clock()
        for _ in itertools.repeat(None, 200):
            torch.neg(x)
        return (clock() - begun) / 200

    with torch.no_grad():
        bare = min(calls() for _ in range(3))
        with block():
            inside = min(calls() for _ in range(3))
    return max(0.0, inside - bare)


def cost_of_emulation(block: Callable[[], Any]) -> float:
    """Seconds that an emulated product takes in Python, forward and backward, besides its arithmetic; block: opens the precision."""
    x, w, clock = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True), clock_for(torch.device("cpu"))
    low = torch.ones(2, 2, dtype=torch.bfloat16)

    def seconds(work: Callable[[], Any]) -> float:
        begun = clock()
        for _ in range(20):
            work()
        return (clock() - begun) / 20

    def product() -> None:
        torch.autograd.grad(F.linear(x, w).float().sum(), (x, w))

    def emulated() -> None:
        with block():
            product()

    def opened() -> None:
        with block():
            pass

    with torch.enable_grad():
        found = [min(seconds(work) for _ in range(3)) for work in (emulated, opened, product)]
    with torch.no_grad():
        twin, plain = (min(seconds(work) for _ in range(3)) for work in (lambda: TWINS["mm"](low, low), lambda: torch.mm(x, w)))
    return max(0.0, found[0] - found[1] - found[2] - 3 * (twin - plain))
