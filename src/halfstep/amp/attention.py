"""Scaled dot product attention of 16-bit tensors on a CPU: computed in fp32 with one rounding, forward and backward.

The forward pass keeps its 16-bit operands and nothing else. The backward pass computes the attention a second time, which makes the gradients those of
the exact output and not of the rounded one; where torch has its flash kernel for the CPU, no matrix of all scores is made in either.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from halfstep.amp.mode import Route
from halfstep.amp.rounding import _gradients_again, again, applied, eligible, exactly, forward_mode, narrow, recorded, rounded, transformed, unseen

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FLASH_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_CHOICE = getattr(torch, "_fused_sdp_choice", None)
_IS_FLASH = 1  # the number of torch's flash backend


def _as_bias(mask: Tensor | None) -> Tensor | None:
    """The mask as numbers that are added to the scores, in fp32: 0 and -inf for a mask of booleans."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.float()
    return torch.zeros(mask.shape).masked_fill_(mask.logical_not(), -torch.inf)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    return _FLASH(q.float(), k.float(), v.float(), 0.0, causal, attn_mask=_as_bias(mask), scale=scale)  # type: ignore[misc]


def _flash_gradients(grad: Tensor, saved: tuple[Tensor | None, ...], causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    q, k, v, mask = saved
    assert q is not None
    assert k is not None
    assert v is not None
    wide, bias = [t.float() for t in (q, k, v)], _as_bias(mask)
    out, logsumexp = _FLASH(*wide, 0.0, causal, attn_mask=bias, scale=scale)  # type: ignore[misc]
    found = _FLASH_BACKWARD(grad.float(), *wide, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale)  # type: ignore[misc]
    return tuple(narrow(t, q.dtype) for t in found)


class _Flash(torch.autograd.Function):
    """round(softmax(scale * q @ k.mT + mask) @ v) by torch's flash kernel in fp32. Saves the 16-bit operands and the mask as it was given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal, ctx.scale = causal, scale
        return narrow(exactly(_flash, q, k, v, mask, causal, scale)[0], q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the flash kernel has no second derivative
            given = [t for t in ctx.saved_tensors if t is not None]
            call = functools.partial(_by_torchs_formula, causal=ctx.causal, scale=ctx.scale)
            found = unseen(_gradients_again, call, given, (*ctx.needs_input_grad[:3], *[False] * (len(given) - 3)), grad)
            return (*found[:3], None, None, None)
        return (*unseen(_flash_gradients, grad, ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None)


def _by_torchs_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, scale: float | None) -> Tensor:
    grouped = q.shape[-3] != k.shape[-3]
    out: Tensor = torch._scaled_dot_product_attention_math(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)[0]  # type: ignore[attr-defined]
    return out


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None = None, *, causal: bool, scale: float | None, share: float
) -> Tensor:
    """The formula with the places that are kept given; share: how many those are of all."""
    root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5 if scale is None or scale > 0 else None
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = torch.matmul(q * scale, k.mT) if root is None else torch.matmul(q * root, (k * root).mT)  # the roots keep the products in range
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype == torch.bool else scores + mask
    shares = torch._safe_softmax(scores, -1)  # rows without a key are 0
    return torch.matmul(shares * (keep.float().div_(share) if share > 0 else keep.float()), v)


def attention(
    dtype: torch.dtype,
    func: Route,
    /,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    floats = [query, key, value, *([attn_mask] if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point() else [])]
    if not eligible(*floats) or min(t.dim() for t in floats[:3]) < 2 or (is_causal and attn_mask is not None):
        return func(query, key, value, attn_mask, dropout_p, is_causal, **options)  # which refuses the last two
    if forward_mode() or transformed():
        return rounded(dtype, func, query, key, value, attn_mask, dropout_p, is_causal, **options)
    q, k, v = (narrow(t, dtype) for t in (query, key, value))
    masks = [] if attn_mask is None else [narrow(attn_mask, dtype) if attn_mask.is_floating_point() else attn_mask]
    if dropout_p > 0 and recorded(q, k, v, *masks):
        shape = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2] if not enable_gqa else q.shape[:-2]), q.shape[-2], k.shape[-2])
        keep = torch.empty(shape).bernoulli_(1 - dropout_p).bool()  # drawn as torch draws them
        call = functools.partial(_with_dropout, causal=is_causal, scale=scale, share=1 - dropout_p)
        return again(dtype, call, q, k, v, keep, *masks)
    if dropout_p == 0 and recorded(q, k, v, *masks) and _takes(q, k, v, *masks, causal=is_causal, **options):
        return applied(_Flash, q, k, v, masks[0] if masks else None, is_causal, scale)

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = func(q, k, v, mask, dropout_p, is_causal, **options)
        return out

    return again(dtype, plain, q, k, v, *masks)


def _takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, scale: float | None, enable_gqa: bool) -> bool:
    """Whether torch's flash kernel for the CPU takes these, and the user has not switched it off (torch.nn.attention.sdpa_kernel)."""
    if _FLASH is None or _FLASH_BACKWARD is None or _CHOICE is None:
        return False
    return bool(_CHOICE(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=enable_gqa) == _IS_FLASH)
