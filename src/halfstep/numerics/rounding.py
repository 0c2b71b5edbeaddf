"""Rounding of fp32 numbers: to nearest even into any format, and by chance into 16 bits.

By integer arithmetic on the bits, so that every device gives the same ones: a compiler may truncate a cast (Triton's interpreter does),
and casts of NaN differ between CPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics.formats import Format
from halfstep.numerics.slices import by_slices

MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000  # bits of fp32's infinity; NaN is above
FP16_BIAS = 112 << 10  # fp32's exponent bias less fp16's, where fp16 has its exponent
FP16_NORMAL = 0x38800000  # bits of 2^-14
FP16_LARGEST = 65504.0


def nearest(x: Tensor, fmt: Format) -> Tensor:
    """fp32 `x` rounded to the nearest number of `fmt`, ties to even; an fp32 tensor in the shape of `x`.

    A magnitude that rounds beyond the largest number becomes inf; in e4m3, which has no inf, it becomes the largest number, and so does inf (as
    torch.float8_e4m3fn has it from torch 2.13 on). NaN stays NaN. Subnormals are rounded, not flushed.
    """
    bits = bits_of(x)
    magnitude = (bits & MAGNITUDE).view(torch.float32)
    rounded = magnitude
    dropped = 23 - fmt.mantissa_bits
    if dropped:
        up = ((bits >> dropped) & 1).add_((1 << (dropped - 1)) - 1)  # just under a half, and a half where the last bit kept is odd
        rounded = ((bits & MAGNITUDE).add_(up) & -(1 << dropped)).view(torch.float32)
        coarse = fmt.smallest_subnormal * 2.0**23  # fp32 numbers of this size are one subnormal apart, so adding it rounds
        rounded = torch.where(magnitude < fmt.smallest_normal, (magnitude + coarse) - coarse, rounded)
    over = torch.inf if fmt.infinite else fmt.largest
    rounded = torch.where(rounded > fmt.largest, over, rounded)
    return torch.where(x.isnan(), x, torch.copysign(rounded, x))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `x` in bf16 or fp16, rounded to nearest even: the bits of `x.to(dtype)`. NaN stays NaN (quiet, payload dropped)."""
    rule = nearest_bf16 if half_dtype(dtype) == torch.bfloat16 else nearest_fp16
    return by_slices(lambda part: (rule(part),), (dtype,), x)[0]


def stochastic(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """fp32 `x` in bf16 or fp16, rounded up or down with the probability that makes its mean `x`.

    bits: int32 in the shape of `x`, of which 16 are used (`bits & 0xFFFF`). What the format holds exactly stays. The mean over all 65,536 of
    them is `x` exactly, but below fp16's 2^-14, where it is `x` cut off at 2^-40. A finite number never becomes inf: it stops at the largest.
    Source: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551.
    """
    rule = _stochastic_bf16 if half_dtype(dtype) == torch.bfloat16 else _stochastic_fp16
    return by_slices(lambda part, noise: (rule(part, noise),), (dtype,), x, bits)[0]


def nearest_bf16(x: Tensor) -> Tensor:
    """`cast` to bf16 in one go."""
    bits = bits_of(x)
    code = ((bits >> 16) & 1).add_(0x7FFF).add_(bits).bitwise_right_shift_(16)
    return code.masked_fill_(x.isnan(), 0x7FC0).to(torch.int16).view(torch.bfloat16)


def nearest_fp16(x: Tensor) -> Tensor:
    """`cast` to fp16 in one go."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    normal = ((magnitude >> 13) & 1).add_(magnitude).add_(0xFFF).bitwise_right_shift_(13)
    normal.sub_(FP16_BIAS).clamp_(max=0x7C00)  # 65520 and above: inf
    # numbers between 0.5 and 1 are 2^-24 apart in fp32, which is fp16's distance below 2^-14: adding 0.5 rounds
    small = (magnitude.view(torch.float32) + 0.5).view(torch.int32).sub_(0x3F000000)
    code = torch.where(magnitude < FP16_NORMAL, small, normal)
    code.masked_fill_(magnitude > INF, 0x7E00)
    return code.bitwise_or_((bits >> 16).bitwise_and_(0x8000)).to(torch.int16).view(torch.float16)


def _stochastic_bf16(x: Tensor, bits: Tensor) -> Tensor:
    word = bits_of(x)
    magnitude = word & MAGNITUDE
    code = (bits & 0xFFFF).add_(magnitude).bitwise_right_shift_(16).clamp_(max=0x7F7F)
    code.masked_fill_(magnitude == INF, INF >> 16).masked_fill_(magnitude > INF, 0x7FC0)
    return code.bitwise_or_((word >> 16).bitwise_and_(0x8000)).to(torch.int16).view(torch.bfloat16)


def _stochastic_fp16(x: Tensor, bits: Tensor) -> Tensor:
    word, noise = bits_of(x), bits & 0xFFFF
    magnitude = word & MAGNITUDE
    normal = (noise >> 3).add_(magnitude).bitwise_right_shift_(13).sub_(FP16_BIAS)  # 13 bits are dropped
    parts = (magnitude.view(torch.float32) * 2.0**40).clamp_(max=2.0**27).to(torch.int32)  # in 2^-16 of a subnormal's distance
    code = torch.where(magnitude < FP16_NORMAL, parts.add_(noise).bitwise_right_shift_(16), normal).clamp_(max=0x7BFF)
    code.masked_fill_(magnitude == INF, 0x7C00).masked_fill_(magnitude > INF, 0x7E00)
    return code.bitwise_or_((word >> 16).bitwise_and_(0x8000)).to(torch.int16).view(torch.float16)


def bits_of(x: Tensor) -> Tensor:
    """The bits of an fp32 tensor as int32, a view. Raises ConfigError for another dtype."""
    if x.dtype != torch.float32:
        raise ConfigError(f"rounding takes fp32 tensors, and this one is {x.dtype}", "Convert it with .float() first.")
    return x.detach().view(torch.int32)


def half_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if it is bf16 or fp16. Raises ConfigError for any other."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"a 16-bit format was expected, and {dtype} was given", "Use torch.bfloat16 or torch.float16.")
    return dtype
