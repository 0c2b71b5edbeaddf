"""Random sequences of scale, backward, clip, unscale, step, update and zero_grad against an fp64 reference of unscaled training.

The law: every call either raises StepOrderError, and only where the reference says that the order is wrong, or the weights
are those of the reference within fp32 rounding, and what the StepResult says is true. Weights are finite throughout.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from planted import SPOILS, Planted, multiply, norm_of, spoiled
from torch import Tensor
from torch.optim import SGD, AdamW

from halfstep import amp
from halfstep.amp import GradScaler
from halfstep.errors import StepOrderError

KINDS: dict[str, Any] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: AdamW(ps, lr=0.01),
    "fused": lambda ps: AdamW(ps, lr=0.01, fused=True),
}
LARGEST = 2.0**60  # of a gradient that may be used
LOSSES = {"nan-loss": math.nan, "inf-loss": math.inf}


class Setup(NamedTuple):
    kinds: tuple[str, ...]
    shared: str  # "nothing", "losses" (each reaches the next optimizer's weights too) or "weights" (one vector is in all optimizers)
    enabled: bool
    strategy: str
    exponent: int
    watched: bool


@dataclass(frozen=True)
class Op:
    name: str
    which: int = 0
    value: Any = None


@dataclass
class Track:
    """What the reference knows of one optimizer."""

    known: bool
    judged: bool = False  # its gradients have been unscaled and nothing was added since
    norm: float | None = None  # at that time
    stepped: bool = False  # with the gradients at hand
    awaits_update: bool = False
    after: int = 0  # the number of the last loss before its last step
    refused: bool = False  # its gradients are left over from a step that was refused: bad ones stay as they were, scaled


@dataclass
class Pair:
    """One parameter: the real one and the reference."""

    real: Tensor
    ideal: Tensor
    form: str = "none"  # of the gradient: none, scaled, true, mixed (scaled added to true: may be refused), mangled (must be refused)
    scale: float = 1.0  # that it was made under
    largest: float = 2.0  # magnitude so far
    losses: dict[int, float] = field(default_factory=dict)  # by number, that its gradient comes from

    def add(self, gradient: Tensor, scale: float, number: int, loss: float) -> None:
        self.losses = ({} if self.form == "none" else self.losses) | {number: loss}
        self.ideal.grad = gradient.clone() if self.ideal.grad is None else self.ideal.grad + gradient
        self.form = {"none": "scaled", "scaled": "scaled", "mangled": "mangled"}.get(self.form, "mixed")
        self.scale = scale


class World:
    """Real and reference side by side."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.count = len(setup.kinds)
        generator = torch.Generator().manual_seed(1)

        def vector(size: int) -> Pair:
            values = 0.5 + torch.rand(size, generator=generator)
            return Pair(values.clone().requires_grad_(), values.double().requires_grad_())

        self.own = [[vector(3), vector(2)] for _ in setup.kinds]
        self.common = [vector(2)] if setup.shared == "weights" else []
        self.real = [KINDS[k]([p.real for p in self.held(i)]) for i, k in enumerate(setup.kinds)]
        self.ideal = [KINDS[k.replace("fused", "adamw")]([p.ideal for p in self.held(i)]) for i, k in enumerate(setup.kinds)]
        self.scaler = GradScaler(None, 2.0**setup.exponent, growth_interval=3, enabled=setup.enabled, strategy=setup.strategy)
        self.scale, self.number = 1.0, 0  # of the last loss
        self.tracks = [Track(known=setup.watched) for _ in setup.kinds]
        if setup.watched:
            for optimizer in self.real:
                self.scaler.watch(optimizer)

    def held(self, which: int) -> list[Pair]:
        return self.own[which] + self.common

    def reached(self, which: int) -> list[Pair]:
        """The parameters in the graph of loss number `which`."""
        following = self.own[(which + 1) % self.count][:1] if self.setup.shared == "losses" and self.count > 1 else []
        return self.held(which) + following

    def all(self) -> list[Pair]:
        return [p for own in self.own for p in own] + self.common

    def owners(self, pairs: list[Pair]) -> list[int]:
        return [i for i in range(self.count) if any(p is q for p in self.held(i) for q in pairs)]

    def gradients(self, which: int) -> list[Tensor]:
        return [p.ideal.grad for p in self.held(which) if p.ideal.grad is not None]

    def fit(self, which: int) -> bool:
        return all(bool((g.abs() <= LARGEST).all()) for g in self.gradients(which))

    def usable(self, which: int) -> bool:
        """Whether its gradients and the losses they come from are fit for a step."""
        loss = self.loss(which)
        return self.fit(which) and (loss is None or math.isfinite(loss))

    def loss(self, which: int) -> float | None:
        """The sum of the losses since its last step that its gradients come from."""
        seen = {n: x for p in self.held(which) if p.ideal.grad is not None for n, x in p.losses.items() if n > self.tracks[which].after}
        return sum(seen.values()) if seen else None

    def disordered(self, which: int) -> bool:
        """Whether gradients of this optimizer came about in a wrong order, so that a refusal is right."""
        return self.setup.enabled and any(p.form in ("mixed", "mangled") for p in self.held(which))

    def attempt(self, call: Callable[[], Any], may_refuse: bool, what: str) -> tuple[Any, bool]:
        """The result of a call and whether it was carried out; fails the test when it is refused without reason."""
        try:
            return call(), True
        except StepOrderError as error:
            refusal = error
        assert may_refuse, f"{what} is in order and was refused: {refusal}"
        assert refusal.remedy
        self.recover()
        return None, False

    def recover(self) -> None:
        """After a refusal, cleared gradients and an update must make everything usable again."""
        event("refused")
        everyone = range(self.count)
        self.run([*(Op("zero", i, True) for i in everyone), Op("update"), *(Op("accumulate", i, ("none", 0, None)) for i in everyone)])
        self.run([*(Op("step", i) for i in everyone), Op("update")])

    def accumulate(self, which: int, value: tuple[str, int, bool | None]) -> None:
        """scale(loss).backward(), with zero_grad between the two when told so; the loss is linear in the weights, its coefficients positive."""
        plant, target, clear = value
        pairs, seen = self.reached(which), []
        inputs = [0.5 + torch.arange(1, p.real.numel() + 1, dtype=torch.float64) / 8 for p in pairs]
        spoils = [plant if i == target % len(pairs) and plant in SPOILS else "none" for i in range(len(pairs))]
        loss = sum(((Planted.apply(p.real, s, []) * x.float()).sum() for p, x, s in zip(pairs, inputs, spoils, strict=True)), torch.zeros(()))
        loss = Planted.apply(loss + LOSSES.get(plant, 0.0), "none", seen)
        scaled = self.attempt(lambda: self.scaler.scale(loss), False, "scale")[0]
        if clear is not None:
            for i in range(self.count):
                self.zero(i, clear)
        wrong = self.setup.enabled and any(p.form not in ("none", "scaled") for p in pairs)
        if not self.attempt(scaled.backward, wrong, "backward")[1]:
            return
        self.scale, self.number = seen[-1], self.number + 1
        for p, x, s in zip(pairs, inputs, spoils, strict=True):
            p.add(spoiled(x, s, self.scale), self.scale, self.number, float(loss.detach()))
        for i in self.owners(pairs):
            track = self.tracks[i]
            track.judged, track.norm, track.stepped, track.refused = False, None, False, False

    def unscale(self, which: int) -> None:
        track, some = self.tracks[which], bool(self.gradients(which))
        twice = self.setup.enabled and (track.judged or all(p.form == "none" for p in self.held(which)))
        if self.attempt(lambda: self.scaler.unscale_(self.real[which]), some and (twice or self.disordered(which)), "unscale_")[1] and some:
            self.judge(which)

    def judge(self, which: int) -> None:
        track = self.tracks[which]
        if not track.judged:
            track.norm = norm_of(self.gradients(which))
        track.judged = track.known = True
        for p in self.held(which):
            if p.form in ("none", "scaled") and p.real.grad is not None:
                p.form = "true"

    def clip(self, which: int, value: tuple[str, float]) -> None:
        pairs = [p for p in (self.all() if which == self.count else self.held(which)) if p.real.grad is not None]
        if pairs:
            self.clip_by_torch(pairs, value[1]) if value[0] == "torch" else self.clip_by_scaler(value[0], pairs, value[1])

    def clip_by_scaler(self, kind: str, pairs: list[Pair], max_norm: float) -> None:
        owners, reals = self.owners(pairs), [p.real for p in pairs]
        call = self.scaler.clip_grad_norm_ if kind == "scaler" else amp.clip_grad_norm_
        if len(owners) > 1 and not all(self.tracks[i].known for i in owners):
            return  # whose gradients they are cannot be known yet: they get one verdict
        wrong = self.setup.enabled and (any(p.form == "none" for p in pairs) or any(self.disordered(i) for i in owners))
        total, done = self.attempt(lambda: call(reals, max_norm), wrong, f"clip by {kind}")
        if not done:
            return
        for i in owners:
            self.judge(i)
        kept = [p for i in owners if self.usable(i) for p in self.held(i)]
        refused = [p for i in owners if not self.usable(i) for p in self.held(i) if not any(p is q for q in kept)]
        rest = [p for p in pairs if not any(p is q for q in refused)]
        norm = norm_of([p.ideal.grad for p in rest]) if rest else 0.0
        multiply([p.ideal for p in rest], min(1.0, max_norm / (norm + 1e-6)))  # by themselves: the others' steps are refused
        if any(self.tracks[i].refused for i in owners):
            return
        if len(rest) == len(pairs):
            assert float(total) == pytest.approx(norm, rel=1e-5)
        elif not all(bool((p.ideal.grad.abs() <= LARGEST).all()) for p in pairs):
            assert not float(total) <= LARGEST, "the norm of bad gradients says so"

    def clip_by_torch(self, pairs: list[Pair], max_norm: float) -> None:
        """torch's own clip: right on unscaled gradients; on scaled ones the step must be refused."""
        forms = {p.form for p in pairs if p.scale != 1}
        if len(forms) > 1 or not all(bool((p.ideal.grad.abs() < 1e12).all()) for p in pairs):
            return  # scaled and unscaled ones together, or squares that overflow in torch: there is no right result
        factor = min(1.0, max_norm / (norm_of([p.ideal.grad for p in pairs]) + 1e-6))
        torch.nn.utils.clip_grad_norm_([p.real for p in pairs], max_norm)
        multiply([p.ideal for p in pairs], factor)
        for p in pairs:
            if self.setup.enabled and p.form == "scaled":
                p.form = "mixed" if p.scale == 1 else "mangled"

    def edit(self, which: int, announced: bool) -> None:
        """Halve gradients between backward and unscaling: in order when announced."""
        pairs = [p for p in self.held(which) if p.form == "scaled" and p.real.grad is not None]
        if not pairs:
            return
        with self.scaler.edits() if announced else contextlib.nullcontext():
            multiply([p.real for p in pairs], 0.5)
        multiply([p.ideal for p in pairs], 0.5)
        for p in pairs:
            if self.setup.enabled and not announced:
                p.form = "mixed" if p.scale == 1 else "mangled"

    def plain(self, which: int) -> None:
        """`optimizer.step()` on gradients that are still scaled must be refused, and change nothing."""
        scaled = [p for p in self.held(which) if p.form == "scaled" and p.scale != 1]
        if self.setup.enabled and scaled and self.tracks[which].known:
            with pytest.raises(StepOrderError):
                self.real[which].step()

    def step(self, which: int) -> None:
        track, gradients = self.tracks[which], self.gradients(which)
        nothing_new = bool(gradients) and not any(bool(g.any()) for g in gradients)
        wrong = self.disordered(which) or (self.setup.enabled and (track.awaits_update or track.stepped or nothing_new))
        result, done = self.attempt(lambda: self.scaler.step(self.real[which]), wrong, "step")
        if done and not gradients:
            assert result.reason == "no-gradients"
        if not done or not gradients:
            return
        assert not any(p.form == "mangled" for p in self.held(which)), f"gradients changed while scaled were used: {result}"
        self.judge(which)
        expected = "applied" if self.usable(which) else "overflow" if (loss := self.loss(which)) is None or math.isfinite(loss) else "nonfinite-loss"
        event(expected)
        assert (result.reason, result.applied, bool(result)) == (expected, expected == "applied", expected == "applied"), result
        self.check_numbers(which, result)
        assert bool(result.culprits) != result.applied
        if result.applied:
            self.ideal[which].step()
        track.stepped, track.awaits_update, track.after = True, True, self.number
        track.refused = not result.applied
        if not self.setup.enabled:  # the same gradients may be used again, and are measured as they are then
            track.judged, track.norm = False, None

    def check_numbers(self, which: int, result: Any) -> None:
        """The numbers of a result. Not where a shared weight's gradient was clipped or cleared through another optimizer, nor of zeros."""
        track, now = self.tracks[which], norm_of(self.gradients(which))
        assert result.scale == self.scale
        if self.setup.shared == "weights" or now == 0:
            return
        if result.applied:
            assert result.grad_norm == pytest.approx(track.norm, rel=1e-5)
            if abs(now - track.norm) > 1e-4 * track.norm:
                assert result.clipped == (now < track.norm)
        elif not self.fit(which):
            assert not result.grad_norm <= LARGEST
        if (loss := self.loss(which)) is not None:
            assert result.loss == pytest.approx(loss, rel=1e-5, nan_ok=True)

    def update(self, value: float | None) -> None:
        self.scaler.update(value)
        scale = self.scaler.get_scale()
        assert 1 <= scale <= 2.0**32
        assert math.frexp(scale)[0] == 0.5
        assert self.setup.enabled or scale == 1
        for track in self.tracks:
            track.awaits_update = False

    def zero(self, which: int, set_to_none: bool) -> None:
        self.real[which].zero_grad(set_to_none)
        self.ideal[which].zero_grad(set_to_none)
        for p in self.held(which):
            p.form = "none"
        for i in range(self.count):
            if all(p.form == "none" for p in self.held(i)):
                track = self.tracks[i]
                track.judged, track.norm, track.stepped, track.refused = False, None, False, False

    def compare(self) -> None:
        for p in self.all():
            assert bool(torch.isfinite(p.real).all())
            p.largest = max(p.largest, float(p.ideal.detach().abs().max()))
            assert float((p.real.detach() - p.ideal.detach()).abs().max()) <= 1e-5 * p.largest, "weights are those of the reference"

    def run(self, ops: list[Op]) -> None:
        for op in ops:
            which = op.which % (self.count + 1 if op.name == "clip" else self.count)
            values = (op.value,) if op.name == "update" else (which,) if op.name in ("unscale", "step", "plain") else (which, op.value)
            getattr(self, op.name)(*values)
            self.compare()


ANY = st.integers(0, 3)
PLANT = st.sampled_from(["none"] * 12 + [*SPOILS, *LOSSES])
ACCUMULATE = st.builds(Op, st.just("accumulate"), ANY, st.tuples(PLANT, ANY, st.sampled_from([None] * 10 + [True, False])))
CLIP = st.builds(Op, st.just("clip"), ANY, st.tuples(st.sampled_from(["scaler", "amp", "torch"]), st.sampled_from([0.25, 1.0, 100.0])))
UNSCALE, STEP, PLAIN = (st.builds(Op, st.just(name), ANY) for name in ("unscale", "step", "plain"))
UPDATE = st.builds(Op, st.just("update"), st.just(0), st.sampled_from([None] * 8 + [2.0**4, 2.0**20]))
ZERO = st.builds(Op, st.just("zero"), ANY, st.booleans())
EDIT = st.builds(Op, st.just("edit"), ANY, st.booleans())
ANYTHING = st.one_of(ACCUMULATE, CLIP, UNSCALE, STEP, UPDATE, ZERO, EDIT, PLAIN)


@st.composite
def rounds(draw: Any, count: int) -> list[Op]:
    """One iteration of a training loop as people write it, at times with a call left out or put in."""
    everyone = range(count)
    ops = [Op("zero", i, draw(st.booleans())) for i in everyone] if draw(st.booleans()) else []
    separate = draw(st.booleans())  # one optimizer after the other, or all together
    for group in [[i] for i in everyone] if separate else [list(everyone)]:
        ops += [Op("accumulate", i, (draw(PLANT), draw(ANY), None)) for _ in range(draw(st.integers(1, 2))) for i in group]
        ops += [Op("unscale", i) for i in group] if draw(st.booleans()) else []
        ops += [draw(CLIP)] if draw(st.booleans()) else []
        ops += [Op("step", i) for i in group]
        ops += [Op("update")] if draw(st.booleans()) or not separate else []
    ops += [Op("update")] if separate else []
    ops += [Op("zero", i, draw(st.booleans())) for i in everyone]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        place = draw(st.integers(0, len(ops) - 1))
        if draw(st.booleans()):
            ops.insert(place, draw(ANYTHING))
        else:
            del ops[place]
    return ops


@st.composite
def runs(draw: Any) -> tuple[Setup, list[Op]]:
    kinds = tuple(draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3)))
    strategy, shared = draw(st.sampled_from(["follow", "stock"])), draw(st.sampled_from(["nothing", "losses", "weights"]))
    setup = Setup(kinds, shared, draw(st.sampled_from([True, True, True, False])), strategy, draw(st.integers(0, 32)), draw(st.booleans()))
    return setup, [op for ops in draw(st.lists(rounds(len(kinds)), min_size=1, max_size=4)) for op in ops]


QUIET = {"deadline": None, "print_blob": False, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=200, derandomize=True, **QUIET)
@given(runs())
def test_every_step_is_refused_for_its_order_or_is_that_of_unscaled_training(run: tuple[Setup, list[Op]]) -> None:
    World(run[0]).run(run[1])


@pytest.mark.slow
@settings(max_examples=20000, **QUIET)
@given(runs())
def test_many_sequences(run: tuple[Setup, list[Op]]) -> None:
    World(run[0]).run(run[1])
