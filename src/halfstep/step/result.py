"""What one optimizer step did: a frozen record that is true when the weights moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor

from halfstep.step.watching import Watch

Reason = Literal["applied", "partly", "accumulating", "overflow", "forward-overflow", "nonfinite-loss", "no-gradients", "stopped"]


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
    reason: "applied"; "partly" (gradients are released one by one, and some were bad: their parameters stayed as they were, and others moved);
        or why not: "accumulating" (micro-batch inside an accumulation window), "overflow" (a gradient is
        inf, NaN or above 2^60), "forward-overflow" (a module's outputs do not fit 16 bits, and would fit fp32), "nonfinite-loss",
        "no-gradients". "stopped" is a name kept for later.
    grad_norm: Euclidean norm of the unscaled gradients before clipping; None when no gradient was measured.
    clipped: the gradients that were used had a smaller norm than that.
    scale: the loss scale the gradients were made under; next_scale: the one the next loss will get.
    replays: how often the step was computed again, at a lower scale each time, before this result.
    culprits: what was not finite: modules and inputs, in the order of the forward pass, if it began there; then the loss and gradients, worst first;
        eight at most, none when applied as a whole.
    pinned: modules that are held in fp32 from now on, because 16 bits did not hold their values in this step.
    stalled: of the elements with a gradient that is not 0, the share whose stored weight (residual included) is what it was before an applied
        step: their updates rounded away. None when it was not asked for.
    detail: in words what a reader of a log should know besides; empty when there is nothing.
    watch: what comes close to a limit: the largest gradient of each parameter, near misses, underflow, outputs of modules, each as last measured.
        `str(result.watch)` is one line when something is close, else empty. None when there was nothing to step with.
    loss: sum of the (unscaled) losses of this step. Reading it may wait for the device.

    On a GPU with a fused optimizer the verdict may still be on its way; reading any field waits for it.
    """

    applied: bool
    reason: Reason
    grad_norm: float | None = None
    clipped: bool = False
    scale: float = 1.0
    next_scale: float = 1.0
    replays: int = 0
    culprits: tuple[Culprit, ...] = ()
    pinned: tuple[str, ...] = ()
    stalled: float | None = None
    detail: str = ""
    loss_tensor: Tensor | None = field(default=None, repr=False, compare=False)
    watch: Watch | None = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.applied

    def settled(self) -> StepResult:
        """This record, once it is known."""
        return self

    @property
    def loss(self) -> float | None:
        """The loss of this step as a number, NaN and inf included; None when no loss was seen."""
        return None if self.loss_tensor is None else float(self.loss_tensor)


def _itself(result: StepResult) -> StepResult:
    return result


FIELDS = frozenset(f.name for f in fields(StepResult))


class DeferredResult(StepResult):
    """A StepResult whose verdict may not have arrived: the first field that is read waits for it."""

    def __init__(self, settle: Callable[[], StepResult], loss_tensor: Tensor | None) -> None:
        object.__setattr__(self, "_settle", settle)
        object.__setattr__(self, "_loss", loss_tensor)

    def __getattribute__(self, name: str) -> Any:
        if name == "loss_tensor":
            return object.__getattribute__(self, "_loss")  # known at once: averaging losses need not wait
        if name in FIELDS:
            return getattr(object.__getattribute__(self, "_settle")(), name)
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        return self.settled() == (other.settled() if isinstance(other, DeferredResult) else other)

    def __hash__(self) -> int:
        return hash(self.settled())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.settled(),)

    def settled(self) -> StepResult:
        """The plain record; waits for the verdict."""
        result: StepResult = object.__getattribute__(self, "_settle")()
        return result
