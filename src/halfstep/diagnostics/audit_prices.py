"""What the ops of a run would take in other formats: the largest distinct ones are timed here in both, in turns; the rest goes by its class.

What an op takes longer in its run than alone, where its operands are in the cache, is taken for memory and goes by its bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from halfstep.amp.twins import TWINS
from halfstep.diagnostics.audit_times import clock_for, without_collection
from halfstep.diagnostics.audit_translate import Cast, Elsewhere
from halfstep.tracing.findings import HALF
from halfstep.tracing.ledger import Op, Operand

COVERED = 0.97  # of the time of a run: distinct ops are timed, largest first, until so much is
LARGEST = 60  # distinct ops that are timed at most
TURN = 3e-4  # seconds that one measurement lasts at least
ROUNDS = 5
FITTING = 2**30  # bytes of the operands of an op that is timed: larger ones go by their class


@dataclass(frozen=True)
class Price:
    """One distinct op: seconds in the format that it ran in and in the other, each alone; share: of the run's time."""

    op: Op
    there: Elsewhere
    here_seconds: float
    there_seconds: float
    share: float
    calls: int

    @property
    def ratio(self) -> float:
        """Of the other format's time to this one's."""
        return self.there_seconds / self.here_seconds

    def of(self, seconds: float) -> float:
        """What the op takes there, of the seconds that it takes in its run: what it takes longer than alone is memory, and goes by bytes."""
        if seconds <= self.here_seconds or self.there.way == "emulated":
            return seconds * self.ratio
        return self.there_seconds + (seconds - self.here_seconds) * self.bytes

    @property
    def bytes(self) -> float:
        """Of the other format's bytes to this one's."""
        here = sum(t.numel * t.dtype.itemsize for t in (*self.op.inputs, *self.op.outputs))
        formats = (*self.there.inputs, *self.there.outputs)
        there = sum(t.numel * d.itemsize for t, d in zip((*self.op.inputs, *self.op.outputs), formats, strict=True))
        return there / here if here else 1.0


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step elsewhere. ops: of its ops, casts: of casts that are made there and not here, outside: of everything between ops.

    prices: of the distinct ops that were timed; covered: the share of the ops' time that they are.
    """

    ops: float
    casts: float
    outside: float
    prices: tuple[Price, ...] = field(default=(), repr=False)
    covered: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.ops + self.casts + self.outside


def predict(
    ops: Sequence[Op], there: Sequence[Elsewhere], whole: float, device: torch.device, modes: float = 0.0, emulation: float = 0.0
) -> Prediction:
    """The step that `ops` are, elsewhere.

    whole: its seconds, as it ran. modes: seconds that each function which Python calls takes longer there (negative: shorter); emulation: those that
    each emulated product takes in Python, besides its arithmetic.
    """
    busy = sum(op.seconds for op in ops)
    scale = min(1.0, whole / busy) if busy else 1.0  # ops that are timed one by one take a little longer
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, (op, new) in enumerate(zip(ops, there, strict=True)):
        groups[_signature(op, new)].append(place)
    ordered = sorted(groups.values(), key=lambda places: -sum(ops[p].seconds for p in places))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout draws
        prices, priced, sure = _priced(ops, there, ordered, busy, device)
    kinds = _by_class(prices)
    seconds = 0.0
    for place, (op, new) in enumerate(zip(ops, there, strict=True)):
        if new.gone:
            continue
        mine = op.seconds * scale
        price = priced.get(place)
        seconds += price.of(mine) if price is not None else mine * (kinds.get(op.cls, 1.0) if _changed(op, new) else 1.0)
    heat = _heat(ops, prices, scale)
    casts = heat * _casts_seconds((c for new in there for c in new.casts), device)
    calls = sum(1 for op in ops if not op.backward and op.called)
    outside = max(0.0, whole - busy * scale) + calls * modes
    outside += emulation * sum(1 for op, new in zip(ops, there, strict=True) if new.way == "emulated" and not op.backward)
    return Prediction(seconds, casts, max(0.0, outside), tuple(prices), sure)


def _priced(
    ops: Sequence[Op], there: Sequence[Elsewhere], groups: Sequence[Sequence[int]], busy: float, device: torch.device
) -> tuple[list[Price], dict[int, Price], float]:
    prices: list[Price] = []
    priced: dict[int, Price] = {}
    sure = spent = 0.0
    for places in groups:
        op, new = ops[places[0]], there[places[0]]
        taken = sum(ops[p].seconds for p in places)
        if spent >= COVERED * busy or len(prices) >= LARGEST:
            break
        spent += taken
        if new.gone:
            sure += taken
            continue
        if not _changed(op, new) and new.way == "as it is" and op.cls != "products":
            sure += taken
            continue
        both = _both(op, new, device)
        if both is None:
            continue
        price = Price(op, new, *both, taken / busy if busy else 0.0, len(places))
        prices.append(price)
        sure += taken
        priced.update(dict.fromkeys(places, price))
    return prices, priced, sure / busy if busy else 0.0


def _changed(op: Op, new: Elsewhere) -> bool:
    return new.way != "as it is" or any(t.dtype != d for t, d in zip(op.inputs, new.inputs, strict=True))


def _signature(op: Op, new: Elsewhere) -> Any:
    """What tells one distinct op from another: function, sizes, formats here and there, and other arguments."""
    others = tree_map_only(Operand, lambda _: None, op.call[1:]) if op.call is not None else ()
    return op.name, tuple((t.shape, t.stride, t.dtype) for t in op.inputs), new.inputs, new.way, new.gone, repr(others)


def _both(op: Op, new: Elsewhere, device: torch.device) -> tuple[float, float] | None:
    """Seconds of one op as it ran and as it would, in turns; None for one that cannot be run alone."""
    if op.call is None or sum(t.numel * 4 for t in op.inputs) > FITTING:
        return None
    here = runner(op, [t.dtype for t in op.inputs], "as it is", device)
    try:
        least = fastest([here, runner(op, new.inputs, new.way, device)], device)
    except (RuntimeError, TypeError):  # torch: formats that do not go together; the narrow ones are then cast, as autograd does
        if op.cls == "products":
            return None
        wide = [torch.float32 if d in HALF else d for d in new.inputs]
        try:
            least = fastest([here, runner(op, wide, "as it is", device)], device)
        except (RuntimeError, TypeError):
            return None
    return least[0], least[1]


def runner(op: Op, formats: Sequence[torch.dtype], way: str, device: torch.device) -> Callable[[], Any]:
    """The op on new operands of these formats, in the order in memory that it had them in; integers are those of the run."""
    assert op.call is not None
    func, args, kwargs = op.call
    waiting = iter(zip(op.inputs, formats, strict=True))
    args, kwargs = tree_map_only(Operand, lambda _: _made(*next(waiting), device), (args, kwargs))
    narrowed = any(t.dtype in HALF for t in op.inputs) and not any(d in HALF for d in formats)
    if narrowed:
        args, kwargs = tree_map_only(torch.dtype, lambda d: torch.float32 if d in HALF else d, (args, kwargs))
    function = TWINS[op.base] if way == "emulated" else func
    return lambda: function(*args, **kwargs)


def _made(t: Operand, dtype: torch.dtype, device: torch.device) -> Tensor:
    if t.value is not None:
        return t.value
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=False)) if t.numel else 0
    if not dtype.is_floating_point:
        return torch.zeros(extent, dtype=dtype, device=device).as_strided(t.shape, t.stride)
    generator = torch.Generator(device=device).manual_seed(0)
    values = torch.rand(extent, device=device, generator=generator, dtype=torch.float32).add_(0.5)  # logarithms and roots stay finite
    return values.to(dtype).as_strided(t.shape, t.stride)


def fastest(runs: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Least seconds of each of some functions, taken in turns so that all see the same machine."""
    least = [float("inf")] * len(runs)
    counts = [1] * len(runs)
    with torch.no_grad(), without_collection():
        for round_ in range(ROUNDS + 1):
            for place, run in enumerate(runs):
                seconds = _seconds(run, counts[place], device)
                if round_:
                    least[place] = min(least[place], seconds)
                else:  # kernels are made in it
                    counts[place] = max(1, min(1000, int(TURN / max(seconds, 1e-7))))
    return least


def _seconds(run: Callable[[], Any], count: int, device: torch.device) -> float:
    if device.type == "cuda":
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begun.record()
        for _ in range(count):
            run()
        ended.record()
        torch.cuda.synchronize(device)
        return float(begun.elapsed_time(ended)) / 1e3 / count
    clock = clock_for(device)
    start = clock()
    for _ in range(count):
        run()
    return (clock() - start) / count


def _by_class(prices: Iterable[Price]) -> dict[str, float]:
    """The ratio of each class of ops, weighed by time, for those that were not timed."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for p in prices:
        sums[p.op.cls][0] += p.share * p.ratio
        sums[p.op.cls][1] += p.share
    return {cls: above / below for cls, (above, below) in sums.items() if below}


def _heat(ops: Sequence[Op], prices: Sequence[Price], scale: float) -> float:
    """By how much ops that only move bytes take longer in the run than alone, where their operands are in the cache."""
    moved = [p for p in prices if p.op.cls != "products"]
    alone = sum(p.here_seconds * p.calls for p in moved)
    busy = sum(op.seconds for op in ops) * scale
    return max(1.0, sum(p.share for p in moved) * busy / alone) if alone else 1.0


def _casts_seconds(casts: Iterable[Cast], device: torch.device) -> float:
    counts: dict[Cast, int] = defaultdict(int)
    for cast in casts:
        counts[cast] += 1
    total = 0.0
    for cast, count in counts.items():
        x = torch.ones(cast.numel, dtype=cast.source, device=device)
        total += count * fastest([lambda x=x, cast=cast: x.to(cast.target)], device)[0]  # type: ignore[misc]  # bound now
    return total
