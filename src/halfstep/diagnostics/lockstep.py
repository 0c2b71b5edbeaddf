"""One step of a run beside its reference: each piece of code between two boundaries runs again in the reference, on the numbers of the run."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.amp import backward_context, bind, products_of
from halfstep.checkpoint import seed_everything
from halfstep.diagnostics.boundaries import OUTSIDE, Boundary, Replay, at_least_fp32, computed_again
from halfstep.diagnostics.exact import Cast, Exact
from halfstep.diagnostics.sides import COARSE, Loss, Manner, losses_of, widened
from halfstep.diagnostics.under import device_of

FINEST = 2.0**-20  # of fp32 sums in another order
HUGE = 2.0**100  # a number of this size stands for infinity: a mask
FEW = 0.02  # of the choices (indices, masks) that a module gives: one may fall otherwise where the noise moves none, but no larger share than this


@dataclass(frozen=True)
class Gap:
    """The difference that one piece of code makes at the boundary after it. maker: its module's path, OUTSIDE for the loss.

    what: which tensor. error: the norm of the difference over the norm of the reference's. expected: what the format explains of it. times: their
    quotient. finite: False where the run has inf or NaN and the reference has none. at: the number of the boundary, those of the backward pass after
    all.
    """

    maker: str
    direction: Literal["forward", "backward"]
    what: str
    error: float
    expected: float
    times: float
    finite: bool = True
    at: int = 0


@dataclass(frozen=True)
class Pass:
    """What one forward and backward pass of the twin has shown. lost: where it went another way than the run, or None."""

    passed: list[Boundary]
    loss: Tensor
    gradients: dict[str, Tensor]
    casts: tuple[Cast, ...]
    lost: Boundary | None


class Twin:
    """A copy of a model that runs as the reference, on the weights and the numbers of the run beside it.

    names: paths of the modules of interest by id, of this copy. as_written: casts to 16 bits in the model's code are done.
    """

    def __init__(self, model: nn.Module, how: Manner, loss: Loss, parts: bool, as_written: bool) -> None:
        self.model, self.how, self.loss, self.as_written = widened(model), how, loss, as_written
        self.device = device_of(model)
        self.names = interesting(model, parts)
        self.kinds = {name: type(part).__name__ for name, part in model.named_modules()}
        bind(model, how.policy, self.device)

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Take over weights and buffers of a run; not those buffers that it holds in fewer bits, which are part of what is looked at."""
        own = dict(self.model.named_parameters())
        for name, value in weights.items():
            own[name].copy_(value)
            own[name].grad = None
        for name, b in self.model.named_buffers():
            if name in buffers and buffers[name].dtype == b.dtype and buffers[name].shape == b.shape:
                b.copy_(buffers[name])

    def run(self, batch: Any, seed: int, recorded: list[Boundary], scale: float, noise: float) -> Pass:
        """One forward and backward pass with the recorded numbers in the places of its own."""
        replay = Replay(self.model, self.names, recorded, scale, noise)

        def where(autocast: bool) -> tuple[str, str, str, int]:
            back = computed_again()
            module = replay.behind if back else replay.opener if autocast else replay.module
            return module, self.kinds.get(module, ""), "backward" if back else "forward", len(replay.passed)

        exact = Exact(where)
        seed_everything(seed)
        with ExitStack() as stack:
            if self.how.exact and not self.as_written:
                stack.enter_context(exact)
            with replay:
                loss = losses_of(self.model, batch, self.loss, wide=True)
            stack.enter_context(backward_context(self.how.policy, self.device, products_of(self.model)))
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad.detach() for name, p in self.model.named_parameters() if p.grad is not None}
        for p in self.model.parameters():
            p.grad = None
        return Pass(replay.passed, loss.detach(), gradients, tuple(exact.casts.values()), replay.lost)


def interesting(model: nn.Module, parts: bool) -> dict[int, str]:
    """Paths by id of the modules whose boundaries are looked at: all that are called, or the model alone."""
    return {id(part): name for name, part in model.named_modules() if parts or not name}


@dataclass(frozen=True)
class Step:
    """What is looked at: a step of the run (boundaries, loss, unscaled gradients, the scale) and two passes of its twin, exact and with noise."""

    passed: list[Boundary]
    loss: Tensor
    gradients: dict[str, Tensor]
    scale: float
    exact: Pass
    noisy: Pass
    tested: Manner
    reference: Manner

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Casts to 16 bits in the model's code. Recorded numbers may be 16-bit ones that a cast leaves as they are; those with noise are not."""
        known = {(c.module, c.source, c.made_in): c for c in (*self.noisy.casts, *self.exact.casts)}
        return tuple(sorted(known.values(), key=lambda c: c.at))

    def gaps(self) -> Iterator[Gap]:
        """All differences in the order in which they arise: forward, then backward; not the gradients that the code of a module makes which has
        chosen otherwise (given other indices): they are those of another function.
        """
        allowed, allowed_back = _allowance(self.tested, self.reference)
        form = self.tested.form
        forward = _Limits(form.largest, allowed, form.smallest_subnormal / 2)
        backward = _Limits(form.largest, allowed_back, form.smallest_subnormal / 2 / self.scale, form.largest / 4 / self.scale)
        met = list(zip(self.passed, self.exact.passed, self.noisy.passed, strict=False))
        if self.exact.lost is not None:
            met = met[: self.exact.passed.index(self.exact.lost)]
        chose = set()
        for at, (theirs, own, moved) in enumerate(met):
            for number, values in enumerate(zip(theirs.values, own.values, moved.values, strict=False)):
                gap = _gap(own.maker, "forward", _value(own, number), values, forward, at)
                if gap.error and not _is_number(values[1]):
                    chose.add(own.maker)
                yield gap
        if self.exact.lost is None:
            yield _gap(OUTSIDE, "forward", "the loss", (self.loss, self.exact.loss, self.noisy.loss), forward, len(met))
        left = {name: gradient for name, gradient in self.gradients.items() if name.rpartition(".")[0] not in chose}
        for at, (theirs, own, moved) in enumerate(reversed(met), len(met) + 1):
            for number, (tested, right, noise) in enumerate(zip(theirs.gradients, own.gradients, moved.gradients, strict=False)):
                if tested is not None and right is not None and noise is not None and own.gradient_maker not in chose:
                    values = (at_least_fp32(tested) / self.scale, right, noise)
                    yield _gap(own.gradient_maker, "backward", _gradient(own, number), values, backward, at)
            if own.side == "in":
                for name in [n for n in left if n.rpartition(".")[0] == own.module]:
                    yield from self._of_parameter(name, left.pop(name), backward, at)
        for name, gradient in left.items():
            yield from self._of_parameter(name, gradient, backward, 2 * len(met) + 1)

    def _of_parameter(self, name: str, tested: Tensor, limits: _Limits, at: int) -> Iterator[Gap]:
        right, noise = self.exact.gradients.get(name), self.noisy.gradients.get(name)
        if right is not None and noise is not None:
            yield _gap(name.rpartition(".")[0], "backward", f"the gradient of {name}", (tested, right, noise), limits, at)


@dataclass(frozen=True)
class _Limits:
    """Of a direction. largest: of the tested format. allowed: relative error of one rounding, floor: the absolute one of the smallest numbers.

    beyond: where the reference's numbers are larger, inf is the loss scale's doing.
    """

    largest: float
    allowed: float
    floor: float
    beyond: float = math.inf


def _allowance(tested: Manner, reference: Manner) -> tuple[float, float]:
    """The relative error of one rounding, forward and backward, in the coarser of two formats."""
    forward = max(tested.half_step, reference.half_step, FINEST)
    return forward, max(forward, *(COARSE[how.policy.activations] for how in (tested, reference)))


def noise_of(tested: Manner, reference: Manner) -> float:
    """By how much the numbers of the noisy pass are moved: one rounding."""
    return _allowance(tested, reference)[0]


def _value(own: Boundary, number: int) -> str:
    which = f" {number + 1}" if len(own.values) > 1 else ""
    return f"its output{which}" if own.side == "out" else f"input{which} of {own.module}"


def _gradient(own: Boundary, number: int) -> str:
    which = f" {number + 1}" if len(own.values) > 1 else ""
    return f"the gradient of its input{which}" if own.side == "in" else f"the gradient of output{which} of {own.module or 'the model'}"


def _gap(maker: str, direction: Literal["forward", "backward"], what: str, values: tuple[Tensor, Tensor, Tensor], limits: _Limits, at: int) -> Gap:
    """The difference of the first of `values` from the second, beside that of the third."""
    tested, right, noise = map(reals, values)
    if tested.shape != right.shape:
        return Gap(maker, direction, f"{what}, of another shape,", math.inf, 0.0, math.inf, at=at)
    if not _is_number(right) or not _is_number(tested):
        share, expected = (_changed(t, right) for t in (tested, noise))
        expected += min(1 / max(right.numel(), 1), FEW)
        return Gap(maker, direction, what, share, expected, share / expected, at=at)
    off, size, finite = apart(tested, right, limits.largest, limits.beyond)
    spread, _, _ = apart(noise, right, math.inf, 0.0)
    expected = spread + limits.allowed * size + limits.floor * math.sqrt(right.numel())
    if not finite:
        return Gap(maker, direction, what, math.inf, expected / size if size else 0.0, math.inf, finite=False, at=at)
    times = off / expected if expected else math.inf if off else 0.0
    return Gap(maker, direction, what, off / size if size else math.inf if off else 0.0, expected / size if size else 0.0, times, at=at)


def reals(t: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, another one as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _is_number(t: Tensor) -> bool:
    """Whether rounding moves it; else it is a choice, a count or a mask."""
    return t.is_floating_point() or t.is_complex()


def _changed(t: Tensor, right: Tensor) -> float:
    """The share of numbers that are not those of `right`."""
    return float((t.to(right.device, right.dtype) != right).double().mean()) if right.numel() else 0.0


def apart(tested: Tensor, right: Tensor, largest: float, limit: float = math.inf) -> tuple[float, float, bool]:
    """The norm of the difference, the norm of `right`, and whether `tested` is finite where `right` is and stays below `limit`; over finite numbers.

    largest: that of the tested format; it stands for a number of 2^100 and more (a mask).
    """
    a, r = tested.detach().to(right.device, torch.float64), right.detach().double()
    mask = (r.abs() >= HUGE) & (a.abs() >= min(largest, HUGE)) & (a.sign() == r.sign())
    known = r.isfinite() & (r.abs() < HUGE)
    both = known & a.isfinite()
    broken = r.isfinite() & (r.abs() < limit) & ~a.isfinite() & ~mask
    zero = r.new_zeros(())
    found = torch.stack((torch.where(both, a - r, zero).norm(), torch.where(known, r, zero).norm(), broken.any().double()))
    off, size, bad = found.tolist()
    return off, size, not bad


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers by name."""
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def twin_of(model: nn.Module, how: Manner, loss: Loss, parts: bool, as_written: bool) -> Twin:
    """A twin made of a copy of `model`, which stays as it is."""
    return Twin(copy.deepcopy(model), how, loss, parts, as_written)
