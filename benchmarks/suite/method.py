"""How contenders are compared: in turns, the order flipped every round, medians of the ratios within rounds.

A contender gives a `Turn`: something that is run again and again, in this process or in one of its own (workers.py); never two at once. The
machine's mood changes over seconds, so two numbers are compared only when they were taken in the same round; the ratio of a library to a second
instance of itself (A/A) says how much mood is left.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

Role = Literal["ours", "twin", "peer", "reference"]
OWN = ("ours", "twin")
SHORTEST = 0.03  # seconds that a turn should last: shorter steps are repeated within it
WARM, WARM_STEPS = 2.0, 14  # seconds and steps of warming up, whichever comes first; two steps at least
SLOW = 5.0  # seconds of a first step that make it the only one
PATIENCE = 40.0  # seconds of warming up after which no further peer begins
FEWEST = 5  # rounds that a comparison needs


def nothing() -> None:
    """No work."""


class Runner(Protocol):
    """What is asked of a contender: of a Turn in this process, or of a Worker (workers.py), which has one in a process of its own."""

    def timed(self, count: int) -> float:
        """Seconds of one run, as the mean of `count` runs one after another; what prepares them is left out."""

    def loss(self) -> float | None:
        """The last loss, None where there is none."""

    def settle(self) -> None:
        """Called between warming up and the first round."""

    def close(self) -> object:
        """End it."""


@dataclass(frozen=True)
class Turn:
    """What is timed. prepare: runs before it, not timed. loss: the last loss, for those that have one. close: ends it."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = nothing
    loss: Callable[[], float | None] = nothing
    close: Callable[[], Any] = nothing

    def timed(self, count: int) -> float:
        """Seconds of one run, as the mean of `count` runs one after another; what prepares them is left out."""
        spent = 0.0
        for _ in range(count):
            self.prepare()
            begun = time.perf_counter()
            self.run()
            spent += time.perf_counter() - begun
        return spent / count

    def settle(self) -> None:
        """What is loaded is not looked at again and again by Python's collector."""
        gc.collect()
        gc.freeze()


@dataclass(frozen=True)
class Contender:
    """One library at one setting.

    role: ours; twin (a second instance of the first of ours: A/A); peer (at the same precision); reference (at another one, for orientation).
    floor: seconds below which no implementation gets, None when there is no estimate.
    """

    name: str
    make: Callable[[], Runner]
    role: Role = "peer"
    floor: float | None = None


@dataclass(frozen=True)
class Claim:
    """What one of ours must reach against another: a ratio, and the one that would be better still. against: a name, or "best peer"."""

    ours: str
    against: str
    reach: float
    stretch: float | None = None


@dataclass
class Taken:
    """What was measured of a contender: a number per round (None where it sat out), its first and last loss.

    first_only: it is so slow that its first step is all that was measured.
    """

    name: str
    role: Role
    floor: float | None = None
    values: list[float | None] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    first_only: bool = False

    @property
    def known(self) -> list[float]:
        """The numbers that there are."""
        return [v for v in self.values if v is not None]


@dataclass(frozen=True)
class Excluded:
    """A peer that was not measured, and why."""

    name: str
    reason: str


class OursFailedError(RuntimeError):
    """One of ours could not be measured: the row has no meaning."""


class TurnFailedError(RuntimeError):
    """What a contender ended in in a process of its own, in one line."""


@dataclass(frozen=True)
class _Running:
    """A contender that is warm. step: the seconds of its quickest step so far."""

    contender: Contender
    runner: Runner
    taken: Taken
    step: float


def take_turns(
    contenders: Sequence[Contender], rounds: int, seconds: float, slow: float = SLOW, patience: float | None = None, needed: Sequence[str] = ()
) -> tuple[list[Taken], list[Excluded]]:
    """Warm everything up, then measure `rounds` rounds (fewer, but at least FEWEST, where ours alone would take longer than `seconds`).

    A peer too slow for its share of the time sits rounds out; one whose first step takes longer than `slow` seconds is known by that step
    alone. A peer that fails is excluded with its error, and so is one whose turn to warm up comes after `patience` seconds (PATIENCE, or
    twice the time). One named in `needed` is always run. One of ours that fails raises OursFailedError.
    """
    patience = max(PATIENCE, 2 * seconds) if patience is None else patience
    begun, running, excluded, known = time.perf_counter(), list[_Running](), list[Excluded](), list[Taken]()
    try:
        for contender in contenders:
            own = contender.role in OWN
            if not own and contender.name not in needed and time.perf_counter() - begun > patience:
                excluded.append(Excluded(contender.name, "no time left: those before it are slow on this machine"))
                continue
            try:
                found = _begun(contender, math.inf if own else slow)
            except Exception as error:  # noqa: BLE001 - whatever a peer fails with is told beside its name
                excluded.append(_left_out(contender, error))
                continue
            if isinstance(found, Taken):
                known.append(found)
            else:
                running.append(found)
        excluded += _measure(running, rounds, seconds)
    finally:
        for entry in running:
            entry.runner.close()
        gc.unfreeze()
    gone = {e.name for e in excluded}
    measured = [entry.taken for entry in running if entry.contender.name not in gone]
    length = max(len(taken.values) for taken in measured)
    for taken in known:
        taken.values += [None] * (length - 1)
    by_name = {taken.name: taken for taken in (*measured, *known)}
    return [by_name[c.name] for c in contenders if c.name in by_name], excluded


def _begun(contender: Contender, limit: float) -> _Running | Taken:
    """The contender warmed up; one whose first step takes longer than the limit is over, and that step is all that is known."""
    runner, taken = contender.make(), Taken(contender.name, contender.role, contender.floor)
    try:
        step = _warm_up(runner, taken, limit)
    except BaseException:
        runner.close()
        raise
    if taken.first_only:
        runner.close()
        return taken
    return _Running(contender, runner, taken, step)


def _left_out(contender: Contender, error: Exception) -> Excluded:
    """A peer that failed; OursFailedError for one of ours."""
    if contender.role in OWN:
        raise OursFailedError(f"{contender.name}: {error!r}") from error
    return Excluded(contender.name, reason(error))


def _measure(running: Sequence[_Running], rounds: int, seconds: float) -> list[Excluded]:
    """The rounds; peers that failed in one take no part in those after it."""
    own = [entry.contender.role in OWN for entry in running]
    costs = [max(entry.step, SHORTEST) for entry in running]
    ours = sum(cost for cost, mine in zip(costs, own, strict=True) if mine)
    count = max(min(rounds, FEWEST), min(rounds, int(seconds / max(ours, SHORTEST))))
    share = max(seconds - count * ours, seconds / 2) / max(1, own.count(False))
    # what can be had for half of the time in FEWEST rounds takes part in so many, whatever its share
    wanted = [
        places(count, count if mine else max(share / cost, FEWEST if FEWEST * cost < seconds / 2 else 0))
        for cost, mine in zip(costs, own, strict=True)
    ]
    gone: dict[str, Excluded] = {}

    def asked(entry: _Running, call: Callable[[], float | None]) -> float | None:
        """What a call gives; None from a peer that has failed, now or before."""
        if entry.contender.name in gone:
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the same in a round
            gone[entry.contender.name] = _left_out(entry.contender, error)
            return None

    for entry in running:
        asked(entry, entry.runner.settle)
    for index in range(count):
        for place in range(len(running))[:: -1 if index % 2 else 1]:
            entry = running[place]
            once = partial(entry.runner.timed, repeats(entry.step))
            entry.taken.values.append(asked(entry, once) if wanted[place][index] else None)
    for entry in running:
        entry.taken.losses.append(asked(entry, entry.runner.loss))
    return list(gone.values())


def _warm_up(runner: Runner, taken: Taken, limit: float) -> float:
    """Steps until nothing is new; the seconds of the quickest. A first step over the limit is taken for the measurement."""
    begun, quickest = time.perf_counter(), math.inf
    for count in range(WARM_STEPS):
        quickest = min(quickest, runner.timed(1))
        if count == 0:
            taken.losses.append(runner.loss())
            if quickest > limit:
                taken.values.append(quickest)
                taken.first_only = True
                return quickest
        if count and time.perf_counter() - begun > WARM:
            break
    return quickest


def repeats(step: float) -> int:
    """How many steps of so many seconds a turn has."""
    return min(50, max(1, math.ceil(SHORTEST / step)))


def places(rounds: int, affordable: float) -> list[bool]:
    """In which rounds a contender takes part that can afford so many turns: evenly spread, at least in one."""
    count = max(1, min(rounds, int(affordable)))
    return [(index + 1) * count // rounds > index * count // rounds for index in range(rounds)]


def ratios(one: Taken, other: Taken) -> list[float]:
    """One to the other, for every round in which both took part; of the medians when there is none or a first step is all that there is."""
    alone = one.first_only or other.first_only  # its step lies outside the rounds
    both = [] if alone else [a / b for a, b in zip(one.values, other.values, strict=True) if a is not None and b is not None]
    return both or [statistics.median(one.known) / statistics.median(other.known)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles; of one number, itself twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def best(taken: Sequence[Taken]) -> Taken | None:
    """The fastest peer at the same precision."""
    peers = [t for t in taken if t.role == "peer"]
    return min(peers, key=lambda t: statistics.median(t.known), default=None)


def reason(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, TurnFailedError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200] or traceback.format_exception_only(error)[0]
