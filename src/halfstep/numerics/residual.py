"""An fp32 number as a 16-bit one and an integer that says how far off it is, in parts of the 16-bit number's ulp.

    width 16   lo in 2^-16 of an ulp   all of an fp32 number, but for the ties named below
    width 8    lo in 2^-8 of an ulp    the last of 8 bits rounded stochastically

bf16 is the upper half of fp32's bits, so the residual is a difference of bits: r = bits(x) - bits(hi), from -0x8000 to 0x8000, and join is
their sum. Magnitudes exactly half-way above an even number have r = +0x8000, which 16 bits do not hold: they move by one fp32 ulp towards
zero (one value in 65,537 of those that share an even hi; odd ones have 65,535 and no tie).

fp16 has another exponent, so the residual is a difference of values: r = (x - hi) * 2^16 / ulp(hi), rounded down, and join is
hi + lo * ulp(hi) * 2^-16 in fp32. Normal numbers use every eighth r (every fourth just below a power of two) and are exact, ties too:
the sum with 0x7FFF rounds to the tie. Below 2^-14, where fp16's ulp is 2^-24, a residual counts 2^-40: numbers that need finer parts
(only those below 2^-17 can) are cut off there, ties may lose one, and the sign of a zero is lost.
Beyond fp16's largest number hi stays at +-65504 and the residual ends at 65520; inf and NaN stay what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics.rounding import FP16_LARGEST, bits_of, half_dtype, nearest_bf16, nearest_fp16
from halfstep.numerics.slices import by_slices

HALF = 0x8000  # half an ulp of the 16-bit number, in parts of 2^-16
LARGEST_CODE = 0x7BFF  # bits of 65504
NEAREST, TIE = 0x80, 128  # width 8: the noise that rounds to nearest, and the residual of the tie above hi


def split(x: Tensor, dtype: torch.dtype, width: int = 16, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 `x` as (hi, lo): hi is `x` rounded to nearest even in `dtype` (bf16 or fp16), lo int16 (width 16) or int8 (width 8), in the shape of `x`.

    bits: int32 in the shape of `x`, of which width 8 uses `bits & 0xFF`; without them the last bit is rounded to nearest. Width 8 is
    unbiased: the mean of `join` over all 256 of them is `x` exactly (fp16: once cut off at 2^-16 ulp). Where rounding takes the
    stored number up to the tie above hi, which +128 would stand for and int8 does not hold, the next 16-bit number with -128
    does: there hi is a nearest one of the number stored, and not of `x`. Without that carry a weight could never cross a tie by
    small steps.
    Memory: 4 (width 16) or 3 bytes per element, instead of 4. Source of the split: Intel's extension for PyTorch (split SGD).
    """
    if width not in (8, 16):
        raise ConfigError(f"a residual of {width} bits was asked for", "Use width=16 or width=8.")
    rule = _split_bf16 if half_dtype(dtype) == torch.bfloat16 else _split_fp16
    hi, lo = by_slices(
        lambda part, noise: rule(part, width, noise), (dtype, torch.int16 if width == 16 else torch.int8), x, bits if width == 8 else None
    )
    return hi, lo


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 number that `split` took apart: hi bf16 or fp16, lo int16 or int8 (told apart by dtype); a new tensor in their shape."""
    if lo.dtype not in (torch.int8, torch.int16):
        raise ConfigError(f"a residual in {lo.dtype} was given", "Use the int16 or int8 tensor that split returned.")
    rule = _join_bf16 if half_dtype(hi.dtype) == torch.bfloat16 else _join_fp16
    return by_slices(lambda *parts: (rule(*parts),), (torch.float32,), hi, lo)[0]


def _split_bf16(x: Tensor, width: int, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    hi = nearest_bf16(x)
    code = hi.view(torch.int16)
    parts = bits_of(x) - code.to(torch.int32).bitwise_left_shift_(16)
    if width == 16:
        return hi, parts.clamp_(-HALF, HALF - 1).to(torch.int16)  # from below for NaN, whose bits are far from those that it is cast to
    lo = parts.clamp_(-HALF, HALF).add_(NEAREST if bits is None else bits & 0xFF).bitwise_right_shift_(8)
    return (code + (lo == TIE)).view(torch.bfloat16), lo.to(torch.int8)  # +128 wraps to -128


def _join_bf16(hi: Tensor, lo: Tensor) -> Tensor:
    parts = lo.to(torch.int32)
    if lo.dtype == torch.int8:
        parts.bitwise_left_shift_(8)
    return hi.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(parts).view(torch.float32)


def _split_fp16(x: Tensor, width: int, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    hi = nearest_fp16(x.clamp(-FP16_LARGEST, FP16_LARGEST).where(~x.isinf(), x))
    value = hi.float()
    inverse = (167 << 23) + (113 << 23) - _exponent(value)  # 2^16 / ulp(hi): 2^40 where the exponent's bits say -14
    parts = (x - value).mul_(inverse.view(torch.float32)).floor_().nan_to_num_(0.0)  # NaN: inf - inf
    if width == 16:
        return hi, parts.clamp_(-HALF, HALF - 1).to(torch.int32).to(torch.int16)
    lo = parts.clamp_(-HALF, HALF).to(torch.int32).add_(NEAREST if bits is None else bits & 0xFF).bitwise_right_shift_(8).to(torch.int16)
    code = hi.view(torch.int16)
    carried = (lo == TIE).bitwise_and_((code & 0x7FFF) < LARGEST_CODE).to(torch.int16)
    code = carried * (code >> 15).bitwise_or_(1) + code  # a residual is a value here, so upwards is towards zero for negative numbers
    doubled = ((code & 0x3FF) == 0).bitwise_and_(code >= 0x800)  # a power of two: its ulp is twice that of the number before
    lo.sub_(carried * (256 - 64 * doubled.to(torch.int16))).clamp_(max=127)
    return code.view(torch.float16), lo.to(torch.int8)


def _join_fp16(hi: Tensor, lo: Tensor) -> Tensor:
    value = hi.float()
    part = _exponent(value).sub_((10 + (16 if lo.dtype == torch.int16 else 8)) << 23)  # 2^-16 or 2^-8 of ulp(hi)
    return part.view(torch.float32).mul_(lo.float()).add_(value)


def _exponent(value: Tensor) -> Tensor:
    """The bits of the power of two at or below fp32 `value`, at least 2^-14: subnormal fp16 numbers have the ulp of the smallest normal ones."""
    return (value.view(torch.int32) & 0x7F800000).clamp_(min=113 << 23)
