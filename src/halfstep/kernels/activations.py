"""Activations to 8 bits and back in one pass each: the twin of `halfstep.numerics.activations`, with its bits.

Loops over one block of 128 at a time, each a part of its own so that two formats of codes and three of tensors make five parts and not six programs.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels import codes as numbers
from halfstep.kernels import pool, scalar
from halfstep.kernels.codes import BF16, FORMATS, FP16, FP32
from halfstep.kernels.compile import compiled, floats, halves, integers, part, unsigned_bytes
from halfstep.kernels.scalar import bf16_nearest, bf16_value, fp16_nearest, fp16_value, random_word
from halfstep.numerics import activations as plain
from halfstep.numerics.blocks import BLOCK
from halfstep.numerics.noise import GOLDEN
from halfstep.numerics.standins import is_shape

INT8, FP8 = range(2)
KINDS = {"int8": INT8, "fp8": FP8}
BLOCKS = pool.CHUNK // BLOCK  # that one thread works on in turn
SMALLEST = {FORMATS[dtype]: np.float32(value) for dtype, value in plain.SMALLEST.items()}
PARTS = (*scalar.PARTS, numbers.__file__, plain.__file__)

i32, u32, f32, i64 = np.int32, np.uint32, np.float32, np.int64


@part
def _bits(form, x, start, n, bits):
    """The fp32 bits of `n` elements, and zeros behind them."""
    if form == FP32:
        source = integers(x, start, n)
        for i in range(n):
            bits[i] = source[i]
    elif form == BF16:
        half = halves(x, start, n)
        for i in range(n):
            bits[i] = i32(i32(half[i]) << i32(16))
    else:
        half = halves(x, start, n)
        for i in range(n):
            bits[i] = f32(fp16_value(i32(half[i]))).view(i32)
    for i in range(n, BLOCK):
        bits[i] = i32(0)


@part
def _put(form, values, at, start, n):
    """fp32 `values` that are numbers of a format, to a tensor in it."""
    if form == FP32:
        out = floats(at, start, n)
        for i in range(n):
            out[i] = values[i]
    elif form == BF16:
        half = halves(at, start, n)
        for i in range(n):
            half[i] = np.int16(f32(values[i]).view(i32) >> i32(16))
    else:
        half = halves(at, start, n)
        for i in range(n):
            half[i] = np.int16(fp16_nearest(values[i]))


@part
def _round(form, values, smallest):
    """fp32 `values` to numbers of a format, not below its smallest."""
    if form == BF16:
        for i in range(BLOCK):
            values[i] = bf16_value(bf16_nearest(values[i]))
    elif form == FP16:
        for i in range(BLOCK):
            values[i] = fp16_value(fp16_nearest(values[i]))
    for i in range(BLOCK):
        values[i] = max(f32(values[i]), smallest)


@part
def _share_int8(m):
    steps = f32(f32(m - i32(1)) / f32(plain.STEPS))
    return f32(plain.LOWEST) if m == i32(1) else steps


@part
def _share_fp8(m):
    normal = i32(i32(m + i32(plain.FP8_SHIFT)) << i32(20)).view(f32)
    number = f32(f32(m) * f32(2.0**-9)) if m < i32(8) else normal
    return f32(number / f32(plain.FP8_LARGEST))


@part
def _levels(kind, a, m, low, high, scale):
    """The level below each magnitude, and what it and the next one are before they are rounded."""
    divisor = scale if scale > f32(0) else f32(1)
    if kind == INT8:
        for i in range(BLOCK):
            part = f32(i32(a[i]).view(f32) / divisor)
            m[i] = i32(i32(np.floor(f32(part * f32(plain.STEPS)))) + i32(1))
            low[i] = f32(_share_int8(m[i]) * scale)
            high[i] = f32(_share_int8(i32(m[i] + i32(1))) * scale)
    else:
        for i in range(BLOCK):
            t = f32(f32(i32(a[i]).view(f32) / divisor) * f32(plain.FP8_LARGEST))
            small = i32(np.floor(f32(t * f32(512))))
            normal = i32(i32(f32(t).view(i32) >> i32(20)) - i32(plain.FP8_SHIFT))
            m[i] = max(small if t < f32(2.0**-6) else normal, i32(1))
            low[i] = f32(_share_fp8(m[i]) * scale)
            high[i] = f32(_share_fp8(i32(m[i] + i32(1))) * scale)


@part
def _largest(bits):
    """The bits of the largest finite magnitude, and the sum of all bits."""
    top, total = i32(0), u32(0)
    for i in range(BLOCK):
        magnitude = i32(bits[i] & i32(0x7FFFFFFF))
        top = max(top, magnitude if magnitude < i32(0x7F800000) else i32(0))
        total = u32(total + u32(bits[i]))
    return top, total


@part
def _choose(bits, m, low, high, key1, key2, codes, n):
    """Up or down by chance, then codes with their signs."""
    for i in range(n):
        magnitude = i32(bits[i] & i32(0x7FFFFFFF))
        finite = magnitude < i32(0x7F800000)
        a = i32(magnitude if finite else i32(0)).view(f32)
        share = f32(f32(f32(u32(random_word(key1, key2, u32(i)) >> u32(16))) + f32(0.5)) * f32(2.0**-16))
        up = i32(1) if f32(a - low[i]) > f32(f32(high[i] - low[i]) * share) else i32(0)
        code = i32(m[i] + up) if finite else i32(plain.INFINITE)
        code = i32(code + i32(plain.NEGATIVE)) if bits[i] < i32(0) else code
        code = i32(0) if magnitude == i32(0) else code
        codes[i] = np.uint8(i32(plain.NEGATIVE) if magnitude > i32(0x7F800000) else code)


@part
def _mixed(x):
    return random_word(u32(0), u32(0), x)


def _pack(form, kind, x, codes, scales, numel, word, smallest, space, first, last):
    buffers = i64(space.ctypes.data)
    bits, m = integers(buffers, 0, BLOCK), integers(buffers, BLOCK, BLOCK)
    low, high = floats(buffers, 2 * BLOCK, BLOCK), floats(buffers, 3 * BLOCK, BLOCK)
    one = floats(buffers, 4 * BLOCK, 1)
    a = integers(buffers, 4 * BLOCK + 8, BLOCK)
    for block in range(first, last):
        start = i64(block * BLOCK)
        n = min(BLOCK, numel - start)
        _bits(form, x, start, n, bits)
        top, total = _largest(bits)
        for i in range(BLOCK):
            magnitude = i32(bits[i] & i32(0x7FFFFFFF))
            a[i] = magnitude if magnitude < i32(0x7F800000) else i32(0)
        scale = i32(top).view(f32)
        key1 = _mixed(u32(total ^ _mixed(u32(u32(block) ^ word))))
        key2 = _mixed(u32(key1 ^ u32(GOLDEN)))
        _levels(kind, a, m, low, high, scale)
        _round(form, low, smallest)
        _round(form, high, smallest)
        _choose(bits, m, low, high, key1, key2, unsigned_bytes(codes, start, n), n)
        one[0] = scale
        _put(form, one, scales, block, 1)


def _unpack(form, kind, codes, scales, out, numel, smallest, space, first, last):
    buffers = i64(space.ctypes.data)
    values = floats(buffers, 0, BLOCK)
    bits = integers(buffers, BLOCK, BLOCK)
    for block in range(first, last):
        start = i64(block * BLOCK)
        n = min(BLOCK, numel - start)
        _bits(form, scales, block, 1, bits)
        scale = i32(bits[0]).view(f32)
        source = unsigned_bytes(codes, start, n)
        if kind == INT8:
            for i in range(n):
                values[i] = f32(_share_int8(i32(source[i] & np.uint8(127))) * scale)
        else:
            for i in range(n):
                values[i] = f32(_share_fp8(i32(source[i] & np.uint8(127))) * scale)
        _round(form, values, smallest)
        for i in range(n):
            m = i32(source[i] & np.uint8(127))
            value = f32(0) if m == i32(0) else f32(np.inf) if m == i32(127) else values[i]
            value = f32(-value) if source[i] >= np.uint8(128) else value
            values[i] = f32(np.nan) if source[i] == np.uint8(128) else value
        _put(form, values, out, start, n)


pack_blocks = compiled(_pack, *PARTS)
unpack_blocks = compiled(_unpack, *PARTS)


def pack(x: Tensor, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`halfstep.numerics.activations.pack` of a contiguous tensor on the CPU, taken flat in the order of memory."""
    codes = torch.empty(x.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-x.numel() // BLOCK), dtype=x.dtype)
    if is_shape(x):
        return codes, scales
    form = FORMATS[x.dtype]
    about = (form, KINDS[kind], x.data_ptr(), codes.data_ptr(), scales.data_ptr(), x.numel(), u32(plain.keys(seed)), SMALLEST[form])
    pool.share_range(scales.numel(), BLOCKS, lambda first, last: pack_blocks(*about, np.empty(5 * BLOCK + 16, np.float32), first, last))
    return codes, scales


def unpack(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """`halfstep.numerics.activations.unpack` on the CPU."""
    out = torch.empty(codes.numel(), dtype=scales.dtype)
    if is_shape(codes):
        return out
    form = FORMATS[scales.dtype]
    about = (form, KINDS[kind], codes.data_ptr(), scales.data_ptr(), out.data_ptr(), codes.numel(), SMALLEST[form])
    pool.share_range(scales.numel(), BLOCKS, lambda first, last: unpack_blocks(*about, np.empty(2 * BLOCK, np.float32), first, last))
    return out
