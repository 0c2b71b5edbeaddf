"""How things are measured: side by side in one process, in turns whose order flips, medians of many, and a library against itself."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDS = 6
COUNTS_WITHIN = 0.05  # how far a library may be from itself for a row to count
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")  # operators that hand a value of the device to the host


@dataclass(frozen=True)
class Timing:
    """Some steps together: seconds until the device was done, and until the host had queued everything."""

    steps: int
    seconds: float
    host: float

    @property
    def ms(self) -> float:
        """Milliseconds a step."""
        return 1e3 * self.seconds / self.steps


class Runner(Protocol):
    """Something that takes steps when told to."""

    def run(self, steps: int, waits: Waits | None = None) -> Timing:
        """Take so many steps and wait for the device. waits: counts how often the host waited for it on the way."""

    def close(self) -> None:
        """Let go of models and memory."""


@dataclass
class Waits:
    """How often the host waited for the device inside `counted()`, by how.

    On a GPU: operations that torch reports as synchronizing, and waits for events and streams. On a CPU, where nothing waits: operators that hand
    a value to the host, which on a GPU would; those of tensors that lie on the host there too (counts of steps) are among them.
    """

    device: torch.device
    found: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """One more of a kind."""
        self.found[what] = self.found.get(what, 0) + 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The block that is counted. On a GPU it must not hold the wait at the end of a measurement."""
        if self.device.type == "cpu":
            with _Lists(self), _Reads(self):
                yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said, _waiting_for(torch.cuda.Event, self), _waiting_for(torch.cuda.Stream, self):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in said:
            if "called a synchronizing" in str(warning.message):
                self.note("operation")

    def per_step(self, steps: int) -> dict[str, float]:
        """The counts of one step, and their sum."""
        each = {what: round(n / steps, 2) for what, n in sorted(self.found.items())}
        return {"all": round(sum(self.found.values()) / steps, 2)} | each


class _Reads(TorchDispatchMode):
    """Counts operators that hand values to the host."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if name in READS:
            self._waits.note(name)
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Counts `tolist`, which passes through no operator."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            self._waits.note("tolist")
        return func(*args, **(kwargs or {}))


@contextmanager
def _waiting_for(kind: Any, waits: Waits) -> Iterator[None]:
    """Counts calls of `synchronize` of events or streams. torch's own report does not show those."""
    before = kind.synchronize

    def synchronize(self: Any) -> None:
        waits.note(kind.__name__.lower())
        before(self)

    kind.synchronize = synchronize
    try:
        yield
    finally:
        kind.synchronize = before


def wait(device: torch.device) -> None:
    """Until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Loop:
    """A runner whose steps are calls of a function."""

    def __init__(self, step: Callable[[], Any], device: torch.device, close: Callable[[], None] = lambda: None) -> None:
        self._step, self._device, self._close = step, device, close

    def run(self, steps: int, waits: Waits | None = None) -> Timing:
        """See Runner."""
        wait(self._device)
        begun = time.perf_counter()
        if waits is None:
            for _ in range(steps):
                self._step()
        else:
            with waits.counted():
                for _ in range(steps):
                    self._step()
        host = time.perf_counter() - begun
        wait(self._device)
        return Timing(steps, time.perf_counter() - begun, host)

    def close(self) -> None:
        """See Runner."""
        self._step = lambda: None
        self._close()


def steps_for(seconds: float, one: Timing, most: int = 50) -> int:
    """How many steps take about so long, by a timing of one or more."""
    return max(1, min(most, round(seconds * one.steps / max(one.seconds, 1e-6))))


def in_turns(runners: Mapping[str, Runner], steps: Mapping[str, int], rounds: int) -> dict[str, list[Timing]]:
    """Every runner in each round, the order flipped from one to the next. One round before them is not counted."""
    taken: dict[str, list[Timing]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name in list(runners)[:: -1 if number % 2 else 1]:
            timing = runners[name].run(steps[name])
            if number:
                taken[name].append(timing)
    return taken


def spread(numbers: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(numbers, n=4) if len(numbers) > 1 else (numbers[0],) * 3
    return {"median": round(statistics.median(numbers), digits), "low": round(low, digits), "high": round(high, digits)}


def ratios(taken: Sequence[Timing], others: Sequence[Timing]) -> dict[str, float]:
    """Time a step over that of another, round by round."""
    return spread([a.ms / b.ms for a, b in zip(taken, others, strict=False)])


def compared(taken: Mapping[str, Sequence[Timing]], twins: tuple[str, str] | None, peers: Sequence[str], ours: Sequence[str]) -> dict[str, Any]:
    """Milliseconds a step, each of ours over the best peer, and of twins (the same library twice) one over the other: whether the rows count."""
    ms = {name: spread([t.ms for t in times]) for name, times in taken.items() if times}
    found: dict[str, Any] = {"ms": ms, "host_ms": {name: spread([1e3 * t.host / t.steps for t in times]) for name, times in taken.items() if times}}
    if twins is not None and all(taken.get(name) for name in twins):
        itself = ratios(taken[twins[1]], taken[twins[0]])
        found |= {"a_over_a": itself, "counts": abs(itself["median"] - 1) <= COUNTS_WITHIN}
    present = [name for name in peers if name in ms]
    if present:
        best = min(present, key=lambda name: ms[name]["median"])
        found |= {"best_peer": best, "over_best_peer": {name: ratios(taken[name], taken[best]) for name in ours if name in ms}}
    return found
