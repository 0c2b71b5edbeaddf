"""When the loss scale is calibrated, and with which backward passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import ref

import torch
from torch import Tensor, nn

from halfstep.step.buffers import BufferGuard
from halfstep.step.calibration import CannotProbe, calibrate, prober
from halfstep.step.graph import Reached
from halfstep.step.scaling import FollowingScaling, Scaling
from halfstep.step.verdict import Agree

SILENT, HOPELESS, THEN_EVERY = 256, 8, 64  # a loss may tell nothing (gradients all zero, or bad at any scale): look again, but not for ever at each


class Start:
    """Calibrates a following scale at the first loss, and again at one that reaches parameters no calibration has seen."""

    def __init__(self, agree: Agree | None) -> None:
        self._agree = agree
        self._covered: dict[int, ref[Tensor]] = {}  # parameters that a calibration has seen
        self._tries, self._silent = 0, 0
        self.hopeless = False  # gradients of the step at hand are bad at every scale
        self._going_on = False  # the step at hand is one that calibrates: each of its losses is probed

    def _finite(self, loss: Tensor) -> bool:
        """Whether the loss is finite, on all ranks: they probe together or not at all."""
        bad = (~torch.isfinite(loss.detach())).any().float().reshape(1)
        return not bool(self._agree(bad) if self._agree is not None else bad)

    def next_step(self) -> None:
        """A step was taken."""
        self._going_on = self.hopeless = False

    def wants(self, scaling: Scaling, reached: Reached) -> bool:
        """Whether `calibrate` should be called for this loss."""
        if self._going_on:
            return True
        if scaling.wants_calibration:
            self._tries += 1
            return (self._tries <= HOPELESS or self._tries % THEN_EVERY == 0) and (self._silent <= SILENT or self._silent % THEN_EVERY == 0)
        return self._agree is None and self._is_new(scaling, reached)  # ranks probe together, and each may meet other parameters

    def _is_new(self, scaling: Scaling, reached: Reached) -> bool:
        if not isinstance(scaling, FollowingScaling) or not self._covered:
            return False
        known = (p for p in reached.leaves if isinstance(p, nn.Parameter))  # other leaves, inputs for example, are new in each batch
        return any((seen := self._covered.get(id(p))) is None or seen() is not p for p in known)

    def calibrate(self, scaling: Scaling, loss: Tensor, reached: Reached, known: Sequence[Tensor], buffers: BufferGuard) -> None:
        """Probe the graph of `loss` and set the scale. `known`: all parameters whose gradients may be put aside if torch.autograd.grad is refused."""
        leaves = reached.leaves
        if not isinstance(scaling, FollowingScaling) or not leaves or not self._finite(loss):
            self._tries = max(0, self._tries - 1)
            return
        if reached.foreign:
            _say_why(f"{reached.foreign[0]}, a custom autograd Function, may free or overwrite what it saved")
            scaling.calibrated = True
            return
        if reached.hidden and not buffers.has_modules:
            _say_why("batch norms behind activation checkpointing would move their statistics, and nobody has shown them")
            scaling.calibrated = True
            return
        trial = replace(scaling, calibrated=False)
        with buffers.untouched():
            try:
                found = calibrate(trial, prober(loss, leaves, self._agree))
            except CannotProbe as first:
                try:
                    found = calibrate(trial, prober(loss, leaves, self._agree, _putting_aside(known)))
                except CannotProbe:
                    _say_why(str(first))
                    scaling.calibrated = True
                    return
        self.hopeless = self.hopeless or found == "hopeless"
        if found == "silent":
            self._silent, self._tries = self._silent + 1, 0
        if found != "found":
            return
        first_time = not scaling.calibrated
        self._going_on = True
        scale, limit = (trial.scale, trial.limit) if first_time else (min(scaling.scale, trial.scale), min(scaling.limit, trial.limit))
        scaling.calibrate(scale, limit)
        self._covered |= {id(p): ref(p) for p in leaves}
        self._tries = self._silent = 0


def _putting_aside(known: Sequence[Tensor]) -> Callable[[Tensor], Sequence[Tensor]]:
    """A backward pass by `.backward()` whose gradients are taken away again: where autograd.grad is refused (reentrant checkpoints)."""
    if not known:
        raise CannotProbe("no optimizer is known yet")

    def backward(scaled: Tensor) -> list[Tensor]:
        before = [(p, p.grad) for p in known]
        for p in known:
            p.grad = None
        try:
            torch.autograd.backward(scaled, retain_graph=True)
            return [p.grad for p in known if p.grad is not None]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotProbe(str(error)) from error
        finally:
            for p, grad in before:
                p.grad = grad

    return backward


REMEDIES = {
    "donated": "set torch._functorch.config.donated_buffer = False before compiling",
    "custom": "set repeatable = True on its class if its backward pass can run twice",
    "statistics": "call scaler.watch(model) before the first loss",
    "": "call scaler.watch(optimizer) before the first loss, or checkpoint with use_reentrant=False",
}


def _say_why(text: str) -> None:
    remedy = next(remedy for sign, remedy in REMEDIES.items() if sign in text)
    warnings.warn(
        f"the loss scale could not be calibrated, because this graph cannot be differentiated twice ({text.splitlines()[0][:160]}). "
        f"It starts at its initial value and the first steps may be skipped; to calibrate it, {remedy}.",
        stacklevel=5,
    )
