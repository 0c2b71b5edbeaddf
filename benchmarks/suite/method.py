"""How contenders are compared: in turns, the order flipped every round, medians of the ratios within rounds.

A contender gives a `Turn`: something that is run again and again. Everything is timed on one thread of one process. The machine's
mood changes over seconds, so two numbers are compared only when they were taken in the same round; the ratio of a library to a second instance of
itself (A/A) says how much mood is left.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["ours", "twin", "peer", "reference"]
SHORTEST = 0.03  # seconds that a turn should last: shorter steps are repeated within it
WARM, WARM_STEPS = 2.0, 14  # seconds and steps of warming up, whichever comes first; two steps at least
SLOW = 5.0  # seconds of a first step that make it the only one
PATIENCE = 40.0  # seconds of warming up after which no further peer begins
FEWEST = 5  # rounds that a comparison needs


def nothing() -> None:
    """No work."""


@dataclass(frozen=True)
class Turn:
    """What is timed. prepare: runs before it, not timed. loss: the last loss, for those that have one. close: ends it."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = nothing
    loss: Callable[[], float | None] = nothing
    close: Callable[[], Any] = nothing


@dataclass(frozen=True)
class Contender:
    """One library at one setting.

    role: ours; twin (a second instance of the first of ours: A/A); peer (at the same precision); reference (at another one, for orientation).
    floor: seconds below which no implementation gets, None when there is no estimate.
    """

    name: str
    make: Callable[[], Turn]
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
    """One named in `needed` is always run. One of ours could not be measured: the row has no meaning."""


def take_turns(
    contenders: Sequence[Contender], rounds: int, seconds: float, slow: float = SLOW, patience: float | None = None, needed: Sequence[str] = ()
) -> tuple[list[Taken], list[Excluded]]:
    """Warm everything up, then measure `rounds` rounds (fewer, but at least FEWEST, where ours alone would take longer than `seconds`).

    A peer too slow for its share of the time sits rounds out; one whose first step takes longer than `slow` seconds is known by that step
    alone. A peer that fails is excluded with its error, and so is one whose turn to warm up comes after `patience` seconds (PATIENCE, or
    twice the time). One named in `needed` is always run. One of ours that fails raises OursFailedError.
    """
    patience = max(PATIENCE, 2 * seconds) if patience is None else patience
    begun, running, excluded, known = time.perf_counter(), [], [], []
    for contender in contenders:
        own = contender.role in ("ours", "twin")
        if not own and contender.name not in needed and time.perf_counter() - begun > patience:
            excluded.append(Excluded(contender.name, "no time left: those before it are slow on this machine"))
            continue
        taken = Taken(contender.name, contender.role, contender.floor)
        try:
            turn = contender.make()
            step = _warm_up(turn, taken, math.inf if own else slow)
        except Exception as error:
            if own:
                raise OursFailedError(f"{contender.name}: {error!r}") from error
            excluded.append(Excluded(contender.name, reason(error)))
            continue
        if taken.first_only:
            turn.close()
            known.append(taken)
        else:
            running.append((turn, taken, step))
    _measure(running, rounds, seconds)
    length = max(len(taken.values) for _, taken, _ in running)
    for taken in known:
        taken.values += [None] * (length - 1)
    found = {taken.name: taken for taken in (*(t for _, t, _ in running), *known)}
    return [found[c.name] for c in contenders if c.name in found], excluded


def _measure(running: Sequence[tuple[Turn, Taken, float]], rounds: int, seconds: float) -> None:
    """The rounds."""
    own = [t.role in ("ours", "twin") for _, t, _ in running]
    costs = [max(step, SHORTEST) for _, _, step in running]
    ours = sum(cost for cost, mine in zip(costs, own, strict=True) if mine)
    count = max(min(rounds, FEWEST), min(rounds, int(seconds / max(ours, SHORTEST))))
    share = max(seconds - count * ours, seconds / 2) / max(1, own.count(False))
    # what can be had for half of the time in FEWEST rounds takes part in so many, whatever its share
    wanted = [
        places(count, count if mine else max(share / cost, FEWEST if FEWEST * cost < seconds / 2 else 0))
        for cost, mine in zip(costs, own, strict=True)
    ]
    gc.collect()
    gc.freeze()  # what is loaded is not looked at again and again, in whoever's turn it would fall
    for index in range(count):
        for place in range(len(running))[:: -1 if index % 2 else 1]:
            turn, taken, step = running[place]
            taken.values.append(timed(turn, repeats(step)) if wanted[place][index] else None)
    for turn, taken, _ in running:
        taken.losses.append(turn.loss())
        turn.close()
    gc.unfreeze()


def _warm_up(turn: Turn, taken: Taken, limit: float) -> float:
    """Steps until nothing is new; the seconds of the quickest. A first step over the limit is taken for the measurement."""
    begun, quickest = time.perf_counter(), math.inf
    for count in range(WARM_STEPS):
        quickest = min(quickest, timed(turn, 1))
        if count == 0:
            taken.losses.append(turn.loss())
            if quickest > limit:
                taken.values.append(quickest)
                taken.first_only = True
                return quickest
        if count and time.perf_counter() - begun > WARM:
            break
    return quickest


def timed(turn: Turn, count: int) -> float:
    """Seconds of one run, as the mean of `count` runs one after another; what prepares them is left out."""
    spent = 0.0
    for _ in range(count):
        turn.prepare()
        begun = time.perf_counter()
        turn.run()
        spent += time.perf_counter() - begun
    return spent / count


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
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200] or traceback.format_exception_only(error)[0]
