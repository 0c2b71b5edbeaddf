"""Lion: steps of one size in every direction, the sign of a moving average of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.optim.base import evaluated
from halfstep.optim.quiet import QuickToClear


class Lion(QuickToClear):
    """Evolved sign momentum with decoupled weight decay, in plain operations over all tensors at once.

    params: tensors, (name, tensor) pairs or groups, as in torch. lr: the size of each step, a third to a tenth of AdamW's.
    betas: decay of the average in the step's direction, and of the one that is kept. weight_decay: three to ten times AdamW's for the same effect.

    State: `exp_avg`, in the dtype of the weight; 16-bit weights and states in bf16 or int8 by `halfstep.optim.wrap`, which the other doors do
    by themselves. Bytes per parameter beside its gradient: 4 + 4 for fp32 weights. Temporary memory: 4 bytes per parameter.
    Raises ConfigError for sparse and complex gradients and for numbers out of range.
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, *, maximize: bool = False
    ) -> None:
        for name, value, good in (
            ("lr", float(lr), float(lr) >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("betas", betas, len(betas) == 2 and all(0 <= b < 1 for b in betas)),
        ):
            if not good:
                raise ConfigError(f"{name}={value} is out of range", "betas lie in [0, 1), the others are 0 or more.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss, if there is one."""
        loss = evaluated(closure)
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if not held:
                continue
            gradients = [_dense(p) for p in held]
            averages = [self._average(p) for p in held]
            lr, (toward, kept) = float(group["lr"]), group["betas"]
            if group["maximize"]:
                gradients = list(torch._foreach_neg(gradients))
            direction = torch._foreach_sub(gradients, averages)
            torch._foreach_mul_(direction, 1 - toward)
            torch._foreach_add_(direction, averages)  # the average as it would be with the first beta
            torch._foreach_sign_(direction)
            torch._foreach_mul_(held, 1 - lr * group["weight_decay"])  # decoupled weight decay
            torch._foreach_add_(held, direction, alpha=-lr)  # every weight moves by lr, or not at all
            del direction
            change = torch._foreach_sub(gradients, averages)
            torch._foreach_mul_(change, 1 - kept)
            torch._foreach_add_(averages, change)  # the average that is kept, with the second beta
        return loss

    def _average(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        average: Tensor = state["exp_avg"]
        return average


def _dense(p: Tensor) -> Tensor:
    gradient = p.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.is_complex():
        raise ConfigError(f"Lion was given a {'sparse' if gradient.is_sparse else 'complex'} gradient", "Use torch.optim.SGD for that parameter.")
    return gradient
