"""Sums and roundings that keep what they lose in a second number."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.numerics.rounding import half_dtype, nearest_bf16, nearest_fp16
from halfstep.numerics.slices import by_slices


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(s, e): s is a + b rounded, e what rounding took away, so that s + e is a + b exactly. Any one floating dtype, no order of magnitudes needed.

    Exact unless s overflows. Source: Knuth, The Art of Computer Programming, vol. 2, 4.2.2.
    """
    s = a + b
    seen = s - a  # the part of s that came from b
    return s, (a - (s - seen)) + (b - seen)


def kahan_split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp32 `x` as (hi, c) in bf16 or fp16: hi is `x` rounded to nearest even, c what that took away, rounded likewise.

    c keeps 8 (bf16) or 11 (fp16) significant bits more. What is below half an ulp of c is lost: at most 2^-17 of |x| in bf16 and
    2^-23 of it (one fp32 ulp) in fp16, where c also cannot be finer than 2^-24, so that 2^-25 may be lost. Finite numbers beyond the
    format's largest keep hi there and the rest in c. Memory: 4 bytes per element.
    Source: Kahan, Further Remarks on Reducing Truncation Errors, 1965; Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192.
    """
    largest = torch.finfo(half_dtype(dtype)).max
    rule = nearest_bf16 if dtype == torch.bfloat16 else nearest_fp16

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        infinite = x.isinf()
        hi = rule(x.clamp(-largest, largest).where(~infinite, x))
        return hi, rule((x - hi.float()).masked_fill_(infinite, 0.0))

    hi, c = by_slices(parts, (dtype, dtype), x)
    return hi, c


def kahan_join(hi: Tensor, c: Tensor) -> Tensor:
    """The fp32 sum of a 16-bit number and its compensation."""
    return hi.detach().float() + c.detach().float()
