"""Convolutions of 16-bit tensors on a CPU: computed in fp32 with one rounding, forward and backward. Only the 16-bit operands are saved."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.amp import scratch
from halfstep.amp.mode import Route
from halfstep.amp.rounding import applied, eligible, exactly, forward_mode, narrow, recorded, rounded, transformed, unseen
from halfstep.amp.scratch import GRADIENT, LEFT

Geometry = tuple[list[int], list[int], list[int], bool, list[int], int]  # stride, padding, dilation, transposed, output padding, groups


def _wide(place: int, t: Tensor) -> Tensor:
    return scratch.wide_if(t.is_contiguous() and not torch.is_grad_enabled() and scratch.plain(t), place, t)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """round(convolution(x, weight) + bias) of 16-bit tensors."""
    return narrow(torch.convolution(_wide(LEFT, x), weight.float(), None if bias is None else bias.float(), *geometry), x.dtype)


def gradients(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of `convolved` by x, weight and bias, each rounded once; None for one that is not needed."""
    sizes = [weight.shape[1] * geometry[5] if geometry[3] else weight.shape[0]]  # of the bias
    found = torch.ops.aten.convolution_backward(_wide(GRADIENT, grad), _wide(LEFT, x), weight.float(), sizes, *geometry, needs)
    return tuple(narrow(t, x.dtype) if need else None for t, need in zip(found, needs, strict=True))


class _Convolution(torch.autograd.Function):
    """round(convolution(x, weight) + bias): the bias is added before the one rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return exactly(convolved, x, weight, bias, geometry)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (*unseen(gradients, grad, x, weight, ctx.geometry, ctx.needs_input_grad[:3]), None)


def _listed(value: Any, dims: int) -> list[int]:
    """One number, or a list of one or of `dims`, as a list of `dims`."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _around(x: Tensor, weight: Tensor, how: str, dilation: list[int]) -> tuple[Tensor, list[int]]:
    """The padding that keeps the size ("same") or none ("valid"): what is still to add on both sides, after `x` was padded where the sides differ."""
    if how == "valid":
        return x, [0] * len(dilation)
    total = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    odd = [n % 2 for n in total]
    if any(odd):
        x = F.pad(x, [n for one in reversed(odd) for n in (0, one)])
    return x, [n // 2 for n in total]


def convolution(dims: int, transposed: bool) -> Route:
    """torch.nn.functional.conv1d, conv2d, conv3d, and conv_transpose1d, 2d, 3d."""
    names = ("stride", "padding", "output_padding", "groups", "dilation") if transposed else ("stride", "padding", "dilation", "groups")

    def route(dtype: torch.dtype, func: Route, /, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not eligible(input, weight, *([] if bias is None else [bias])):
            return func(input, weight, bias, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        padding = given.pop("padding", 0)
        stride, dilation, extra = (_listed(given.pop(name, n), dims) for name, n in (("stride", 1), ("dilation", 1), ("output_padding", 0)))
        groups = given.pop("groups", 1)
        odd = isinstance(padding, str) and (padding not in ("same", "valid") or (padding == "same" and set(stride) != {1}))
        if given or odd or input.dim() not in (dims + 1, dims + 2) or weight.dim() != dims + 2 or forward_mode() or transformed():
            return rounded(dtype, func, input, weight, bias, *args, **kwargs)
        x, w, b = narrow(input, dtype), narrow(weight, dtype), None if bias is None else narrow(bias, dtype)
        single = x.dim() == dims + 1
        x, around = _around(x, w, padding, dilation) if isinstance(padding, str) else (x, _listed(padding, dims))
        geometry = (stride, around, dilation, transposed, extra, groups)
        x = x[None] if single else x
        y = applied(_Convolution, x, w, b, geometry) if recorded(x, w, b) else exactly(convolved, x, w, b, geometry)
        return y[0] if single else y

    return route
