"""What comes close to a limit: measured on the device as steps go by, read to the host when somebody asks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from halfstep.numerics import FORMATS
from halfstep.step.marks import gradients, parameters
from halfstep.step.owners import ByOwner

if TYPE_CHECKING:
    from halfstep.step.state import StepState
    from halfstep.step.verdict import Evidence

EVERY = 100  # steps between two samples of what is not measured anyway
CLOSE = 0.5  # share of a format's limit from which on a number is close to it
LISTED, TOLD = 8, 3  # modules in `Watch.outputs`, names in the line on the terminal
FP16_LIMIT = FORMATS["fp16"].largest
_FORMAT_OF = {f.largest: f.name for f in FORMATS.values() if f.dtype is not None}


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """The largest magnitude of each of some tensors, measured together in one step.

    values: fp32 [n], on the device until it is read. limits: for each the largest finite number of its format, inf where nothing limits it.
    scale: what the tensors were multiplied by when they were measured (the loss scale). step: the number of the step.
    """

    names: tuple[str, ...]
    values: Tensor
    limits: tuple[float, ...]
    scale: float = 1.0
    step: int = 0

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The values on the host; the first reading waits for the device."""
        return tuple(self.values.tolist())

    @property
    def shares(self) -> list[tuple[str, float]]:
        """(name, largest / limit), worst first. A name that was measured in several formats comes once, with its worst."""
        return worst_first((name, value / limit) for name, value, limit in zip(self.names, self.numbers, self.limits, strict=True))


def worst_first(found: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Pairs of a name and a number, largest number first, NaN before any; a name comes once."""
    ranked = sorted(found, key=lambda pair: (not math.isnan(pair[1]), -pair[1]))
    once: dict[str, float] = {}
    for name, value in ranked:
        once.setdefault(name, value)
    return list(once.items())


@dataclass(frozen=True)
class Close:
    """A number within a factor of 2 of the largest finite one of its format: of which tensor, and in which step."""

    name: str
    what: str
    value: float
    limit: float
    step: int

    def __str__(self) -> str:
        return f"{self.name or 'the model'} {self.what} {self.value:g} of {self.limit:g} (step {self.step})"


@dataclass(frozen=True, eq=False, repr=False)
class Watch:
    """What a run has come close to, as it was last measured up to this step. The first reading of a field waits for the device.

    step: the number of this step among those applied, from 1 on. nonfinite: the parameters whose gradient was inf or NaN in this very step.
    The rest is as of the last step that measured it: the gradients are measured wherever the step looks at their size anyway (halfstep's
    optimizers on a CPU: always), and else, as the other fields, in the first step and in every 100-th.
    gradients, modules, share, moved, weights: the measurements, still on the device.
    """

    step: int
    nonfinite: tuple[str, ...] = ()
    gradients: Magnitudes | None = None
    modules: tuple[Magnitudes, ...] = ()
    share: Tensor | None = None
    moved: Tensor | None = None
    weights: Magnitudes | None = None

    @property
    def largest(self) -> dict[str, float]:
        """The largest magnitude in the gradient of each parameter, unscaled and not clipped, largest first; NaN before any number."""
        g = self.gradients
        return {} if g is None else dict(worst_first((name, value / g.scale) for name, value in zip(g.names, g.numbers, strict=True)))

    @property
    def underflow(self) -> float | None:
        """The share of the non-zero gradients, as scaled, that fp16 holds with fewer bits than it has. None where they are not fp16's."""
        return None if self.share is None else float(self.share)

    @property
    def stalled(self) -> float | None:
        """The share of updates that left the stored weight (residual included) as it was, from at most 4096 elements of each parameter.

        None before the 100-th step, and where no element had a gradient.
        """
        if self.moved is None:
            return None
        still, wanted = self.moved.tolist()
        return still / wanted if wanted else None

    @property
    def outputs(self) -> tuple[tuple[str, float], ...]:
        """(module, largest output / largest finite number of its format) in the last sampled forward pass: the 8 worst, worst first."""
        return tuple(worst_first(pair for m in self.modules for pair in m.shares)[:LISTED])

    @property
    def near(self) -> tuple[str, ...]:
        """The parameters whose scaled gradient or fp16 weight, and the modules whose output, is within a factor of 2 of its format's limit.

        Worst first. A weight at the limit itself cannot grow any more.

        An output that is inf is among them: where later operations hide it, the step is applied all the same. Gradients that are inf or NaN are not:
        `nonfinite` and the culprits of a refused step have them.
        """
        return tuple(dict.fromkeys(c.name for c in self.close))

    @property
    def close(self) -> list[Close]:
        """What `near` names, with the numbers."""
        gradients = () if self.gradients is None else (("scaled gradient" if self.gradients.scale != 1.0 else "gradient", self.gradients),)
        weights = () if self.weights is None else (("weight", self.weights),)
        found = [
            Close(name, what, value, limit, m.step)
            for what, m in (*(("output", m) for m in self.modules), *gradients, *weights)
            for name, value, limit in zip(m.names, m.numbers, m.limits, strict=True)
            if value >= limit * CLOSE and (math.isfinite(value) or what == "output")
        ]
        return sorted(found, key=lambda c: -c.value / c.limit)

    def __str__(self) -> str:
        """One line when something is close to a limit, else nothing."""
        close = self.close
        if not close:
            return ""
        shown, formats = close[:TOLD], dict.fromkeys(f"{_FORMAT_OF[c.limit]}'s" for c in close[:TOLD])
        more = f", and {len(close) - TOLD} more" if len(close) > TOLD else ""
        return f"close to {' and '.join(formats)} limit: {', '.join(map(str, shown))}{more}"


@dataclass
class _Kept:
    """The last measurements on the gradients of one optimizer, and the parameters that they are about."""

    held: tuple[ref[Tensor], ...] = ()
    known: Any = None  # the engine's table of names, and whether it scaled, when these were taken down
    names: tuple[str, ...] = ()
    limits: tuple[float, ...] = ()
    gradients: Magnitudes | None = None
    share: Tensor | None = None
    moved: Tensor | None = None
    weights: Magnitudes | None = None


class NoRecorder:
    """Who writes down the gradients of a run layer by layer; this one does not."""

    def due(self, number: int) -> bool:
        """Whether the step of that number is to be measured."""
        return False

    def gradients(self, number: int, names: Sequence[str], held: Sequence[Tensor], limits: Sequence[float], scale: float) -> None:
        """The gradients of one optimizer, scaled as the backward pass left them. Nothing may be read to the host here.

        limits: the largest number of the format that limits each, inf where none does.
        """


class Watching:
    """Keeps the last measurements of an engine, by optimizer.

    every: steps between two samples; 0 switches it off. before: steps of the run that this one goes on from. modules: gives the last measurements
    on outputs of modules (`halfstep.amp.sampling.Sampler.sampled`).
    """

    def __init__(self, every: int = EVERY) -> None:
        self.every, self.before = every, 0
        self.modules: Callable[[], Sequence[Magnitudes]] = tuple
        self.recorder = NoRecorder()
        self._kept: ByOwner[_Kept] = ByOwner()
        self._full: set[str] = set()  # fp16 weights that were said to have reached the largest number
        self._earlier: tuple[Magnitudes, ...] = ()  # outputs, of the run that this one goes on from
        self._numbered: list[tuple[Magnitudes, Magnitudes]] = []  # outputs as they came, and with the number of the step

    def number(self, applied: int) -> int:
        """The number of the step that follows `applied` ones."""
        return self.before + applied + 1

    def wants(self, owner: Any, applied: int) -> bool:
        """Whether the gradients of the step after `applied` ones are to be measured though nothing else needs it: the first, every N-th, and those
        that somebody records.
        """
        number = self.number(applied)
        return self.recorder.due(number) or (self.every > 0 and (self._of(owner).gradients is None or self.is_due(number)))

    def is_due(self, number: int) -> bool:
        """Whether the step of that number is sampled. It depends on nothing else, so a resumed run samples what an unbroken one does."""
        return self.every > 0 and (number == 1 or number % self.every == 0)

    def wants_updates(self, applied: int) -> bool:
        """Whether the updates of that step are: not of the first, whose learning rate is 0 wherever it warms up."""
        return self.every > 0 and self.number(applied) > 1 and self.number(applied) % self.every == 0

    def note(self, state: StepState, owner: Any, evidence: Evidence, held: list[Tensor] | None = None) -> None:
        """Keep what was measured on the gradients of `owner`. Nothing is read to the host. held: whose they were, where they are gone."""
        if evidence.peaks is not None:
            self.take_down(state, owner, evidence.peaks, evidence.share, evidence.scale, held)

    def take_down(self, state: StepState, owner: Any, peaks: Tensor, share: Tensor | None, scale: float, held: list[Tensor] | None = None) -> None:
        """The same of its parts: the largest magnitude of each gradient, their share of underflow, and the scale that they bear."""
        number = self.number(state.record(owner).applied)
        recorded = held is None and self.recorder.due(number)
        if not (self.every or recorded):
            return
        kept = self._of(owner)
        self._name(kept, state, [p for p in parameters(owner) if p.grad is not None] if held is None else held)
        if recorded:
            self.recorder.gradients(number, kept.names, gradients(owner), kept.limits, scale)
        if not self.every:
            return
        kept.gradients = Magnitudes(kept.names, peaks, kept.limits, scale, number)
        kept.share = share if share is not None else kept.share

    def note_weights(self, state: StepState, owner: Any) -> None:
        """Measure the fp16 weights of `owner`, which stop at the largest number of their format. Who is there already is said once.

        Elsewhere than on a CPU what was measured the time before is read, which nobody has to wait for.
        """
        held = [p for p in parameters(owner) if p.dtype == torch.float16 and p.numel()]
        if not self.every or not held:
            return
        kept, before = self._of(owner), self._of(owner).weights
        peaks = torch.stack([torch.linalg.vector_norm(p.detach(), math.inf, dtype=torch.float32).to(held[0].device) for p in held])
        names, limits = tuple(state.called(p) for p in held), (FP16_LIMIT,) * len(held)
        kept.weights = Magnitudes(names, peaks, limits, 1.0, self.number(state.record(owner).applied))
        self._say_full(kept.weights if peaks.is_cpu else before)

    def _say_full(self, weights: Magnitudes | None) -> None:
        full = [] if weights is None else [n for n, value in zip(weights.names, weights.numbers, strict=True) if value >= FP16_LIMIT]
        fresh = [name for name in full if name not in self._full]
        self._full.update(fresh)
        if fresh and weights is not None:
            module = fresh[0].rpartition(".")[0] or "MODULE"
            more = f" and {len(fresh) - 1} other parameters have" if len(fresh) > 1 else " has"
            warnings.warn(
                f"{fresh[0]}{more} weights that have reached fp16's largest number, {FP16_LIMIT:g}, by step {weights.step}: they cannot grow. "
                f"Hold the module in fp32 (fp32={module} in the precision), or use bf16.",
                stacklevel=2,
            )

    def watch(self, owner: Any, applied: int, moved: Tensor | None = None) -> Watch | None:
        """What is known in the step after `applied` ones; `moved`: [updates that changed nothing, all], where it was measured. None when off."""
        if not self.every:
            return None
        kept, step = self._of(owner), self.number(applied)
        kept.moved = moved if moved is not None else kept.moved
        if (measured := self.modules()) or self._numbered:
            numbered = {id(m): n for m, n in self._numbered}
            self._numbered = [(m, numbered[id(m)] if id(m) in numbered else replace(m, step=step)) for m in measured]
        modules = tuple([n for _, n in self._numbered]) or self._earlier
        return Watch(step, (), kept.gradients, modules, kept.share, kept.moved, kept.weights)

    def plain(self, owners: Sequence[Any]) -> dict[str, Any]:
        """The last measurements as plain values, for a checkpoint: those on the gradients of each optimizer in turn, and on the modules."""
        kept = [self._of(owner) for owner in owners]
        gradients = [
            {"gradients": _plain(k.gradients), "share": _number(k.share), "moved": _number(k.moved), "weights": _plain(k.weights)} for k in kept
        ]
        return {"optimizers": gradients, "modules": [_plain(n) for _, n in self._numbered] or [_plain(m) for m in self._earlier]}

    def take_over(self, saved: Mapping[str, Any], owners: Sequence[Any]) -> None:
        """Go on from measurements that `plain` gave, for the same optimizers."""
        for owner, one in zip(owners, saved["optimizers"], strict=True):
            kept = self._of(owner)
            kept.gradients = None if one["gradients"] is None else _measured(one["gradients"])
            kept.weights = None if one.get("weights") is None else _measured(one["weights"])
            kept.share = None if one["share"] is None else torch.tensor(one["share"], dtype=torch.float32)
            kept.moved = None if one["moved"] is None else torch.tensor(one["moved"], dtype=torch.float32)
        self._numbered, self._earlier = [], tuple(map(_measured, saved["modules"]))

    def _of(self, owner: Any) -> _Kept:
        kept = self._kept.get(owner)
        return kept if kept is not None else self._kept.put(owner, _Kept())

    def _name(self, kept: _Kept, state: StepState, held: list[Tensor]) -> None:
        """Names and limits of these parameters, found once for all."""
        names, scales = state.names, state.scaling.active
        same = len(held) == len(kept.held) and False not in [r() is p for r, p in zip(kept.held, held, strict=True)]
        if same and kept.known is not None and kept.known[0] is names and kept.known[1] == scales:
            return
        kept.held, kept.known = tuple(ref(p) for p in held), (names, scales)
        kept.names = tuple(state.called(p) for p in held)
        kept.limits = tuple(FP16_LIMIT if scales or p.dtype == torch.float16 else math.inf for p in held)


def _plain(m: Magnitudes | None) -> dict[str, Any] | None:
    if m is None:
        return None
    return {"names": list(m.names), "values": list(m.numbers), "limits": list(m.limits), "scale": m.scale, "step": m.step}


def _measured(saved: Mapping[str, Any]) -> Magnitudes:
    return Magnitudes(
        tuple(saved["names"]), torch.tensor(saved["values"], dtype=torch.float32), tuple(saved["limits"]), saved["scale"], saved["step"]
    )


def _number(t: Tensor | None) -> Any:
    return None if t is None else t.tolist()
