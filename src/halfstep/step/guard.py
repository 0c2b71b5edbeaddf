"""A plain `optimizer.step()` on gradients that are still multiplied by a loss scale is an error at that line."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.errors import StepOrderError
from halfstep.step.marks import maker_of, parameters


class Maker(Protocol):
    """What has scaled a loss, and knows whether its gradients are still scaled."""

    stepping: bool

    def still_scales(self, parameter: Tensor) -> bool:
        """Whether the gradient of this parameter is multiplied by the loss scale, and no step of this maker's is being taken."""

    def called(self, parameter: Tensor) -> str:
        """The name of a parameter."""


@functools.cache
def install() -> None:
    """Ask every gradient, before any torch optimizer uses it, whether it is still scaled.

    The hook is torch's own, for all optimizers of the process, and it keeps nothing: the answer is the gradient's maker's. Without
    it a script that forgets `scaler.step` would train on gradients 65,536 times too large and nobody would say so.
    """
    register_optimizer_step_pre_hook(_refuse_scaled)


def _refuse_scaled(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for p in parameters(optimizer):
        if p.grad is None:
            continue
        maker: Maker | None = maker_of(p.grad)
        if maker is None:
            continue
        if maker.stepping:
            return
        if maker.still_scales(p):
            raise StepOrderError(
                f"optimizer.step() was called while the gradient of {maker.called(p)} is still multiplied by the loss scale",
                "Call scaler.step(optimizer) instead, or with an accelerator step() of the optimizer that prepare() returned; "
                "or scaler.unscale_(optimizer) first.",
            )
