"""Multiplying a loss by the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Times(torch.autograd.Function):
    """loss * scale. The gradient is multiplied by the scale at the time of the backward pass, which is what gradients at hand are made under.

    When the backward pass makes a graph itself (create_graph=True), a `sign` that requires a gradient is added, times 0: what is
    computed from these gradients can be told by it.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Callable[[], float], sign: Callable[[], Tensor]) -> Tensor:
        ctx.scale, ctx.sign = scale, sign
        return loss * scale()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        scaled = grad * ctx.scale()
        if torch.is_grad_enabled():
            scaled = scaled + 0.0 * ctx.sign().to(scaled.device, scaled.dtype)
        return scaled, None, None


def times(loss: Tensor, scale: Callable[[], float], sign: Callable[[], Tensor]) -> Tensor:
    """`loss` multiplied by the loss scale, in fp32 at least."""
    wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
    scaled: Tensor = _Times.apply(wide, scale, sign)  # type: ignore[no-untyped-call]
    return scaled
