"""Matrix products of 16-bit tensors on a CPU, computed in fp32 with one rounding, forward and backward.

Every product saves its 16-bit operands for the backward pass (2 bytes per element). Large matrices are worked on in pieces: a piece is cast up,
multiplied and rounded while it is in the cache, so that the fp32 copy of a matrix of 12 million elements is never made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.mode import Route
from halfstep.amp.rounding import applied, eligible, exactly, forward_mode, narrow, recorded, rounded, transformed, unseen

Scalar = int | float
WHOLE = 1 << 22  # elements of the largest matrix up to which a product is computed in one piece: 16 MiB in fp32
PIECE = 1 << 20  # elements of a piece: 4 MiB in fp32, which two caches hold


def _in_pieces(elements: int, *tensors: Tensor) -> bool:
    return elements > WHOLE and not transformed() and all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def _pieces(length: int, across: int) -> list[slice]:
    """Stretches of a dimension, so long that a piece of the matrix is PIECE elements; multiples of 64, which the kernels like."""
    step = max(64, PIECE // max(across, 1) // 64 * 64)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _times(t: Tensor, factor: Scalar) -> Tensor:
    return t if factor == 1 else t * factor


def _fit(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over broadcast dimensions, in fp32, then round it."""
    return narrow(grad.sum_to_size(like.shape), like.dtype)


def _sum(c: Tensor | None, a: Tensor, b: Tensor, beta: Scalar, alpha: Scalar) -> Tensor:
    return _times(torch.mm(a, b), alpha) if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _affine(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
    """round(beta * c + alpha * a @ b)."""
    (n, k), m = a.shape, b.shape[1]
    if k != b.shape[0] or not _in_pieces(max(n * k, k * m, n * m), a, b):
        return narrow(_sum(c if c is None else c.float(), a.float(), b.float(), beta, alpha), a.dtype)
    wide = c if c is None else c.float().expand(n, m)
    longest = max(n, k, m)
    if longest == k:  # few results, each a long sum
        parts = _pieces(k, max(n, m))
        total = _sum(wide, a[:, parts[0]].float(), b[parts[0]].float(), beta, alpha)
        for s in parts[1:]:
            total.addmm_(a[:, s].float(), b[s].float(), alpha=alpha)
        return narrow(total, a.dtype)
    out = torch.empty(n, m, dtype=a.dtype)
    if longest == m:
        whole = a.float()
        for s in _pieces(m, max(n, k)):
            out[:, s].copy_(_sum(wide if wide is None else wide[:, s], whole, b[:, s].float(), beta, alpha))
        return out
    whole = b.float()
    for s in _pieces(n, max(m, k)):
        out[s].copy_(_sum(wide if wide is None else wide[s], a[s].float(), whole, beta, alpha))
    return out


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _affine_gradients(grad: Tensor, a: Tensor, b: Tensor, c: tuple[int, ...] | None, beta: Scalar, alpha: Scalar, needs: Any) -> Gradients:
    """Gradients of a[n, k], b[k, m] and of c, whose shape is given."""
    need_a, need_b, need_c = needs
    (n, k), m = a.shape, b.shape[1]
    if not _in_pieces(max(n * k, k * m, n * m), grad, a, b) or torch.is_grad_enabled():
        wide = grad.float()
        scaled = _times(wide, alpha)
        return (
            narrow(torch.mm(scaled, b.float().mT), a.dtype) if need_a else None,
            narrow(_turned(a.float(), scaled, b), b.dtype) if need_b else None,
            narrow(_times(wide, beta).sum_to_size(c), a.dtype) if need_c and c is not None else None,
        )
    found_c = None
    if need_c and c is not None:
        found_c = narrow(torch.sum(grad, 0, dtype=torch.float32).mul_(beta) if c == (m,) else _times(grad.float(), beta).sum_to_size(c), a.dtype)
    longest = max(n, k, m)
    loop = _by_sum if longest == k else _by_column if longest == m else _by_row
    return (*loop(grad if alpha == 1 else grad.float() * alpha, a, b, need_a, need_b), found_c)


def _turned(a: Tensor, grad: Tensor, b: Tensor) -> Tensor:
    """a.mT @ grad in the order in memory of `b`, so that nobody has to turn it later. torch.compile finds an order of its own."""
    return torch.mm(a.mT, grad) if transformed() or b.stride(0) >= b.stride(1) else torch.mm(grad.mT, a).mT


def _by_column(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """The case of many columns: a vocabulary."""
    found_a, found_b = torch.zeros(a.shape) if need_a else None, torch.empty_like(b) if need_b else None
    whole = a.float()
    for s in _pieces(b.shape[1], max(a.shape)):
        wide = grad[:, s].float()
        if found_a is not None:
            found_a.addmm_(wide, b[:, s].float().mT)
        if found_b is not None:
            found_b[:, s].copy_(_turned(whole, wide, b))
    return None if found_a is None else narrow(found_a, a.dtype), found_b


def _by_row(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """The case of many rows: tokens."""
    found_a = torch.empty(a.shape, dtype=a.dtype) if need_a else None
    found_b = torch.zeros_like(b, dtype=torch.float32) if need_b else None
    whole = b.float().mT
    for s in _pieces(a.shape[0], max(b.shape)):
        wide = grad[s].float()
        if found_a is not None:
            found_a[s].copy_(torch.mm(wide, whole))
        if found_b is not None and b.stride(0) < b.stride(1):
            found_b.mT.addmm_(wide.mT, a[s].float())
        elif found_b is not None:
            found_b.addmm_(a[s].float().mT, wide)
    return found_a, None if found_b is None else narrow(found_b, b.dtype)


def _by_sum(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """The case of long sums: the second layer of a transformer's block."""
    found_a, found_b = torch.empty(a.shape, dtype=a.dtype) if need_a else None, torch.empty_like(b) if need_b else None
    wide = grad.float()
    for s in _pieces(b.shape[0], max(grad.shape)):
        if found_a is not None:
            found_a[:, s].copy_(torch.mm(wide, b[s].float().mT))
        if found_b is not None:
            found_b[s].copy_(_turned(a[:, s].float(), wide, b))
    return found_a, found_b


class _Affine(torch.autograd.Function):
    """y[n, m] = round(beta * c + alpha * a[n, k] @ b[k, m]): c is added before the one rounding, as in a native 16-bit linear layer.

    Saves what torch's own 16-bit linear layer saves, so that either may stand in for the other when a forward pass is computed again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
        return exactly(_affine, a, b, c, beta, alpha)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, c, ctx.beta, ctx.alpha = inputs
        ctx.shape = None if c is None else tuple(c.shape)
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        a, b = ctx.saved_tensors
        return (*unseen(_affine_gradients, grad, a, b, ctx.shape, ctx.beta, ctx.alpha, ctx.needs_input_grad[:3]), None, None)


class _Batched(torch.autograd.Function):
    """y[i, n, m] = round(beta * c + alpha * a[i, n, k] @ b[i, k, m])."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
        return exactly(_batched, a, b, c, beta, alpha)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, c, ctx.beta, ctx.alpha = inputs
        ctx.shape = None if c is None else tuple(c.shape)
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        a, b = ctx.saved_tensors
        return (*unseen(_batched_gradients, grad, a, b, ctx.shape, ctx.beta, ctx.alpha, ctx.needs_input_grad[:3]), None, None)


def _batch_pieces(a: Tensor, b: Tensor) -> list[slice] | None:
    (i, n, k), m = a.shape, b.shape[-1]
    each = max(n * k, k * m, n * m)
    if i != b.shape[0] or not _in_pieces(i * each, a, b):
        return None
    step = max(1, PIECE // each)
    return [slice(start, start + step) for start in range(0, i, step)]


def _batched(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
    def product(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        if c is None:
            return _times(torch.bmm(a.float(), b.float()), alpha)
        return torch.baddbmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha)

    pieces = _batch_pieces(a, b)
    if pieces is None:
        return narrow(product(a, b, c), a.dtype)
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype)
    wide = None if c is None else c.expand(out.shape)
    for s in pieces:
        out[s].copy_(product(a[s], b[s], wide if wide is None else wide[s]))
    return out


def _batched_gradients(grad: Tensor, a: Tensor, b: Tensor, c: tuple[int, ...] | None, beta: Scalar, alpha: Scalar, needs: Any) -> Gradients:
    need_a, need_b, need_c = needs
    found_c = narrow(_times(grad.float(), beta).sum_to_size(c), a.dtype) if need_c and c is not None else None
    pieces = _batch_pieces(a, b)
    if pieces is None or torch.is_grad_enabled():
        wide = _times(grad.float(), alpha)
        return (
            narrow(torch.bmm(wide, b.float().mT), a.dtype) if need_a else None,
            narrow(torch.bmm(a.float().mT, wide), b.dtype) if need_b else None,
            found_c,
        )
    found_a = torch.empty(a.shape, dtype=a.dtype) if need_a else None
    found_b = torch.empty(b.shape, dtype=b.dtype) if need_b else None
    for s in pieces:
        wide = _times(grad[s].float(), alpha)
        if found_a is not None:
            found_a[s].copy_(torch.bmm(wide, b[s].float().mT))
        if found_b is not None:
            found_b[s].copy_(torch.bmm(a[s].float().mT, wide))
    return found_a, found_b, found_c


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


def affine(a: Tensor, b: Tensor, c: Tensor | None = None, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """round(beta * c + alpha * a[n, k] @ b[k, m]) of 16-bit tensors; c is broadcast."""
    return _made(_Affine, _affine, a, b, c, beta, alpha)


def batched(a: Tensor, b: Tensor, c: Tensor | None = None, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """round(beta * c + alpha * a[i, n, k] @ b[i, k, m]) of 16-bit tensors; c is broadcast."""
    return _made(_Batched, _batched, a, b, c, beta, alpha)


def _flat(t: Tensor) -> Tensor:
    """All rows along the last dimension: (..., k) to (n, k); a vector is one row."""
    return t[None] if t.dim() == 1 else t.flatten(0, -2)


def product(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul's meaning for any number of dimensions, then the rounded product."""
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
        return (affine if dims == 2 else batched)(narrow(operands[0], dtype), narrow(operands[1], dtype))

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
    x, w = narrow(input, dtype), narrow(weight, dtype).mT
    y = affine(_flat(x), w, None if bias is None else narrow(bias, dtype))
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
