"""`compare`: run a model in two precisions side by side, and name the module where they part."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.checkpoint.randomness import capture, restore
from halfstep.diagnostics.boundaries import OUTSIDE, Boundary, Recorder
from halfstep.diagnostics.comparison import Comparison, Damage, Divergence, judged
from halfstep.diagnostics.exact import Cast
from halfstep.diagnostics.lockstep import Gap, Step, Twin, apart, buffers_of, interesting, noise_of, reals, twin_of
from halfstep.diagnostics.sides import Asked, Loss, Manner, Runner, copied, default_optimizer, manner, widened
from halfstep.diagnostics.under import device_of, refuse_fp64
from halfstep.errors import ConfigError
from halfstep.policy import Policy
from halfstep.tracing.findings import number as shown

STALLED = 0.5  # of the way that the reference's weights come
Model = nn.Module | Callable[[int], nn.Module]


def compare(
    model: Model,
    batches: Iterable[Any],
    precision: str | Policy = "fp16-mixed",
    *,
    reference: str | Policy | None = None,
    steps: int = 20,
    seeds: int = 3,
    optimizer: Asked | None = None,
    loss: Loss = None,
    tolerance: float = 5.0,
    compile: bool = False,
    as_written: bool = False,
) -> Comparison:
    """Train a model in two ways on the same batches, and say where they part: `print(halfstep.compare(model, batches, "fp16-mixed"))`.

    model: an nn.Module, of which copies are trained, or a factory f(seed).
    batches: a list, or anything that gives batches, of which as many as steps are used (fewer are gone through again); each goes to the model as in
        `halfstep.trace`.
    precision: a text or Policy, or "simulate:FORMAT" (`halfstep.simulate`). reference: a precision with weights in fp32; default: fp32, with
        compile=True the precision itself.
    seeds: runs of each side. The first takes the batches in their order and is looked at step by step, the others shuffle them; all count for the
        final loss, the mean over the batches after the last step.
    optimizer: f(parameters), a name or a class, default AdamW at 1e-3. loss: f(outputs) or f(outputs, batch), default: what the model gives.
    tolerance: how many times the error that the format explains still counts as alike.
    compile: the tested side runs under torch.compile; only inputs, outputs and gradients of the whole model are then looked at.
    as_written: casts to 16 bits in the model's own code are part of an fp32 reference too. By default they are not done there, and reported.

    The error of a module is what its own code makes: a third copy runs each piece of code between two boundaries of modules in the reference, on the
    weights and numbers that the tested run gave it, forward and backward, and the difference at the next boundary is that piece's. What the format
    explains of it: one rounding of the result, and how far the result moves when each number that goes in is moved at random by one rounding.

    Time: about six times that of the steps of one seed, and the other seeds. Memory: four models, and the tensors at the boundaries twice. The model
    given, its gradients, and random states are afterwards what they were. Raises ConfigError for arguments that cannot be used (a model that cannot
    be copied, batches that are none, no loss, weights in fp64) and for a reference
    without a finite loss, PolicyError for a precision that cannot work, and whatever the model raises.
    """
    _check(model, steps, seeds, loss, tolerance)
    with _random_states():
        chosen = _Chosen(optimizer if optimizer is not None else default_optimizer, loss, steps, _batches(batches, steps), as_written)
        ledger = _Ledger(tolerance)
        found: list[tuple[float, float]] = []
        tested = theirs = manner("fp32", torch.device("cpu"))
        for seed in range(seeds):
            base = _made(model, seed)
            device = device_of(base)
            tested = manner(precision, device, compile)
            theirs = manner(precision if compile and reference is None else reference if reference is not None else "fp32", device)
            _check_reference(theirs, tested)
            refuse_fp64(base, tested.policy)
            found.append(_train(base, tested, theirs, seed, chosen, ledger if seed == 0 else None))
    resolution = 2 * tested.half_step * abs(found[0][0]) if math.isfinite(found[0][0]) else 0.0
    final = judged([a for a, _ in found], [b for _, b in found], resolution, ledger.losses[0][0])
    divergences = ledger.all(steps, final.verdict)
    if not divergences:
        _check_found(ledger, final.reference, theirs, steps)
    return Comparison(
        str(tested),
        str(theirs),
        steps,
        tolerance,
        divergences,
        ledger.damage(),
        tuple(ledger.losses),
        final,
        ledger.moved,
        len(ledger.refused),
        compile,
    )


@dataclass(frozen=True)
class _Chosen:
    optimizer: Asked
    loss: Loss
    steps: int
    batches: list[Any]
    as_written: bool


def _check(model: Any, steps: int, seeds: int, loss: Any, tolerance: float) -> None:
    if not isinstance(model, nn.Module) and not callable(model):
        raise ConfigError(f"compare was given a {type(model).__name__} in the place of the model", "Pass an nn.Module, or a factory f(seed).")
    for name, count in (("steps", steps), ("seeds", seeds)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{name}={count!r}", "Use a whole number of 1 or more.")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss={loss!r} is no function", "Pass f(outputs) or f(outputs, batch) that gives the loss.")
    if not isinstance(tolerance, int | float) or not tolerance > 0:
        raise ConfigError(f"tolerance={tolerance!r}", "Use a number above 0: how many times the expected error still counts as alike.")


def _check_reference(how: Manner, tested: Manner) -> None:
    policy = how.policy
    if how.simulated or policy.whole or policy.weights != "fp32" or policy.activations != "full":
        raise ConfigError(f"reference={how} does not keep weights and activations in full", "Use fp32, tf32 or a *-mixed precision; swap the two.")
    if str(how) == str(tested) and not how.exact:
        raise ConfigError(f"{tested} was to be compared with itself", "Name another reference, or compile=True.")


def _check_found(ledger: _Ledger, ends: Sequence[float], reference: Manner, steps: int) -> None:
    """Refuse to call a run like a reference that was none."""
    bad = next((f"at step {step}" for step, (loss, _) in enumerate(ledger.losses) if not math.isfinite(loss)), "")
    bad = bad or next((f"after the last step of seed {seed}" for seed, loss in enumerate(ends) if not math.isfinite(loss)), "")
    if bad:
        raise ConfigError(
            f"{bad} the loss is not finite under {reference} either, so there is nothing to compare with",
            "halfstep.trace(model, batch) names the cause; where the first steps are sound, lower the learning rate.",
        )
    if len(ledger.without) == steps:
        raise ConfigError(
            f"no step was applied under {reference} ({ledger.without[0]}), so there is nothing to compare with",
            "halfstep.trace(model, batch) says why.",
        )


def _batches(batches: Any, steps: int) -> list[Any]:
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise ConfigError(f"batches= was given a {type(batches).__name__}", "Pass a list of batches, or a DataLoader: [batch] for one.")
    found = list(islice(batches, steps))
    if not found:
        raise ConfigError("batches= gave none", "Give at least one.")
    return found


def _made(model: Model, seed: int) -> nn.Module:
    if isinstance(model, nn.Module):
        return copied(model)
    made = model(seed)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"the factory gave a {type(made).__name__}", "Let f(seed) return an nn.Module.")
    return copied(made)


@contextmanager
def _random_states() -> Iterator[None]:
    before = capture()
    try:
        yield
    finally:
        restore(before)


def _train(base: nn.Module, tested: Manner, theirs: Manner, seed: int, chosen: _Chosen, ledger: _Ledger | None) -> tuple[float, float]:
    """Both runs of one seed; their final losses (reference, tested). ledger: where the steps are looked at, None: they are not."""
    parts = not tested.compiled
    twin = twin_of(base, theirs, chosen.loss, parts, chosen.as_written) if ledger is not None else None
    reference = Runner(widened(copied(base)), theirs, chosen.loss, chosen.optimizer, wide=True)
    with Runner(base, tested, chosen.loss, chosen.optimizer) as run:
        return _run(reference, run, twin, seed, chosen, ledger)


def _run(reference: Runner, run: Runner, twin: Twin | None, seed: int, chosen: _Chosen, ledger: _Ledger | None) -> tuple[float, float]:
    """The steps of both runs of one seed; their final losses."""
    begun = run.weights()
    order = list(range(len(chosen.batches)))
    for step in range(chosen.steps):
        place = step % len(order)
        if place == 0 and seed:
            random.Random(1000 * seed + step).shuffle(order)
        batch, state = chosen.batches[order[place]], 1_000_003 * (seed + 1) + step
        if ledger is None or twin is None:
            reference.step(batch, state)
            run.step(batch, state)
        else:
            _look(ledger, step, batch, state, reference, run, twin)
    if ledger is not None:
        ledger.moved = _moved(begun, reference.weights(), run.weights())
        ledger.refused, ledger.without = run.refused, reference.refused
    state = 1_000_003 * (seed + 1) - len(chosen.batches)
    return reference.mean_loss(chosen.batches, state), run.mean_loss(chosen.batches, state)


def _look(ledger: _Ledger, step: int, batch: Any, state: int, reference: Runner, run: Runner, twin: Twin) -> None:
    """One step of both runs, and what the twin says of it."""
    parts = not run.how.compiled
    beside = Recorder(reference.model, interesting(reference.model, parts))
    seen = Recorder(run.model, interesting(run.model, parts))
    theirs = reference.step(batch, state, beside)
    weights, buffers = run.weights(), buffers_of(run.model)
    loss = run.step(batch, state, seen)
    twin.take(weights, buffers)
    exact = twin.run(batch, state, seen.passed, run.scale, 0.0)
    twin.take(weights, buffers)
    noisy = twin.run(batch, state, seen.passed, run.scale, noise_of(run.how, twin.how))
    looked = Step(seen.passed, loss, run.gradients, run.scale, exact, noisy, run.how, twin.how)
    ledger.kinds = twin.kinds
    ledger.losses.append((float(theirs), float(loss)))
    ledger.add(step, looked)
    ledger.add_between(beside.passed, seen.passed, run.how.form.largest)


def _moved(begun: dict[str, Tensor], theirs: dict[str, Tensor], own: dict[str, Tensor]) -> float | None:
    """How far weights have come in one run, over how far in the other."""
    far, less = (
        math.sqrt(sum(float((reals(end[n]).double() - reals(w).double()).square().sum()) for n, w in begun.items())) for end in (theirs, own)
    )
    return less / far if far > 0 and math.isfinite(far) else None


@dataclass
class _Ledger:
    """What was found so far."""

    tolerance: float
    kinds: dict[str, str] = field(default_factory=dict)
    losses: list[tuple[float, float]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)  # why steps of the reference were refused
    moved: float | None = None
    _found: dict[tuple[str, str, str], Divergence] = field(default_factory=dict)
    _worst: dict[tuple[str, str], Gap] = field(default_factory=dict)
    _between: dict[str, float] = field(default_factory=dict)

    def add(self, step: int, looked: Step) -> None:
        """Take what one step shows."""
        last = 2 * len(looked.passed) + 2
        here = [(c.at - 0.5 if c.direction == "forward" else last, self._cast(step, c)) for c in looked.casts]
        lost = looked.exact.lost
        if lost is not None:
            path = Divergence(
                "path", step, *self._module(lost.maker), "forward", f"its code goes another way than in the reference, at {lost.module}"
            )
            here.append((float(looked.exact.passed.index(lost)), path))
        for gap in looked.gaps():
            key = (gap.maker, gap.direction)
            known = self._worst.get(key)
            if known is None or gap.times > known.times:
                self._worst[key] = gap
            if gap.times > self.tolerance:
                here.append((gap.at, self._divergence(step, gap)))
        for _, one in sorted(here, key=lambda pair: pair[0]):
            self._found.setdefault((one.module, one.direction, one.fault), one)

    def add_between(self, theirs: list[Boundary], own: list[Boundary], largest: float) -> None:
        """Take how far the outputs of modules are apart in the two runs."""
        for a, b in zip(theirs, own, strict=False):
            if (a.module, a.side) != (b.module, b.side):
                return
            for right, tested in zip(a.values, b.values, strict=False):
                if a.side == "out" and right.is_floating_point() and right.shape == tested.shape:
                    off, size, finite = apart(tested, right, largest)
                    found = off / size if finite and size else 0.0 if finite and not off else math.inf
                    self._between[a.module] = max(self._between.get(a.module, 0.0), found)

    def all(self, steps: int, verdict: str) -> tuple[Divergence, ...]:
        """All divergences, those of the run as a whole last."""
        found = list(self._found.values())
        if self.moved is not None and self.moved < STALLED:
            far = f"they have come {self.moved:.0%} as far as the reference's in {steps} steps, {len(self.refused)} of them not applied"
            found.append(Divergence("update", steps - 1, "", "", "", far))
        if verdict in ("higher", "nonfinite"):
            found.append(
                Divergence(
                    "loss", steps - 1, "", "", "", "it ends higher, by more than seeds explain" if verdict == "higher" else "it ends as NaN or inf"
                )
            )
        return tuple(found)

    def damage(self) -> tuple[Damage, ...]:
        """Modules by the damage that their own code does, worst first."""
        nothing = Gap("", "forward", "", 0.0, 0.0, 0.0)
        made = []
        for maker in dict.fromkeys(key[0] for key in self._worst):
            forward, backward = (self._worst.get((maker, way), nothing) for way in ("forward", "backward"))
            module, kind = self._module(maker)
            made.append(Damage(module, kind, forward.error, forward.times, backward.error, backward.times, self._between.get(maker)))
        return tuple(sorted(made, key=lambda d: -d.times))

    def _module(self, maker: str) -> tuple[str, str]:
        return ("", "") if maker == OUTSIDE else (maker, self.kinds.get(maker, ""))

    def _cast(self, step: int, cast: Cast) -> Divergence:
        module, kind = ("", "") if cast.module == OUTSIDE else (cast.module, cast.kind)
        lost = f"changes numbers by up to {shown(cast.error)} of their size" if math.isfinite(cast.error) else "makes some inf"
        what = f"its code goes through {cast.made_in}, whatever the precision, which {lost}"
        return Divergence("cast", step, module, kind, cast.direction, what, cast.error, source=cast.source)

    def _divergence(self, step: int, gap: Gap) -> Divergence:
        module, kind = self._module(gap.maker)
        if not gap.finite:
            return Divergence(
                "nonfinite", step, module, kind, gap.direction, f"{gap.what} has inf or NaN, and the reference has none", math.inf, gap.expected
            )
        return Divergence("error", step, module, kind, gap.direction, gap.what, gap.error, gap.expected, gap.times)
