"""The arithmetic of the rounded matrix products: 16-bit matrices in and out, fp32 inside, one piece of the longest dimension after the other.

A piece is cast up, multiplied and rounded while it is in the cache, and the fp32 copy of a matrix of 12 million elements is never made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.amp import scratch
from halfstep.amp.rounding import narrow, transformed
from halfstep.amp.scratch import GRADIENT, LEFT, RESULT, RIGHT, SUM, empty, wide

Scalar = int | float
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
WHOLE = 1 << 16  # elements of the largest matrix up to which a product is three operations: 256 KiB in fp32
PIECE = 1 << 20  # elements of a piece: 4 MiB in fp32, which the caches hold


def _in_pieces(elements: int, *tensors: Tensor) -> bool:
    return elements > WHOLE and not transformed() and not torch.is_grad_enabled() and scratch.plain(*tensors)


def _pieces(length: int, across: int) -> list[slice]:
    """Stretches of a dimension, so long that a piece of the matrix is PIECE elements; multiples of 64, which the kernels like."""
    step = max(64, PIECE // max(across, 1) // 64 * 64)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _times(t: Tensor, factor: Scalar) -> Tensor:
    return t if factor == 1 else t * factor


def _sum(c: Tensor | None, a: Tensor, b: Tensor, beta: Scalar, alpha: Scalar) -> Tensor:
    return _times(torch.mm(a, b), alpha) if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _put(c: Tensor | None, a: Tensor, b: Tensor, beta: Scalar, alpha: Scalar) -> Tensor:
    """The same in memory that is used again."""
    out = empty(RESULT, (a.shape[0], b.shape[1]))
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
    return torch.mm(a, b, out=out) if alpha == 1 else torch.mm(a, b, out=out).mul_(alpha)


def affine(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
    """round(beta * c + alpha * a[n, k] @ b[k, m]); c is broadcast."""
    (n, k), m = a.shape, b.shape[1]
    longest = max(n, k, m)
    if k != b.shape[0] or not _in_pieces(max(n * k, k * m, n * m), a, b):
        return narrow(_sum(c if c is None else c.float(), a.float(), b.float(), beta, alpha), a.dtype)
    added = c if c is None else c.float().expand(n, m)
    out = torch.empty(n, m, dtype=a.dtype, device=a.device)
    if longest == m:
        left = wide(LEFT, a)
        for s in _pieces(m, max(n, k)):
            out[:, s].copy_(_put(added if added is None else added[:, s], left, wide(RIGHT, b[:, s]), beta, alpha))
        return out
    if longest == n:
        right = wide(RIGHT, b)
        for s in _pieces(n, max(m, k)):
            out[s].copy_(_put(added if added is None else added[s], wide(LEFT, a[s]), right, beta, alpha))
        return out
    total = None  # few results, each a long sum
    for s in _pieces(k, max(n, m)):
        left, right = wide(LEFT, a[:, s]), wide(RIGHT, b[s])
        total = _put(added, left, right, beta, alpha) if total is None else total.addmm_(left, right, alpha=alpha)
    return out if total is None else out.copy_(total)


def affine_gradients(
    grad: Tensor, a: Tensor, b: Tensor, c: tuple[int, ...] | None, beta: Scalar, alpha: Scalar, needs: Any, into: Tensor | None = None
) -> Gradients:
    """Gradients of a[n, k], b[k, m] and of c, whose shape is given, each rounded to 16 bits once.

    into: what the gradient of b shall be written to; of fp32 where b was rounded from an fp32 weight.
    """
    need_a, need_b, need_c = needs
    (n, k), m = a.shape, b.shape[1]
    if scratch.is_batch(grad) or not _in_pieces(max(n * k, k * m, n * m), grad, a, b):
        above = grad.float()
        scaled = _times(above, alpha)
        found_b = narrow(_turned(a.float(), scaled, b), b.dtype) if need_b else None
        return (
            narrow(torch.mm(scaled, b.float().mT), a.dtype) if need_a else None,
            found_b if found_b is None or into is None else into.copy_(found_b),
            narrow(_times(above, beta).sum_to_size(c), a.dtype) if need_c and c is not None else None,
        )
    if need_b and into is None:
        into = torch.empty_like(b)
    found_c = None
    by_piece = c == (m,) and alpha == 1
    if need_c and c is not None and not by_piece:
        found_c = narrow(_times(grad.float(), beta).sum_to_size(c), a.dtype)
    longest = max(n, k, m)
    loop = _by_column if longest == m else _by_row if longest == n else _by_sum
    found_a, found_b, sums = loop(grad if alpha == 1 else grad.float() * alpha, a, b, need_a, into if need_b else None, need_c and by_piece)
    if sums is not None:
        found_c = narrow(_times(sums, beta), a.dtype)
    return found_a, found_b, found_c


def _turned(a: Tensor, grad: Tensor, b: Tensor) -> Tensor:
    """a.mT @ grad in the order in memory of `b`, so that nobody has to turn it later. torch.compile finds an order of its own."""
    return torch.mm(a.mT, grad) if transformed() or b.stride(0) >= b.stride(1) else torch.mm(grad.mT, a).mT


def _round_into(target: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Put fp32 values, rounded to `dtype`, into a tensor of that format or of fp32."""
    return target.copy_(values if target.dtype == dtype else values.to(dtype))


def _put_turned(a: Tensor, grad: Tensor, b: Tensor) -> Tensor:
    shape = (a.shape[1], grad.shape[1])
    if b.stride(0) >= b.stride(1):
        return torch.mm(a.mT, grad, out=empty(RESULT, shape))
    return torch.mm(grad.mT, a, out=empty(RESULT, shape[::-1])).mT


def _by_column(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, into: Tensor | None, need_sums: bool) -> Gradients:
    """The case of many columns: a vocabulary. Gradients of a and b, and the sums of the columns of `grad` in fp32."""
    found_a = empty(SUM, a.shape).zero_() if need_a else None
    sums = torch.empty(b.shape[1], dtype=torch.float32, device=a.device) if need_sums else None
    left = a if into is None else wide(LEFT, a)
    for s in _pieces(b.shape[1], max(a.shape)):
        above = wide(GRADIENT, grad[:, s])
        if found_a is not None:
            found_a.addmm_(above, wide(RIGHT, b[:, s]).mT)
        if into is not None:
            _round_into(into[:, s], _put_turned(left, above, b), b.dtype)
        if sums is not None:
            torch.sum(above, 0, out=sums[s])
    return None if found_a is None else narrow(found_a, a.dtype), into, sums


def _by_row(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, into: Tensor | None, need_sums: bool) -> Gradients:
    """The case of many rows: tokens."""
    found_a = torch.empty(a.shape, dtype=a.dtype, device=a.device) if need_a else None
    columns = b.stride(0) < b.stride(1)
    found_b = empty(SUM, b.shape, turned=columns).zero_() if into is not None else None
    sums = torch.zeros(b.shape[1], dtype=torch.float32, device=a.device) if need_sums else None
    right = wide(RIGHT, b).mT if need_a else b
    for s in _pieces(a.shape[0], max(b.shape)):
        above = wide(GRADIENT, grad[s])
        if found_a is not None:
            found_a[s].copy_(torch.mm(above, right, out=empty(RESULT, (above.shape[0], b.shape[0]))))
        if found_b is not None and columns:
            found_b.mT.addmm_(above.mT, wide(LEFT, a[s]))
        elif found_b is not None:
            found_b.addmm_(wide(LEFT, a[s]).mT, above)
        if sums is not None:
            sums += above.sum(0)
    return found_a, into if into is None or found_b is None else _round_into(into, found_b, b.dtype), sums


def _by_sum(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, into: Tensor | None, need_sums: bool) -> Gradients:
    """The case of long sums: the second layer of a transformer's block."""
    found_a = torch.empty(a.shape, dtype=a.dtype, device=a.device) if need_a else None
    above = wide(GRADIENT, grad)
    for s in _pieces(b.shape[0], max(grad.shape)):
        if found_a is not None:
            right = wide(RIGHT, b[s]).mT
            found_a[:, s].copy_(torch.mm(above, right, out=empty(RESULT, (a.shape[0], right.shape[1]))))
        if into is not None:
            _round_into(into[s], _put_turned(wide(LEFT, a[:, s]), above, b), b.dtype)
    return found_a, into, above.sum(0) if need_sums else None


def _batch_pieces(a: Tensor, b: Tensor, *others: Tensor) -> list[slice] | None:
    (i, n, k), m = a.shape, b.shape[-1]
    each = max(n * k, k * m, n * m)
    if i != b.shape[0] or k != b.shape[1] or not _in_pieces(i * each, a, b, *others):
        return None
    step = max(1, PIECE // each)
    return [slice(start, start + step) for start in range(0, i, step)]


def batched(a: Tensor, b: Tensor, c: Tensor | None, beta: Scalar, alpha: Scalar) -> Tensor:
    """round(beta * c + alpha * a[i, n, k] @ b[i, k, m]); c is broadcast."""
    pieces = _batch_pieces(a, b)
    if pieces is None:
        if c is None:
            return narrow(_times(torch.bmm(a.float(), b.float()), alpha), a.dtype)
        return narrow(torch.baddbmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha), a.dtype)
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    added = None if c is None else c.expand(out.shape)
    for s in pieces:
        left, right, result = wide(LEFT, a[s]), wide(RIGHT, b[s]), empty(RESULT, out[s].shape)
        if added is None:
            torch.bmm(left, right, out=result)
            out[s].copy_(result if alpha == 1 else result.mul_(alpha))
        else:
            out[s].copy_(torch.baddbmm(added[s].float(), left, right, beta=beta, alpha=alpha, out=result))
    return out


def batched_gradients(grad: Tensor, a: Tensor, b: Tensor, c: tuple[int, ...] | None, beta: Scalar, alpha: Scalar, needs: Any) -> Gradients:
    """Gradients of a[i, n, k], b[i, k, m] and of c, whose shape is given, each rounded to 16 bits once."""
    need_a, need_b, need_c = needs
    found_c = narrow(_times(grad.float(), beta).sum_to_size(c), a.dtype) if need_c and c is not None else None
    pieces = None if scratch.is_batch(grad) else _batch_pieces(a, b, grad)
    if pieces is None:
        above = _times(grad.float(), alpha)
        return (
            narrow(torch.bmm(above, b.float().mT), a.dtype) if need_a else None,
            narrow(torch.bmm(a.float().mT, above), b.dtype) if need_b else None,
            found_c,
        )
    found_a = torch.empty(a.shape, dtype=a.dtype, device=a.device) if need_a else None
    found_b = torch.empty(b.shape, dtype=b.dtype, device=a.device) if need_b else None
    for s in pieces:
        above = wide(GRADIENT, grad[s] if alpha == 1 else grad[s].float() * alpha)
        if found_a is not None:
            found_a[s].copy_(torch.bmm(above, wide(RIGHT, b[s]).mT, out=empty(RESULT, found_a[s].shape)))
        if found_b is not None:
            found_b[s].copy_(torch.bmm(wide(LEFT, a[s]).mT, above, out=empty(RESULT, found_b[s].shape)))
    return found_a, found_b, found_c
