"""Gradient release: the optimizer steps inside the backward pass, parameter by parameter, and each gradient is freed at once.

A gradient then lives from the operation that makes it to the update of its weight: a castable weight takes 5.06 bytes (2 + 1 in split24, 2.06 of int8
moments) and no lasting gradient. What becomes of a step is known only when its weights have moved, so that

- every tensor is judged by itself: a gradient that is inf, NaN or above 2^60 never reaches its weight, and the result names it;
- the norm over all gradients is known too late to clip by it: a mode says what is done instead;
- a step of which something was applied cannot be run again at a lower loss scale.

Without clipping and with finite gradients, weights and states are those of the plain step, bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import numerics
from halfstep.errors import ConfigError, StepOrderError
from halfstep.hardware import give_back_unused_memory
from halfstep.kernels import kernels_for
from halfstep.optim.attached import Clear, Heard, Passes, Step
from halfstep.optim.attached import handle_of as handle_of
from halfstep.optim.masters import HALF, RELEASES
from halfstep.optim.releasable import refuse, refuse_hooks, refuse_ranks
from halfstep.optim.single import single

logger = logging.getLogger("halfstep")

Clip = Literal["per_parameter", "last"]
LAST_NORM = "released_norm"  # in the first group, so that checkpoints have it: the norm over all gradients of the last good step
KERNEL_DTYPES = (torch.float32, *HALF)
TRIM = 1 << 25  # bytes


def release(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    *,
    clip: Clip | None = None,
    max_norm: float | None = None,
    after_bad: Literal["tensor", "rest"] = "tensor",
    shared: bool = False,
) -> Release:
    """Let `optimizer` update each parameter as soon as a backward pass has its gradient, and free the gradient.

    The loop stays as it is: `scaler.step(optimizer)`, or `optimizer.step()`, closes the books of the step and tells what happened; it updates only
    what the backward pass has not. In an accumulation window only the last backward pass updates: the others run inside `handle.accumulating()` (an
    accelerator and the trainer see to that), and gradients live through the window, 4 bytes each where halfstep sums up those of 16-bit weights.

    optimizer: `halfstep.optim.AdamW`, `SGD`, `Lion`, or any other, wrapped or not, whose parameters do not act on each other (tried here on small
        tensors).
    model: names its parameters in messages.
    clip, max_norm: "per_parameter" clips each gradient to `max_norm` by itself; "last" multiplies all by what would have brought the norm of the
        last good step down to `max_norm` (the first step clips per parameter). The norm of the step itself is known only when its weights have moved.
    after_bad: what follows a gradient that must not be used: "tensor" leaves out that parameter alone; "rest" also those whose gradients come
        later in the step. Either way the loss scale falls for the next step, and nothing of this one is taken back.
    shared: see `Release.shared`. Without it several processes are refused.
    Memory: some KiB of Python objects per parameter tensor. On a GPU each tensor's verdict is read: one wait per tensor.
    Returns the handle; `remove()` undoes it. Raises ConfigError for what cannot work, with the reason. Source of the idea: Lv et al., Full Parameter
    Fine-tuning for Large Language Models with Limited Resources (LOMO), arXiv:2306.09782.
    """
    refuse(optimizer, model, clip, max_norm, after_bad, shared)
    handle = Release(optimizer, model, clip, max_norm, after_bad)
    handle.shared = shared
    return handle


class Source(Protocol):
    """Who makes gradients: the state of a step engine."""

    @property
    def scaling(self) -> Any:
        """Its loss scale; `active` says whether losses are multiplied."""


@dataclass(frozen=True)
class Released:
    """What a step has done, parameter by parameter. True when weights moved.

    numbers: the parameters with a gradient, by their place in the optimizer; squares, peaks: the sum of squares (fp64) and the largest magnitude
    (fp32) of each, multiplied by `scale` as it was. moved: how many were updated. bad: those whose gradient must not be used. clipped: some were.
    held: nothing was updated, since the loss was not finite. share: of the gradients, those subnormal in fp16; None where that was not measured.
    """

    numbers: tuple[int, ...]
    squares: Tensor
    peaks: Tensor
    scale: float
    moved: int
    bad: tuple[int, ...]
    clipped: bool
    held: bool
    share: float | None = None

    def __bool__(self) -> bool:
        return self.moved > 0

    @property
    def applied(self) -> bool:
        """Whether weights moved."""
        return self.moved > 0

    @property
    def grad_norm(self) -> float:
        """The Euclidean norm of all gradients, unscaled, before clipping."""
        return float(self.squares.sum().sqrt().float()) / self.scale


class Release:
    """The handle of `release`. It listens to the parameters until `remove()`.

    clip, max_norm, after_bad: as they were asked for. source: who scales the losses, once known. hold: gradients are added up and nothing is updated.
    names: of the parameters, by id, where a model was given. losses: those of this step, noted by whoever scales them. shared: several processes
    train together, and somebody (an accelerator) makes gradients the mean over all and calls `whole` for each inside the last backward pass.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, clip: Clip | None, max_norm: float | None, after_bad: str) -> None:
        self.clip, self.max_norm, self.after_bad = clip, max_norm, after_bad
        self._single = single(optimizer)
        self._optimizer = ref(optimizer)
        self.names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        self._numbers: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._listening: dict[int, ref[Tensor]] = {}
        self.source: ref[Source] | None = None
        self.hold = self.shared = False
        self.losses: list[Tensor] = []
        self.touched = False  # a backward pass has reached a parameter since this was cleared
        self._removed = False
        self._passes = Passes()
        self._scale, self._smallest, self._armed = 1.0, 0.0, False
        self._first, self._freed = True, 0  # nothing was updated yet; bytes of gradients freed since memory was given back
        self._unfit = False  # nothing that the backward pass at hand reaches may be updated
        self._begun, self._held, self._clipped, self._moved = False, False, False, 0  # from here on: of the step at hand
        self._small, self._present = 0.0, 0.0
        self._seen: dict[int, tuple[float, float]] = {}
        self._bad: set[int] = set()
        self._listen()
        vars(optimizer)["halfstep_release"] = self
        present = vars(optimizer).get("step")
        vars(optimizer)["step"] = present if isinstance(present, Step) else Step(optimizer, present)
        self._clears = vars(optimizer)["zero_grad"] = Clear(optimizer, vars(optimizer).get("zero_grad"))
        RELEASES.add(self)

    def __str__(self) -> str:
        optimizer = self._optimizer()
        if self._removed or optimizer is None:
            return "gradient release, removed"
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        size = sum(p.numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize for p in held)
        clips = f"clipped to {self.max_norm:g} by {CLIPPED[self.clip]}" if self.clip is not None else "not clipped"
        return (
            f"gradient release of {len(held)} parameters of {type(optimizer).__name__}: {size / 2**20:.1f} MiB of gradients are freed one by one, "
            f"{'once ranks have met, ' if self.shared else ''}{clips}; a bad gradient leaves out {LEFT_OUT[self.after_bad]}"
        )

    def remove(self) -> None:
        """Undo it: gradients stay until `zero_grad` again. What a step has done so far stays done, and its `step()` still tells of it."""
        self._removed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._listening = [], {}
        if not self._seen or self._armed:  # or else when the step is over
            self._leave()

    def _leave(self) -> None:
        optimizer = self._optimizer()
        RELEASES.discard(self)
        if optimizer is not None and vars(optimizer).get("halfstep_release") is self:
            del vars(optimizer)["halfstep_release"]  # its step then leads to its own again
        self._clears.leave()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """A block whose backward passes add to gradients and update nothing: all but the last of a step."""
        before, self.hold = self.hold, True
        try:
            yield
        finally:
            self.hold = before

    @property
    def removed(self) -> bool:
        """Whether `remove()` was called."""
        return self._removed

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it is there."""
        return self._optimizer()

    # --- what a step engine tells

    def reaches(self, ids: set[int]) -> bool:
        """Whether some of its parameters have these ids."""
        return not ids.isdisjoint(self._numbers)

    def open(self, scale: float, fit: bool, smallest: float = 0.0) -> None:
        """A backward pass comes through a loss times `scale`. fit: what it reaches may be updated. smallest: see `Released.share`; 0 for not."""
        if not self._removed:
            self._listen()
        self._scale, self._smallest, self._armed = scale, smallest, True
        self._unfit = self._unfit or not fit

    @property
    def held(self) -> bool:
        """Whether nothing more is updated in this step: a loss of it is not finite."""
        return self._held

    def hold_back(self) -> None:
        """Update nothing more in this step."""
        self._held = True

    def shut(self) -> None:
        """The backward pass has ended."""
        self._armed = self._unfit = False

    def drop(self) -> None:
        """Gradients are cleared before `step()`: forget the step if nothing was updated, or its backward pass has failed, or nobody will close it."""
        if self._moved and not (self._armed or self._removed):
            return  # what comes next is refused: one of the two steps would be lost
        if self._moved and self.shared and not self._removed:
            raise StepOrderError(
                f"a backward pass has failed after {self._moved} parameters of this process had been updated, and others may have updated others",
                "End the run and go on from its last checkpoint: weights that differ between processes would go on to do so.",
            )
        if self._moved:
            self._single.end()
            logger.warning("a step was dropped (its pass failed, or release was removed): %d parameters had been updated, and stay so", self._moved)
        self._clear()

    def close(self, scale: float) -> Released:
        """The step is over: update what has a gradient still (not reached by the last backward pass), and tell what was done."""
        optimizer = self._alive()
        self._scale = scale
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                self._numbers[id(p)] = number
                self._take(number, p)
        if self._moved:
            self._single.end()
            self._first = False
        numbers = tuple(sorted(self._seen))
        sums = torch.tensor([self._seen[n][0] for n in numbers], dtype=torch.float64)
        peaks = torch.tensor([self._seen[n][1] for n in numbers], dtype=torch.float32)
        share = self._small / max(self._present, 1.0) if self._smallest else None
        told = Released(numbers, sums, peaks, scale, self._moved, tuple(sorted(self._bad)), self._clipped, self._held, share)
        if told:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
            for after in list(optimizer._optimizer_step_post_hooks.values()):
                after(optimizer, (), {})
        if self.clip == "last" and not self._bad and not self._held and told.grad_norm > 0:  # 0 says nothing about the next
            optimizer.param_groups[0][LAST_NORM] = told.grad_norm
        self._clear()
        return told

    # --- inside the backward pass

    def heard(self, p: Tensor) -> None:
        """The gradient of `p` is there."""
        self.touched = True
        self._held = self._held or self._unfit
        if self.hold or p.grad is None or not self._acts():
            return
        number = self._numbers[id(p)]
        if number in self._seen:
            raise StepOrderError(
                f"{self._called(number, p)} was updated in this step already, and another gradient of it has come",
                "Close each step with scaler.step(optimizer) or optimizer.step(): zero_grad() does not undo it. Run all "
                "backward passes of a step but the last inside handle.accumulating(); with activation checkpointing use use_reentrant=False; "
                "a model that another one is trained through (a GAN's discriminator) needs requires_grad_(False) meanwhile.",
            )
        if not self.shared:
            self._take(number, p)

    def whole(self, p: Tensor) -> None:
        """The gradient of `p` is the mean over all processes. Called in one order in all of them, so that they do the same."""
        self._take(self._numbers[id(p)], p)

    def _acts(self) -> bool:
        """Whether this backward pass is one of a step. An engine says so: others find its scale, or are the user's own (gradients of inputs)."""
        if self.source is not None and self.source() is not None:
            return self._armed
        self._armed = self._passes.begin(self.shut) or self._armed
        return True

    def _take(self, number: int, p: Tensor) -> None:
        """Judge the gradient of one parameter, update it or not, and let go of the gradient."""
        gradient = p.grad
        assert gradient is not None
        if number in self._seen:
            raise StepOrderError(f"{self._called(number, p)} has a gradient and was updated in this step already", "Close each step before the next.")
        if not self._begun:
            if not self.shared:
                refuse_ranks()
            refuse_hooks(self._alive())
            with torch.no_grad():
                self._single.begin()
            self._begun = True
        square, peak, small, present = _measured(gradient, self._smallest)
        self._seen[number] = square, peak
        self._small, self._present = self._small + small, self._present + present
        if not peak <= numerics.LARGEST_GRADIENT * self._scale:
            self._bad.add(number)
        elif not self._held and not (self._bad and self.after_bad == "rest"):
            factor = self._factor(math.sqrt(square) / self._scale)
            self._clipped = self._clipped or factor < 1.0
            with torch.no_grad():
                self._single.step(number, factor / self._scale)
            self._moved += 1
        p.grad = None
        if self._first:  # states are made between gradients that go, and the holes that these leave would add up
            self._freed += gradient.nbytes
            if self._freed > TRIM:
                del gradient
                self._freed = 0
                give_back_unused_memory()

    def _factor(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by to be clipped."""
        if self.clip is None or self.max_norm is None:
            return 1.0
        if self.clip == "last":
            norm = self._alive().param_groups[0].get(LAST_NORM, norm)
        return numerics.clip_factor(norm, self.max_norm)

    def _clear(self) -> None:
        self.shut()  # a backward pass that ended with an error has not
        self._begun = self._held = self._clipped = self.touched = False
        self._moved, self._small, self._present = 0, 0.0, 0.0
        self._seen.clear()
        self._bad.clear()
        self.losses = []
        if self._removed:
            self._leave()

    def _listen(self) -> None:
        """A hook on every parameter that the optimizer has now."""
        optimizer = self._alive()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._numbers = {id(p): number for number, p in enumerate(held)}
        for p in held:
            known = self._listening.get(id(p))
            if p.requires_grad and (known is None or known() is not p):
                other = handle_of(p)
                if other is not None and other is not self:
                    raise ConfigError(f"the gradient of {self._called(self._numbers[id(p)], p)} is released by another handle", "remove() that one.")
                self._hooks.append(p.register_post_accumulate_grad_hook(Heard(self)))
                self._listening[id(p)] = ref(p)

    def called(self, numbers: Sequence[int]) -> str:
        """The first parameters of these, by name, and how many more."""
        held = [p for group in self._alive().param_groups for p in group["params"]]
        names = [self._called(n, held[n]) for n in numbers[:NAMED]]
        return ", ".join(names) + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")

    def _called(self, number: int, p: Tensor) -> str:
        return self.names.get(id(p)) or f"parameter {number} of shape {tuple(p.shape)}"

    def _alive(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer


NAMED = 8  # parameters in a message
CLIPPED = {"per_parameter": "the norm of each gradient", "last": "the norm over all gradients of the last good step"}
LEFT_OUT = {"tensor": "its parameter alone", "rest": "its parameter and those whose gradients come later"}


def _measured(gradient: Tensor, smallest: float) -> list[float]:
    """[sum of squares, largest magnitude, elements below `smallest`, elements that are not 0], the last two of a sample, 0 for a `smallest` of 0.

    In one pass by the kernel of the device where there is one, and read from the device at once.
    """
    values = numerics.stored(gradient)
    kernels = kernels_for(values.device) if values.dtype in KERNEL_DTYPES else None
    if kernels is not None:
        squares, peaks = kernels.squares([values])
        found = [squares[0], peaks[0]]
    else:
        found = [numerics.wide_norm([values], values.device).square(), numerics.largest([values], values.device)]
    counts = numerics.subnormal_counts([values], smallest, values.device) if smallest else (torch.zeros_like(found[0]),) * 2
    read: list[float] = torch.stack([t.double() for t in (*found, *counts)]).tolist()
    return read
