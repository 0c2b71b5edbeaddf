"""What stands for one product of ATen where halfstep emulates it: the same arguments, in 16 bits, by fp32's kernel with one rounding.

For those who want to know how long that takes. Nothing is recorded by autograd here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from halfstep.amp import attention, convolution, pieces


def _mm(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return pieces.affine(a, b, None, 1, 1)


def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: pieces.Scalar = 1, alpha: pieces.Scalar = 1, **_: Any) -> Tensor:
    return pieces.affine(a, b, c, beta, alpha)


def _bmm(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return pieces.batched(a, b, None, 1, 1)


def _baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: pieces.Scalar = 1, alpha: pieces.Scalar = 1, **_: Any) -> Tensor:
    return pieces.batched(a, b, c, beta, alpha)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    return convolution.convolved(x, weight, bias, geometry)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, sizes: Any, *geometry: Any) -> Any:
    return convolution.gradients(grad, x, weight, geometry[:-1], geometry[-1])


def _flash(
    q: Tensor, k: Tensor, v: Tensor, share: float = 0.0, causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None
) -> Any:
    return attention.flash(q, k, v, attn_mask, causal, scale)[0].to(q.dtype)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    share: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    return attention.flash_gradients(grad, (q, k, v, attn_mask), causal, scale)


TWINS: Mapping[str, Callable[..., Any]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
}
FAMILY: Mapping[str, str] = {
    name: "attention" if name.startswith("_scaled") else "convolution" if name.startswith("conv") else "matmul" for name in TWINS
}
