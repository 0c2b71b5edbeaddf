"""Scaled dot product attention of 16-bit tensors on a CPU: computed in fp32 with one rounding, forward and backward.

The forward pass keeps its 16-bit operands and nothing else. The backward pass computes the attention a second time, so that its gradients are those
of the exact output and not of the rounded one; where torch's flash kernel for the CPU takes the operands, no matrix of all scores is made. It takes
none with dropout: up to `KEPT` scores are then left to torch, which computes the same and keeps them in fp32; more are computed again.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from halfstep.amp import dropout, scratch
from halfstep.amp.mode import Route
from halfstep.amp.rounding import again, applied, eligible, exactly, forward_mode, gradients_again, narrow, recorded, rounded, transformed, unseen
from halfstep.amp.scratch import GRADIENT, LEFT, RIGHT, SUM

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FLASH_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_CHOICE = getattr(torch, "_fused_sdp_choice", None)
_IS_FLASH = 1  # the number of torch's flash backend
KEPT = 1 << 20  # scores that may be kept in fp32 for the backward pass, where torch's flash kernel does not run: 4 MB


def _as_bias(mask: Tensor | None) -> Tensor | None:
    """The mask as numbers that are added to the scores, in fp32: 0 and -inf for a mask of booleans."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.float()
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(mask.logical_not(), -torch.inf)


def _wide(*tensors: Tensor) -> list[Tensor]:
    # the kernel wants the last dimension to lie as such
    usable = scratch.plain(*tensors) and not any(0 < t.stride(-2) < t.stride(-1) or scratch.is_batch(t) for t in tensors)
    return [scratch.wide_if(usable, place, t) for place, t in zip((LEFT, RIGHT, SUM, GRADIENT), tensors, strict=False)]


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    """What torch's flash kernel gives for 16-bit operands that are widened to fp32: the output and the logsumexp, in fp32."""
    return _FLASH(*_wide(q, k, v), 0.0, causal, attn_mask=_as_bias(mask), scale=scale)  # type: ignore[misc]


def flash_gradients(grad: Tensor, saved: Any, causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """The gradients of `flash` by q, k and v, each rounded once. saved: (q, k, v, mask)."""
    q, k, v, mask = saved
    (*wide, above), bias = _wide(q, k, v, grad), _as_bias(mask)
    out, logsumexp = _FLASH(*wide, 0.0, causal, attn_mask=bias, scale=scale)  # type: ignore[misc]
    found = _FLASH_BACKWARD(above, *wide, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale)  # type: ignore[misc]
    return tuple(narrow(t, q.dtype) for t in found)


class _Flash(torch.autograd.Function):
    """round(softmax(scale * q @ k.mT + mask) @ v) by torch's flash kernel in fp32. Saves the 16-bit operands and the mask as it was given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal, ctx.scale = causal, scale
        return narrow(exactly(flash, q, k, v, mask, causal, scale)[0], q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the flash kernel has no second derivative
            given = [t for t in ctx.saved_tensors if t is not None]
            call = functools.partial(_by_torchs_formula, causal=ctx.causal, scale=ctx.scale)
            found = unseen(gradients_again, call, given, (*ctx.needs_input_grad[:3], *[False] * (len(given) - 3)), grad)
            return *found[:3], None, None, None
        return (*unseen(flash_gradients, grad, ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None)


def _by_torchs_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, scale: float | None) -> Tensor:
    grouped = q.shape[-3] != k.shape[-3]  # the flash kernel does not broadcast
    out: Tensor = torch._scaled_dot_product_attention_math(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)[0]
    return out


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None = None, *, causal: bool, scale: float | None, grouped: bool, share: float
) -> Tensor:
    """The formula with the places that are kept given; share: how many those are of all."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    root = abs(factor) ** 0.5  # on both sides, which keeps the products in range
    if grouped:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = torch.matmul(q * (root if factor > 0 else -root), (k * root).mT)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril().logical_not(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype == torch.bool else scores + mask
    shares = torch._safe_softmax(scores, -1)  # rows without a key are 0
    return torch.matmul(shares * (keep.float().div_(share) if share > 0 else keep.float()), v)


def _as_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float, causal: bool, scale: float | None, grouped: bool) -> Tensor:
    """torch._scaled_dot_product_attention_math with its bits, and dropout drawn by `halfstep.amp.dropout`."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(factor))
    wide, keys, values = q.float() * (root if factor >= 0 else -root), k.float(), v.float()
    if grouped:
        keys, values = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (keys, values))
    scores = torch.matmul(wide, keys.mT * root)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    bias = _as_bias(mask)
    shares = torch._safe_softmax(scores if bias is None else scores.add_(bias), -1)
    return torch.matmul(dropout.drop(shares, p), values).to(q.dtype)


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
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    floats = [query, key, value, *([attn_mask] if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point() else [])]
    two_masks = is_causal and attn_mask is not None and dropout_p > 0  # which torch refuses, and only then
    if not eligible(*floats) or min(t.dim() for t in floats[:3]) < 2 or two_masks:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if forward_mode() or transformed():
        return rounded(dtype, func, query, key, value, attn_mask, dropout_p, is_causal, **options)
    q, k, v = (narrow(t, dtype) for t in (query, key, value))
    masks = [] if attn_mask is None else [narrow(attn_mask, dtype) if attn_mask.is_floating_point() else attn_mask]
    if dropout_p > 0 and _scores(q, k) <= KEPT and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():  # type: ignore[no-untyped-call]
        # torch itself then computes in fp32 from 16-bit operands and rounds once; it keeps fp32 scores, and need not compute them again
        given = (q, k, v, *(masks or [None]))
        if not dropout.drawable(q, dropout_p, _scores(q, k)):
            return func(*given, dropout_p, is_causal, **options)
        return exactly(_as_torch, *given, p=dropout_p, causal=is_causal, scale=scale, grouped=enable_gqa)
    if dropout_p > 0 and recorded(q, k, v, *masks):
        batch: Any = q.shape[:-2] if enable_gqa else torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])  # type: ignore[no-untyped-call]
        shape = (*batch, q.shape[-2], k.shape[-2])
        keep = torch.empty(shape, dtype=torch.float32, device=q.device).bernoulli_(1 - dropout_p).bool()  # drawn as torch draws them
        call = functools.partial(_with_dropout, causal=is_causal, scale=scale, grouped=enable_gqa, share=1 - dropout_p)
        return again(dtype, call, q, k, v, keep, *masks)
    if dropout_p == 0 and recorded(q, k, v, *masks) and _takes(q, k, v, *masks, causal=is_causal, **options):
        return applied(_Flash, q, k, v, masks[0] if masks else None, is_causal, scale)

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = func(q, k, v, mask, dropout_p, is_causal, **options)
        return out

    return again(dtype, plain, q, k, v, *masks)


def _scores(q: Tensor, k: Tensor) -> int:
    """How many scores there are, but for batches that only `k` has; more than KEPT of operands without a number."""
    return q.numel() // q.shape[-1] * k.shape[-2] if q.shape[-1] else KEPT + 1


def _takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, scale: float | None, enable_gqa: bool) -> bool:
    """Whether torch's flash kernel for the CPU takes these, and the user has not switched it off (torch.nn.attention.sdpa_kernel)."""
    if _FLASH is None or _FLASH_BACKWARD is None or _CHOICE is None:
        return False
    return bool(_CHOICE(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=enable_gqa) == _IS_FLASH)
