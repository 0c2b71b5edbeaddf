"""Matrix products of 16-bit tensors on a CPU, computed in fp32 with one rounding, forward and backward.

Every product saves its 16-bit operands for the backward pass (2 bytes per element). The arithmetic is that of `halfstep.amp.pieces`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.amp import pieces, recycled, scratch
from halfstep.amp.mode import Route
from halfstep.amp.pieces import Scalar
from halfstep.amp.rounding import applied, eligible, exactly, forward_mode, narrow, recorded, rounded, transformed, unseen


def _fit(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over broadcast dimensions, in fp32, then round it."""
    return narrow(grad.sum_to_size(like.shape), like.dtype)


class _Affine(torch.autograd.Function):
    """y[n, m] = round(beta * c + alpha * a[n, k] @ b[k, m]): c is added before the one rounding, as in a native 16-bit linear layer.

    Saves what torch's own 16-bit linear layer saves, so that either may stand in for the other when a forward pass is computed again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
        return exactly(pieces.affine, a, b, c, beta, alpha)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, c, ctx.beta, ctx.alpha = inputs
        ctx.shape = None if c is None else tuple(c.shape)
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        a, b = ctx.saved_tensors
        return (*unseen(pieces.affine_gradients, grad, a, b, ctx.shape, ctx.beta, ctx.alpha, ctx.needs_input_grad[:3]), None, None)


class _Weighted(torch.autograd.Function):
    """y[n, m] = round(x[n, k] @ w + bias) for a weight that is a parameter, in fp32 or 16 bits: w is it or, turned, its transpose.

    An fp32 weight is rounded here, and its gradient is made in fp32 of 16-bit numbers, piece by piece, without a 16-bit tensor of its size between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
        low = recycled.low(weight, x.dtype)
        b, c = low.detach().mT if turned else low, None if bias is None else narrow(bias, x.dtype)
        ctx.save_for_backward(x, b)
        ctx.turned, ctx.shape, ctx.form = turned, None if bias is None else tuple(bias.shape), None if bias is None else bias.dtype
        ctx.weight, ctx.version = weight, weight._version  # a leaf, which the graph does not hold together
        return exactly(pieces.affine, x, b, c, 1, 1)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, b = ctx.saved_tensors
        weight, need_w = ctx.weight, ctx.needs_input_grad[1]
        found_w = into = sofar = None
        if need_w and not torch.is_grad_enabled() and not scratch.is_batch(grad):
            sofar = recycled.so_far(weight)
            # a tensor of its own and no view: to such a one autograd adds other gradients of a shared weight in place
            found_w = recycled.gradient(weight) if sofar is None else torch.empty_like(weight, dtype=recycled.takes(weight))
            into = found_w.mT if ctx.turned else found_w
        if torch.is_grad_enabled():  # the gradients will be differentiated in their turn, so they are made of the weight itself
            if weight._version != ctx.version:
                raise RuntimeError("a weight was modified by an inplace operation after the product whose second derivative is taken")
            low = narrow(weight, x.dtype)
            b = low.mT if ctx.turned else low
        found_x, found, found_b = unseen(pieces.affine_gradients, grad, x, b, ctx.shape, 1, 1, ctx.needs_input_grad[:3], into)
        if sofar is not None and found_w is not None:
            unseen(sofar.add_, found_w)
            found_w, need_w = None, False
        elif found_w is not None:
            recycled.begin(weight, found_w)
        if need_w and found_w is None:
            found_w = (found.mT if ctx.turned else found).to(weight.dtype)
        return found_x, found_w, None if found_b is None else found_b.to(ctx.form), None


class _Batched(_Affine):
    """y[i, n, m] = round(beta * c + alpha * a[i, n, k] @ b[i, k, m]). Saves what `_Affine` saves."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
        return exactly(pieces.batched, a, b, c, beta, alpha)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        a, b = ctx.saved_tensors
        return (*unseen(pieces.batched_gradients, grad, a, b, ctx.shape, ctx.beta, ctx.alpha, ctx.needs_input_grad[:3]), None, None)


class _Matmul(torch.autograd.Function):
    """y[..., n, m] = round(a[..., n, k] @ b[..., k, m]) where the batches are broadcast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return narrow(exactly(torch.matmul, a.float(), b.float()), a.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return unseen(_matmul_gradients, grad, *ctx.saved_tensors, ctx.needs_input_grad)  # type: ignore[no-any-return]


def _matmul_gradients(grad: Tensor, a: Tensor, b: Tensor, needs: Any) -> tuple[Tensor | None, Tensor | None]:
    wide = grad.float()
    found_a = _fit(torch.matmul(wide, b.float().mT), a) if needs[0] else None
    return found_a, _fit(torch.matmul(a.float().mT, wide), b) if needs[1] else None


def _made(function: Any, compute: Any, *args: Any) -> Tensor:
    """The product with a graph behind it where somebody will differentiate it, and without one where nobody will."""
    if recorded(*args[:2], *(a for a in args[2:3] if isinstance(a, Tensor))):
        return applied(function, *args)  # type: ignore[no-any-return]
    return exactly(compute, *args)  # type: ignore[no-any-return]


def _is_parameter(t: Tensor) -> bool:
    return t.is_leaf and t.requires_grad and torch.is_grad_enabled() and not transformed() and scratch.straight(t)


def affine(a: Tensor, b: Tensor, c: Tensor | None = None, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """round(beta * c + alpha * a[n, k] @ b[k, m]) of 16-bit tensors; c is broadcast."""
    return _made(_Affine, pieces.affine, a, b, c, beta, alpha)


def batched(a: Tensor, b: Tensor, c: Tensor | None = None, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """round(beta * c + alpha * a[i, n, k] @ b[i, k, m]) of 16-bit tensors; c is broadcast."""
    return _made(_Batched, pieces.batched, a, b, c, beta, alpha)


def _flat(t: Tensor) -> Tensor:
    """All rows along the last dimension: (..., k) to (n, k); a vector is one row."""
    return t[None] if t.dim() == 1 else t.flatten(0, -2)


def product(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul's meaning for any number of dimensions, then the rounded product."""
    if b.dim() == 2 and a.dim() > 1 and _is_parameter(b):
        a16 = narrow(a, dtype)
        y: Tensor = applied(_Weighted, _flat(a16), b, None, False)
        return y if a16.dim() == 2 else y.view(*a16.shape[:-1], b.shape[-1])
    a16, b16 = narrow(a, dtype), narrow(b, dtype)
    left, right = a16.dim() == 1, b16.dim() == 1
    a16, b16 = a16[None] if left else a16, b16[:, None] if right else b16
    if b16.dim() == 2:  # a batch of `a` meets one matrix: one flat product
        y = affine(_flat(a16), b16)
        y = y if a16.dim() == 2 else y.view(*a16.shape[:-1], b16.shape[-1])
    elif a16.dim() > 2 and a16.shape[:-2] == b16.shape[:-2]:
        y = batched(a16.flatten(0, -3), b16.flatten(0, -3)).view(*a16.shape[:-1], b16.shape[-1])
    else:
        y = _made(_Matmul, lambda a, b: narrow(torch.matmul(a.float(), b.float()), a.dtype), a16, b16)
    y = y.squeeze(-2) if left else y
    return y.squeeze(-1) if right else y


def _pair(args: Any, kwargs: Any) -> Any:
    """The two operands of a product, or None where the call is not of that form."""
    named = [kwargs[k] for k in ("self", "input", "tensor", "mat2", "other") if k in kwargs]
    operands = (*args, *named)
    return operands if len(operands) == 2 and len(named) == len(kwargs) and eligible(*operands) else None


def matmul(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
    """torch.matmul and `@`."""
    operands = _pair(args, kwargs)
    if operands is None or operands[0].dim() == 0 or operands[1].dim() == 0:
        return func(*args, **kwargs)
    return rounded(dtype, func, *args, **kwargs) if forward_mode() else product(dtype, *operands)


def strict(dims: int) -> Route:
    """torch.mm and torch.bmm, which take operands of so many dimensions and batches of one size."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        operands = _pair(args, kwargs)
        if operands is None or any(t.dim() != dims for t in operands) or (dims == 3 and operands[0].shape[0] != operands[1].shape[0]):
            return func(*args, **kwargs)
        if forward_mode():
            return rounded(dtype, func, *args, **kwargs)
        if dims == 2:
            return product(dtype, *operands)
        return batched(narrow(operands[0], dtype), narrow(operands[1], dtype))

    return route


def rmatmul(dtype: torch.dtype, func: Route, /, right: Any, left: Any) -> Any:
    """`left @ right` as the method of `right`."""
    if not eligible(left, right) or left.dim() == 0 or right.dim() == 0:
        return func(right, left)
    return rounded(dtype, func, right, left) if forward_mode() else product(dtype, left, right)


def linear(dtype: torch.dtype, func: Route, /, input: Any, weight: Any, bias: Any = None) -> Any:
    """torch.nn.functional.linear: inputs of any number of dimensions; the bias is added before the rounding."""
    if not eligible(input, weight, *([] if bias is None else [bias])) or input.dim() == 0:
        return func(input, weight, bias)
    if forward_mode() or weight.dim() not in (1, 2) or (bias is not None and (weight.dim() == 1 or bias.dim() > 1)):
        return rounded(dtype, func, input, weight, bias)
    if weight.dim() == 1:
        return product(dtype, input, weight)
    x = narrow(input, dtype)
    if _is_parameter(weight):
        y = applied(_Weighted, _flat(x), weight, bias, True)
    else:
        y = affine(_flat(x), narrow(weight, dtype).mT, None if bias is None else narrow(bias, dtype))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def added(kind: str) -> Route:
    """torch.addmm, baddbmm and addbmm: a sum with a product, rounded once."""
    names = ("mat1", "mat2") if kind == "addmm" else ("batch1", "batch2")
    dims = 2 if kind == "addmm" else 3

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("input", *names), args, strict=False)) | kwargs
        beta, alpha = given.pop("beta", 1), given.pop("alpha", 1)
        c, a, b = (given.pop("input", given.pop("self", None)), *(given.pop(name, None) for name in names))
        if given or len(args) > 3 or not eligible(c, a, b) or a.dim() != dims or b.dim() != dims or forward_mode() or not _are_numbers(beta, alpha):
            return rounded(dtype, func, *args, **kwargs)
        if kind == "addmm" and beta == alpha == 1 and c.dim() == 1 and _is_parameter(b):
            return applied(_Weighted, narrow(a, dtype), b, c, False)
        c16, a16, b16 = (narrow(t, dtype) for t in (c, a, b))
        if kind == "baddbmm":
            return batched(a16, b16, c16, beta, alpha)
        if kind == "addbmm":  # one product with sums as long as all of the batch
            if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
                return func(*args, **kwargs)
            a16, b16 = a16.transpose(0, 1).flatten(1), b16.flatten(0, 1)
        return affine(a16, b16, c16, beta, alpha)

    return route


def _are_numbers(*values: Any) -> bool:
    return all(type(v) in (int, float) for v in values)
