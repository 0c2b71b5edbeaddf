"""The parts of the Triton kernels: noise, weights and states from and to fp32. Twins of `halfstep.numerics`, with equal bits.

Rounding is integer arithmetic on the bits, never a cast to a shorter format: what a cast does differs from device to device, and Triton's
interpreter truncates. Division and square root are the correctly rounded ones (`div_rn`, `sqrt_rn`); whoever launches says
`enable_fp_fusion=False`, without which a product and a sum would be fused and round once instead of twice. No function of libdevice is
called, since those flush subnormal numbers.
An element's place in a stretch is (row, column) with 128 columns, so that a row is a block that shares a scale of int8 states.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.kernels import codes
from halfstep.numerics import noise as words
from halfstep.numerics.blocks import LEAST, POSITIVE_LEVELS, SHORT, SIGNED_LEVELS

FP32, BF16, FP16 = (tl.constexpr(code) for code in (codes.FP32, codes.BF16, codes.FP16))
EXACT, SPLIT, SPLIT24 = (tl.constexpr(code) for code in (codes.EXACT, codes.SPLIT, codes.SPLIT24))
KAHAN, STOCHASTIC = (tl.constexpr(code) for code in (codes.KAHAN, codes.STOCHASTIC))
STATE_FP32, STATE_BF16 = (tl.constexpr(code) for code in (codes.STATE_FP32, codes.STATE_BF16))

COLUMNS = tl.constexpr(codes.BLOCK)
_LEAST = tl.constexpr(LEAST)
_REACH1, _REACH2 = tl.constexpr(SIGNED_LEVELS * SHORT), tl.constexpr(POSITIVE_LEVELS * SHORT)
_HASH1, _HASH2, _STATES = tl.constexpr(words.FIRST), tl.constexpr(words.SECOND), tl.constexpr(words.STATES)
_STEP1, _STEP2 = tl.constexpr(1 / SIGNED_LEVELS), tl.constexpr(1 / POSITIVE_LEVELS)


# ---- bits ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    """The bits of fp32 numbers as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def of_bits(b):
    """The fp32 numbers with these bits."""
    return b.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """|x|, by its bits."""
    return of_bits(bits_of(x) & 0x7FFFFFFF)


@triton.jit
def bf16_value(h):
    """The fp32 value of the bf16 code `h` (int32)."""
    return of_bits(h << 16)


@triton.jit
def fp16_value(h):
    """The fp32 value of the fp16 code `h` (int32)."""
    bits = (h & 0x7FFF) << 13
    value = of_bits(bits + 0x38000000)  # the exponent's bias goes from 15 to 127
    value = tl.where(bits < 0x00800000, (h & 0x7FFF).to(tl.float32) * 5.9604644775390625e-08, value)  # subnormal: a count of 2^-24
    value = tl.where(bits >= 0x0F800000, of_bits(bits | 0x7F800000), value)  # inf or NaN
    return of_bits(bits_of(value) | ((h & 0x8000) << 16))


@triton.jit
def bf16_nearest(x):
    """The bf16 code of fp32 `x`, rounded to nearest even."""
    b = bits_of(x)
    h = (b + (((b >> 16) & 1) + 0x7FFF)) >> 16
    return tl.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, h)


@triton.jit
def fp16_nearest(x):
    """The fp16 code of fp32 `x`, rounded to nearest even."""
    b = bits_of(x)
    a = b & 0x7FFFFFFF
    h = (a + 0xFFF + ((a >> 13) & 1) - 0x38000000) >> 13
    h = tl.where(a < 0x38800000, bits_of(of_bits(a) + 0.5) - 0x3F000000, h)  # below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    h = tl.where(a >= 0x477FF000, 0x7C00, h)  # 65520 and above
    h = tl.where(a > 0x7F800000, 0x7E00, h)
    return h | ((b >> 16) & 0x8000)


@triton.jit
def bf16_stochastic(x, noise):
    """The bf16 code of fp32 `x`, rounded by 16 bits of noise (int32)."""
    b = bits_of(x)
    a = b & 0x7FFFFFFF
    h = tl.minimum((a + noise) >> 16, 0x7F7F)  # a finite number stays finite
    h = tl.where(a >= 0x7F800000, a >> 16, h)
    h = tl.where(a > 0x7F800000, 0x7FC0, h)
    return h | ((b >> 16) & 0x8000)


@triton.jit
def fp16_stochastic(x, noise):
    """The fp16 code of fp32 `x`, rounded by 16 bits of noise (int32)."""
    b = bits_of(x)
    a = b & 0x7FFFFFFF
    h = (a + (noise >> 3) - 0x38000000) >> 13  # 13 bits are dropped
    small = a < 0x38800000  # below 2^-14: parts of 2^-16 of a subnormal's distance
    parts = (of_bits(tl.where(small, a, 0)) * 1099511627776.0).to(tl.int32)
    h = tl.minimum(tl.where(small, (parts + noise) >> 16, h), 0x7BFF)
    h = tl.where(a == 0x7F800000, 0x7C00, h)
    h = tl.where(a > 0x7F800000, 0x7E00, h)
    return h | ((b >> 16) & 0x8000)


@triton.jit
def nearest_code(x, FORM: tl.constexpr):
    """The code of fp32 `x` in a 16-bit format, rounded to nearest even."""
    return bf16_nearest(x) if FORM == BF16 else fp16_nearest(x)


@triton.jit
def saturated_code(x, FORM: tl.constexpr):
    """The same, finite numbers stopping at the format's largest."""
    h = nearest_code(x, FORM)
    infinite: tl.constexpr = 0x7F80 if FORM == BF16 else 0x7C00
    return tl.where(((h & 0x7FFF) == infinite) & (magnitude(x) < float("inf")), h - 1, h)


@triton.jit
def half_value(h, FORM: tl.constexpr):
    """The fp32 value of a 16-bit code."""
    return bf16_value(h) if FORM == BF16 else fp16_value(h)


# ---- noise ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def random_word(key1, key2, place):
    """The 32 random bits of the element at `place`; all three uint32."""
    x = place ^ key1
    x = x ^ (x >> 16)
    x = (x * _HASH1) ^ key2
    x = x ^ (x >> 15)
    x = x * _HASH2
    return x ^ (x >> 16)


@triton.jit
def state_noise(bits):
    """Other bits (uint32) of the same element: the lower 16 for its first moment, the upper 16 for the second."""
    y = bits * _STATES
    return y ^ (y >> 15)


# ---- memory --------------------------------------------------------------------------------------------------------------------


@triton.jit
def of_fp32(address, start, ALIGNED: tl.constexpr):
    """A pointer to element `start` of the fp32 tensor at `address` (int64). ALIGNED: it is a multiple of 16, so that 16 bytes are moved at a time."""
    pointer = address.to(tl.pointer_type(tl.float32)) + start
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def of_int16(address, start, ALIGNED: tl.constexpr):
    """The same of a tensor of 16 bits."""
    pointer = address.to(tl.pointer_type(tl.int16)) + start
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def of_int8(address, start, ALIGNED: tl.constexpr):
    """The same of an int8 tensor."""
    pointer = address.to(tl.pointer_type(tl.int8)) + start
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def of_uint8(address, start, ALIGNED: tl.constexpr):
    """The same of a uint8 tensor."""
    pointer = address.to(tl.pointer_type(tl.uint8)) + start
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def take(pointer, inside, MASKED: tl.constexpr):
    """What lies there; 0 outside."""
    if MASKED:
        return tl.load(pointer, mask=inside, other=0)
    return tl.load(pointer)


@triton.jit
def put(pointer, values, inside, MASKED: tl.constexpr):
    """Store, inside alone. Integers are cut off to the width of what the pointer points to."""
    values = values.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer, values, mask=inside)
    else:
        tl.store(pointer, values)


# ---- gradients and weights ---------------------------------------------------------------------------------------------------------


@triton.jit
def read_values(address, start, at, inside, FORM: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """The fp32 values of a tensor in one of the three formats."""
    if FORM == FP32:
        return take(of_fp32(address, start, ALIGNED) + at, inside, MASKED)
    h = take(of_int16(address, start, ALIGNED) + at, inside, MASKED).to(tl.int32)
    return half_value(h, FORM)


@triton.jit
def _ulp_exponent(h):
    """Exponent field (of fp32) of the distance of fp16 numbers at the code `h`."""
    return tl.maximum((h >> 10) & 31, 1) + 102


@triton.jit
def joined(h, low, FORM: tl.constexpr):
    """The fp32 number of which `h` is the 16-bit code and `low` (int32) the rest in 2^-16 of its ulp."""
    if FORM == BF16:
        return of_bits((h << 16) + low)
    unit = of_bits((_ulp_exponent(h) - 16) << 23)
    return fp16_value(h) + low.to(tl.float32) * unit


@triton.jit
def read_weight(
    weight, residual, start, at, inside, STORAGE: tl.constexpr, FORM: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The fp32 masters of a stretch of weights."""
    if FORM == FP32 or STORAGE == EXACT or STORAGE == STOCHASTIC:  # noqa: SIM109  Triton compares one number at a time
        return read_values(weight, start, at, inside, FORM, ALIGNED, MASKED)
    h = take(of_int16(weight, start, ALIGNED) + at, inside, MASKED).to(tl.int32)
    if STORAGE == SPLIT:
        return joined(h, take(of_int16(residual, start, ALIGNED) + at, inside, MASKED).to(tl.int32), FORM)
    if STORAGE == SPLIT24:
        return joined(h, take(of_int8(residual, start, ALIGNED) + at, inside, MASKED).to(tl.int32) << 8, FORM)
    return half_value(h, FORM) + half_value(take(of_int16(residual, start, ALIGNED) + at, inside, MASKED).to(tl.int32), FORM)


@triton.jit
def _rest(x, h, FORM: tl.constexpr):
    """What the code `h` misses of `x`, in 2^-16 of its ulp: -0x8000 .. 0x8000."""
    if FORM == BF16:
        return tl.minimum(tl.maximum(bits_of(x) - (h << 16), -0x8000), 0x8000)
    count = of_bits((270 - _ulp_exponent(h)) << 23)  # 2^16 over the distance of fp16 numbers there
    parts = (x - fp16_value(h)) * count
    parts = tl.where(parts == parts, parts, 0.0)  # inf - inf
    parts = tl.where(parts > -32768.0, tl.where(parts < 32768.0, parts, 32768.0), -32768.0)
    whole = parts.to(tl.int32)
    return tl.where(whole.to(tl.float32) > parts, whole - 1, whole)  # rounded down


@triton.jit
def split16(x, FORM: tl.constexpr):
    """fp32 `x` as a 16-bit code and a residual of 16 bits."""
    h = bf16_nearest(x) if FORM == BF16 else saturated_code(x, FORM)
    return h, tl.minimum(_rest(x, h, FORM), 0x7FFF)


@triton.jit
def split8(x, noise, FORM: tl.constexpr):
    """fp32 `x` as a 16-bit code and a residual of 8 bits, the last rounded by 8 bits of noise. See `numerics.split` for the carry."""
    if FORM == BF16:
        h = bf16_nearest(x)
        rest = (_rest(x, h, FORM) + noise) >> 8
        carried = rest == 128
        return tl.where(carried, h + 1, h), tl.where(carried, -128, rest)
    h = saturated_code(x, FORM)
    rest = (_rest(x, h, FORM) + noise) >> 8
    carried = (rest == 128) & ((h & 0x7FFF) < 0x7BFF)
    negative = (h & 0x8000) != 0
    above = tl.where(negative, h - 1, h + 1)
    wider = carried & (negative == 0) & ((above & 0x3FF) == 0) & (above >= 0x0800)  # a power of two: its ulp is twice as large
    rest = tl.where(wider, -64, tl.where(carried, -128, tl.minimum(rest, 127)))
    return tl.where(carried, above, h), rest


@triton.jit
def kahan_parts(x, FORM: tl.constexpr):
    """fp32 `x` as a 16-bit code and the code of what that misses."""
    h = saturated_code(x, FORM)
    rest = tl.where(magnitude(x) == float("inf"), 0.0, x - half_value(h, FORM))
    return h, nearest_code(rest, FORM)


@triton.jit
def write_weight(
    x, bits, weight, residual, start, at, inside, STORAGE: tl.constexpr, FORM: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """fp32 masters back into weights and what stands beside them. bits: uint32 noise of each element."""
    if FORM == FP32:
        put(of_fp32(weight, start, ALIGNED) + at, x, inside, MASKED)
    elif STORAGE == SPLIT:
        h, low = split16(x, FORM)
        put(of_int16(weight, start, ALIGNED) + at, h, inside, MASKED)
        put(of_int16(residual, start, ALIGNED) + at, low, inside, MASKED)
    elif STORAGE == SPLIT24:
        h, low = split8(x, (bits & 0xFF).to(tl.int32), FORM)
        put(of_int16(weight, start, ALIGNED) + at, h, inside, MASKED)
        put(of_int8(residual, start, ALIGNED) + at, low, inside, MASKED)
    elif STORAGE == KAHAN:
        h, low = kahan_parts(x, FORM)
        put(of_int16(weight, start, ALIGNED) + at, h, inside, MASKED)
        put(of_int16(residual, start, ALIGNED) + at, low, inside, MASKED)
    elif STORAGE == STOCHASTIC:
        noise = (bits & 0xFFFF).to(tl.int32)
        h = bf16_stochastic(x, noise) if FORM == BF16 else fp16_stochastic(x, noise)
        put(of_int16(weight, start, ALIGNED) + at, h, inside, MASKED)
    else:
        put(of_int16(weight, start, ALIGNED) + at, nearest_code(x, FORM), inside, MASKED)


# ---- states --------------------------------------------------------------------------------------------------------------------


@triton.jit
def _level(k, SIGNED: tl.constexpr):
    """The magnitude of level k (whole fp32 numbers) where the scale is 1."""
    if SIGNED:
        x = k * _STEP1
        return x * x
    x = k * _STEP2
    x = x * x
    return x * x


@triton.jit
def _scale_places(scales, start, size, BLOCKS: tl.constexpr):
    """Where the scales of a stretch's rows lie, as a column, and which of them there are."""
    first = start // COLUMNS
    rows = tl.arange(0, BLOCKS)[:, None]
    return of_fp32(scales, first, False) + rows, first + rows < (size + (COLUMNS - 1)) // COLUMNS


@triton.jit
def read_state(
    codes, scales, start, at, inside, size,
    CODEC: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The fp32 values of a stretch of a state. SIGNED: a first moment, otherwise a second one."""
    if CODEC == STATE_FP32:
        return take(of_fp32(codes, start, ALIGNED) + at, inside, MASKED)
    if CODEC == STATE_BF16:
        return bf16_value(take(of_int16(codes, start, ALIGNED) + at, inside, MASKED).to(tl.int32))
    places, there = _scale_places(scales, start, size, BLOCKS)
    scale = tl.load(places, mask=there, other=0.0)
    if SIGNED:
        k = take(of_int8(codes, start, ALIGNED) + at, inside, MASKED).to(tl.int32)
        value = _level(k.to(tl.float32), SIGNED) * scale
        return tl.where(k < 0, -value, value)
    return _level(take(of_uint8(codes, start, ALIGNED) + at, inside, MASKED).to(tl.int32).to(tl.float32), SIGNED) * scale


@triton.jit
def _root(x, SIGNED: tl.constexpr):
    """What levels are even in: the square root, or the fourth root."""
    root = tl.sqrt_rn(x)
    if SIGNED:
        return root
    return tl.sqrt_rn(root)


@triton.jit
def _encoded(x, scale, noise, SIGNED: tl.constexpr):
    """The codes (int32) of `x` in blocks of these scales, rounded by 16 bits of noise."""
    reach: tl.constexpr = _REACH1 if SIGNED else _REACH2
    size = magnitude(x)
    by = tl.div_rn(tl.full(scale.shape, reach, tl.float32), _root(tl.where(scale > 0, scale, 1.0), SIGNED))
    k = (_root(size, SIGNED) * by).to(tl.int32)
    below = k.to(tl.float32)
    low, high = _level(below, SIGNED) * scale, _level(below + 1.0, SIGNED) * scale
    share = (noise.to(tl.float32) + 0.5) * 1.52587890625e-05
    k += ((size - low) > (high - low) * share).to(tl.int32)
    if SIGNED:
        sign = bits_of(x) >> 31
        return (k ^ sign) - sign
    return tl.maximum(k, tl.where(size > 0, _LEAST, 0))


@triton.jit
def write_state(
    x, mixed, codes, scales, start, at, inside, size,
    CODEC: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A stretch of a state back into its format. mixed: uint32 noise of states."""
    if CODEC == STATE_FP32:
        put(of_fp32(codes, start, ALIGNED) + at, x, inside, MASKED)
    else:
        noise = ((mixed & 0xFFFF) if SIGNED else (mixed >> 16)).to(tl.int32)
        if CODEC == STATE_BF16:
            put(of_int16(codes, start, ALIGNED) + at, bf16_stochastic(x, noise), inside, MASKED)
        else:
            if MASKED:
                x = tl.where(inside, x, 0.0)  # the last block is filled up with zeros
            places, there = _scale_places(scales, start, size, BLOCKS)
            scale = of_bits(tl.max(bits_of(x) & 0x7FFFFFFF, axis=1))[:, None]
            tl.store(places, scale, mask=there)
            code = _encoded(x, scale, noise, SIGNED)
            if SIGNED:
                put(of_int8(codes, start, ALIGNED) + at, code, inside, MASKED)
            else:
                put(of_uint8(codes, start, ALIGNED) + at, code, inside, MASKED)
