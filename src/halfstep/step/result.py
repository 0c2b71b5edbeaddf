"""What one optimizer step did: a frozen record that is true when the weights moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Reason = Literal["applied", "accumulating", "overflow", "forward-overflow", "nonfinite-loss", "no-gradients", "stopped"]


@dataclass(frozen=True)
class Culprit:
    """Something that was not finite (or too large to use): its name, where it was met, and its worst value."""

    name: str
    direction: Literal["forward", "backward"]
    value: float

    def __str__(self) -> str:
        return f"{self.name} ({self.direction}: {self.value:g})"


@dataclass(frozen=True)
class StepResult:
    """The truth about one optimizer step. `bool(result)` is `result.applied`.

    applied: the weights were updated.
    reason: "applied", or why not: "accumulating" (micro-batch inside an accumulation window), "overflow" (a gradient is
        inf, NaN or above 2^60), "nonfinite-loss", "no-gradients". "forward-overflow" and "stopped" are names kept for later.
    grad_norm: Euclidean norm of the unscaled gradients before clipping; None when no gradient was measured.
    clipped: the gradients that were used had a smaller norm than that.
    scale: the loss scale the gradients were made under; next_scale: the one the next loss will get.
    replays: how often the step was computed again before it was applied (never, in this version).
    culprits: what was not finite, worst first; empty when applied.
    stalled: share of the updates that rounded away; None when not measured (always, in this version).
    loss: sum of the (unscaled) losses of this step. Reading it may wait for the device.
    """

    applied: bool
    reason: Reason
    grad_norm: float | None = None
    clipped: bool = False
    scale: float = 1.0
    next_scale: float = 1.0
    replays: int = 0
    culprits: tuple[Culprit, ...] = ()
    stalled: float | None = None
    loss_tensor: Tensor | None = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.applied

    @property
    def loss(self) -> float | None:
        """The loss of this step as a number, NaN and inf included; None when no loss was seen."""
        return None if self.loss_tensor is None else float(self.loss_tensor)
