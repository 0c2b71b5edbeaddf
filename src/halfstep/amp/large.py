"""Linear layers with a large fp32 weight whose 16-bit products are the CPU's own: the cast of the weight, and the way back of its gradient.

What torch's autocast does, with its bits. The gradient goes to fp32 into memory of the step before, where an embedding that shares the weight adds
the rows of the batch (`halfstep.amp.recycled`): instead of a table of zeros and a sum over all of it. Emulated products do so by themselves. A weight
that is used twice is cast twice, and its gradients are summed in fp32, where torch sums them in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.amp import recycled, scratch
from halfstep.amp.mode import Route
from halfstep.amp.rounding import applied, forward_mode, transformed, unseen


class _Low(torch.autograd.Function):
    """The 16-bit copy of an fp32 leaf. Keeps nothing for the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.weight = weight  # a leaf, which the graph does not hold together
        return recycled.low(weight, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if torch.is_grad_enabled() or scratch.is_batch(grad) or recycled.takes(ctx.weight) != torch.float32:
            return grad.float(), None
        return unseen(_widened, grad, ctx.weight), None


def _widened(grad: Tensor, weight: Tensor) -> Tensor | None:
    """The gradient in fp32, or None where it was added to what the backward pass has found for this weight already."""
    total = recycled.so_far(weight)
    if total is not None:
        total.add_(grad)
        return None
    total = recycled.gradient(weight).copy_(grad)
    recycled.begin(weight, total)
    return total


def linear(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
    """torch.nn.functional.linear."""
    x, weight, bias = (args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("input", "weight", "bias")))
    if not isinstance(weight, Tensor) or weight.numel() < recycled.LEAST or not isinstance(x, Tensor) or x.device.type != "cpu":
        return func(*args, **kwargs)
    leaf = weight.dtype == torch.float32 and weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
    if not leaf or x.dtype == torch.float64 or transformed() or forward_mode() or not scratch.plain(weight):
        return func(*args, **kwargs)
    return func(x, applied(_Low, weight, dtype), bias)


ROUTE: dict[Any, Route] = {F.linear: linear}
