"""Verdicts that are read later: the device decides, the optimizer obeys there, and the host learns of it without waiting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.step.result import StepResult


class Reading:
    """Numbers on their way from the device to the host. On a GPU: a copy to pinned memory and an event behind it.

    Waiting for the event waits for what was queued before the copy and not for what was queued since.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._host = values

    def numbers(self) -> list[float]:
        """The numbers; waits for them if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [float(v) for v in self._host.numpy()]


class Pending:
    """A step that was taken and whose result is not known yet. `settle` finds it out, once, and then runs what waited for it."""

    def __init__(self, find: Callable[[], StepResult]) -> None:
        self._find = find
        self._result: StepResult | None = None
        self._waiting: list[Callable[[], object]] = []

    @property
    def is_settled(self) -> bool:
        """Whether the result is known."""
        return self._result is not None

    def then(self, run: Callable[[], object]) -> None:
        """Run something when the result is known; now if it is."""
        if self._result is not None:
            run()
        else:
            self._waiting.append(run)

    def settle(self) -> StepResult:
        """The result; waits for the verdict."""
        if self._result is None:
            self._result = self._find()
            waiting, self._waiting = self._waiting, []
            for run in waiting:
                run()
        return self._result


def can_defer(optimizer: Optimizer) -> bool:
    """Whether this optimizer obeys a verdict on the device: torch's fused ones, from their second step on.

    A first step makes the states, and torch's fused SGD leaves a momentum buffer unset when that step is refused on the device.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups = [group for group in optimizer.param_groups if group.get("momentum") != 0]  # without momentum SGD has no states
    return all(optimizer.state.get(p) for group in groups for p in group["params"] if p.grad is not None)


def divides_itself(optimizer: Optimizer) -> bool:
    """Whether this optimizer can divide the gradients by the scale in its own pass: torch's fused ones, unless hooks would see them scaled."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not optimizer._optimizer_step_pre_hooks


def step_on_device(optimizer: Optimizer, bad: Tensor, scale: float | Tensor) -> None:
    """Call the fused optimizer's step; it divides the gradients by `scale` and does nothing where `bad` is 1."""
    divisor = scale if isinstance(scale, Tensor) else None if scale == 1.0 else torch.full((), scale, device=bad.device, dtype=torch.float32)
    optimizer.found_inf = bad  # type: ignore[attr-defined]  # torch's own protocol with its GradScaler
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
