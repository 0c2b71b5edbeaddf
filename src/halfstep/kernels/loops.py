"""The compiled loops that read and write: numba twins of the plain definitions in `halfstep.numerics`, with equal bits.

Composed, not multiplied: weights, gradients and states of a stretch are decoded into fp32 buffers that fit the first-level cache, an update
rule (`halfstep.kernels.rules`) runs on the buffers, and everything is encoded again. Which storage, codec and format it is costs one branch
per stretch.
Rules for this file: 32-bit operations only inside a loop (numba widens int32 to int64 unless told each time, and LLVM then no longer
vectorises well); no fastmath where bits must agree with a definition; short loops rather than long ones, since a processor looks a hundred
instructions ahead, and must find several turns of the loop there to have something to do while a root or a division takes its time.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from halfstep.kernels import codes, scalar
from halfstep.kernels.codes import BF16, BLOCK, FP32, KAHAN, SPLIT, SPLIT24, STATE_BF16, STATE_FP32, STOCHASTIC
from halfstep.kernels.compile import compiled, floats, halves, inlined, integers, naturals, part, reordered, signed_bytes, unsigned_bytes
from halfstep.kernels.scalar import (
    bf16_nearest,
    bf16_rest,
    bf16_stochastic,
    bf16_value,
    fp16_nearest,
    fp16_rest,
    fp16_saturated,
    fp16_stochastic,
    fp16_ulp_exponent,
    fp16_value,
    random_word,
    state_noise,
)
from halfstep.numerics import blocks as levels
from halfstep.numerics.blocks import LEAST, POSITIVE_LEVELS, SHORT, SIGNED_LEVELS

i16, i32, i64, u8, i8, u32, f32, f64 = np.int16, np.int32, np.int64, np.uint8, np.int8, np.uint32, np.float32, np.float64

STRETCH = 512  # elements that are worked on at once: all buffers take 27 KB, less than a first-level cache
PARTS = (__file__, *scalar.PARTS, codes.__file__, levels.__file__)  # all files that are compiled into what calls these
APART = 48  # elements between buffers: at distances of 4096 bytes they would compete for the same cache sets
STEP1, STEP2 = 1 / SIGNED_LEVELS, 1 / POSITIVE_LEVELS
REACH1, REACH2 = SIGNED_LEVELS * SHORT, POSITIVE_LEVELS * SHORT

# columns of the tables
#   places   addresses of weight, residual, first moment, its scales, second moment, its scales
#   kinds    storage, format of the weight, codec of the first and of the second moment
#   scalars  factor of the gradient, then those of the rule (numerics.Settings.scalars): eight in all
#   chunks   tensor, first element, end
# Buffers are known by the address of the first one, as tensors are: numba counts the references to each slice of an array, by locked operations.
ROW = STRETCH + APART
P, M, V, G, ROOT, SCALE1, SCALE2, BITS, MIXED, K1, K2, SPARE = range(0, 12 * ROW, ROW)  # where they begin, in words of 4 bytes
BUFFERS = 12 * ROW + 16  # fp32 numbers: some more, so that they can begin with a cache line


@part
def _blocks(address, start, n):
    return floats(address, start // BLOCK, (n + BLOCK - 1) // BLOCK)


@part
def _first_line(space):
    return (i64(space.ctypes.data) + i64(63)) // i64(64) * i64(64)


# ---- noise ---------------------------------------------------------------------------------------------------------------------


@part
def _draw(key1, key2, start, bits, mixed):
    """The noise of weights, and that of states."""
    place = u32(start)
    for i in range(bits.shape[0]):
        word = random_word(key1, key2, place)
        bits[i] = word
        mixed[i] = state_noise(word)
        place = u32(place + u32(1))


# ---- decoding: into an fp32 buffer ---------------------------------------------------------------------------------------------


@part
def _read_bf16(source, factor, out):
    for i in range(out.shape[0]):
        out[i] = f32(bf16_value(i32(source[i])) * factor)


@part
def _read_fp16(source, factor, out):
    for i in range(out.shape[0]):
        out[i] = f32(fp16_value(i32(source[i])) * factor)


@part
def _read_fp32(source, factor, out):
    for i in range(out.shape[0]):
        out[i] = f32(source[i] * factor)


@part
def _join_bf16(high, low, out):
    for i in range(out.shape[0]):
        out[i] = i32(i32(i32(high[i]) << i32(16)) + i32(low[i])).view(f32)


@part
def _join_bf16_8(high, low, out):
    for i in range(out.shape[0]):
        out[i] = i32(i32(i32(high[i]) << i32(16)) + i32(i32(low[i]) << i32(8))).view(f32)


@part
def _join_fp16(high, low, out):
    for i in range(out.shape[0]):
        h = i32(high[i])
        unit = i32(i32(fp16_ulp_exponent(h) - i32(16)) << i32(23)).view(f32)
        out[i] = f32(fp16_value(h) + f32(f32(i32(low[i])) * unit))


@part
def _join_fp16_8(high, low, out):
    for i in range(out.shape[0]):
        h = i32(high[i])
        unit = i32(i32(fp16_ulp_exponent(h) - i32(16)) << i32(23)).view(f32)
        out[i] = f32(fp16_value(h) + f32(f32(i32(i32(low[i]) << i32(8))) * unit))


@part
def _add_bf16(source, out):
    for i in range(out.shape[0]):
        out[i] = f32(out[i] + bf16_value(i32(source[i])))


@part
def _add_fp16(source, out):
    for i in range(out.shape[0]):
        out[i] = f32(out[i] + fp16_value(i32(source[i])))


@part
def _first_value(code, scale):
    x = f32(f32(code) * f32(STEP1))
    return f32(f32(f32(abs(x)) * x) * scale)


@part
def _second_value(code, scale):
    x = f32(f32(code) * f32(STEP2))
    x = f32(x * x)
    return f32(f32(x * x) * scale)


@part
def _read_first(codes, scales, out):
    whole = codes.shape[0] // BLOCK
    for block in range(whole):
        begin, scale = block * BLOCK, scales[block]
        for j in range(BLOCK):  # a number of turns that is known: nothing is left over, and LLVM unrolls
            out[begin + j] = _first_value(i32(codes[begin + j]), scale)
    for i in range(whole * BLOCK, codes.shape[0]):
        out[i] = _first_value(i32(codes[i]), scales[whole])


@part
def _read_second(codes, scales, out):
    whole = codes.shape[0] // BLOCK
    for block in range(whole):
        begin, scale = block * BLOCK, scales[block]
        for j in range(BLOCK):
            out[begin + j] = _second_value(i32(codes[begin + j]), scale)
    for i in range(whole * BLOCK, codes.shape[0]):
        out[i] = _second_value(i32(codes[i]), scales[whole])


# ---- encoding: out of an fp32 buffer -------------------------------------------------------------------------------------------


@part
def _write_bf16(x, out):
    for i in range(x.shape[0]):
        out[i] = i16(bf16_nearest(x[i]))


@part
def _write_fp16(x, out):
    for i in range(x.shape[0]):
        out[i] = i16(fp16_nearest(x[i]))


@part
def _write_bf16_stochastic(x, bits, out):
    for i in range(x.shape[0]):
        out[i] = i16(bf16_stochastic(x[i], i32(bits[i] & u32(0xFFFF))))


@part
def _write_fp16_stochastic(x, bits, out):
    for i in range(x.shape[0]):
        out[i] = i16(fp16_stochastic(x[i], i32(bits[i] & u32(0xFFFF))))


@part
def _split_bf16(x, high, low):
    for i in range(x.shape[0]):
        h = bf16_nearest(x[i])
        high[i] = i16(h)
        low[i] = i16(min(bf16_rest(x[i], h), i32(0x7FFF)))


@part
def _split_bf16_8(x, bits, high, low):
    for i in range(x.shape[0]):
        h = bf16_nearest(x[i])
        rest = i32(i32(bf16_rest(x[i], h) + i32(bits[i] & u32(0xFF))) >> i32(8))
        carried = rest == i32(128)
        high[i] = i16(i32(h + i32(carried)))
        low[i] = i8(i32(-128) if carried else rest)


@part
def _split_fp16(x, high, low):
    for i in range(x.shape[0]):
        h = fp16_saturated(x[i])
        high[i] = i16(h)
        low[i] = i16(min(fp16_rest(x[i], h), i32(0x7FFF)))


@part
def _split_fp16_8(x, bits, high, low):
    for i in range(x.shape[0]):
        h = fp16_saturated(x[i])
        rest = i32(i32(fp16_rest(x[i], h) + i32(bits[i] & u32(0xFF))) >> i32(8))
        if rest == i32(128):
            if i32(h & i32(0x7FFF)) < i32(0x7BFF):
                negative = i32(h & i32(0x8000)) != i32(0)
                h = i32(h - i32(1)) if negative else i32(h + i32(1))
                wider = (not negative) and i32(h & i32(0x3FF)) == i32(0) and h >= i32(0x0800)  # the next power of two: its ulp is twice as large
                rest = i32(-64) if wider else i32(-128)
            else:
                rest = i32(127)
        high[i] = i16(h)
        low[i] = i8(rest)


@part
def _kahan_bf16(x, high, low):
    for i in range(x.shape[0]):
        h = bf16_nearest(x[i])
        if i32(h & i32(0x7FFF)) == i32(0x7F80) and f32(abs(x[i])) < f32(np.inf):
            h = i32(h - i32(1))
        rest = f32(x[i] - bf16_value(h))
        high[i] = i16(h)
        low[i] = i16(bf16_nearest(f32(0) if f32(abs(x[i])) == f32(np.inf) else rest))


@part
def _kahan_fp16(x, high, low):
    for i in range(x.shape[0]):
        h = fp16_saturated(x[i])
        rest = f32(x[i] - fp16_value(h))
        high[i] = i16(h)
        low[i] = i16(fp16_nearest(f32(0) if f32(abs(x[i])) == f32(np.inf) else rest))


@part
def _write_bf16_first(x, mixed, out):
    for i in range(x.shape[0]):
        out[i] = i16(bf16_stochastic(x[i], i32(mixed[i] & u32(0xFFFF))))


@part
def _write_bf16_second(x, mixed, out):
    for i in range(x.shape[0]):
        out[i] = i16(bf16_stochastic(x[i], i32(mixed[i] >> u32(16))))


@part
def _largest(x):
    """The largest magnitude in `x`."""
    found = i32(0)
    for i in range(x.shape[0]):
        found = max(found, i32(f32(x[i]).view(i32) & i32(0x7FFFFFFF)))
    return i32(found).view(f32)


@part
def _scale(x, scales):
    """The largest magnitude of each of some whole blocks."""
    for block in range(scales.shape[0]):
        begin, found = block * BLOCK, i32(0)
        for j in range(BLOCK):
            found = max(found, i32(f32(x[begin + j]).view(i32) & i32(0x7FFFFFFF)))
        scales[block] = i32(found).view(f32)


@part
def _place_first(key1, key2, start, x, scales, bits, mixed, k):
    """The level below each number of whole blocks, and the noise: a root and a hash keep different units of the processor busy."""
    for block in range(scales.shape[0]):
        begin, place, scale = block * BLOCK, u32(u32(start) + u32(block * BLOCK)), scales[block]
        by = f32(f32(REACH1) / f32(np.sqrt(scale if scale > f32(0) else f32(1))))
        for j in range(BLOCK):
            i = begin + j
            word = random_word(key1, key2, place)
            bits[i] = word
            mixed[i] = state_noise(word)
            k[i] = i32(f32(f32(np.sqrt(f32(abs(x[i])))) * by))
            place = u32(place + u32(1))  # counted by itself, in 32 bits: made of j, LLVM puts it together one by one


@part
def _first_code(x, k, noise, scale):
    """Level k with the sign of `x`, or the one above it."""
    low, high = _first_value(f32(k), scale), _first_value(f32(f32(k) + f32(1)), scale)
    chance = f32(f32(f32(i32(noise & u32(0xFFFF))) + f32(0.5)) * f32(1 / 65536))
    code = i32(k + i32(f32(f32(abs(x)) - low) > f32(f32(high - low) * chance)))
    sign = i32(f32(x).view(i32) >> i32(31))
    return i8(i32(i32(code ^ sign) - sign))


@part
def _write_first(x, k, mixed, scales, codes, root, root_scales, root_k):
    """Up from level k or not. Beside it the level below each second moment, from its root, for the same reason."""
    for block in range(scales.shape[0]):
        begin, scale, root_scale = block * BLOCK, scales[block], root_scales[block]
        by = f32(f32(REACH2) / f32(np.sqrt(f32(np.sqrt(root_scale if root_scale > f32(0) else f32(1))))))
        for j in range(BLOCK):
            i = begin + j
            root_k[i] = i32(f32(f32(np.sqrt(root[i])) * by))
            codes[i] = _first_code(x[i], k[i], mixed[i], scale)


@part
def _write_first_alone(x, k, mixed, scales, codes):
    """The same where there is no second moment."""
    for block in range(scales.shape[0]):
        begin, scale = block * BLOCK, scales[block]
        for j in range(BLOCK):
            i = begin + j
            codes[i] = _first_code(x[i], k[i], mixed[i], scale)


@part
def _write_second(x, k, mixed, scales, codes):
    """The same; what is not zero gets the lowest level at least."""
    for block in range(scales.shape[0]):
        begin, scale = block * BLOCK, scales[block]
        for j in range(BLOCK):
            i = begin + j
            value, level = x[i], f32(k[i])
            low, high = _second_value(level, scale), _second_value(f32(level + f32(1)), scale)
            chance = f32(f32(f32(i32(mixed[i] >> u32(16))) + f32(0.5)) * f32(1 / 65536))
            code = i32(k[i] + i32(f32(value - low) > f32(f32(high - low) * chance)))
            codes[i] = u8(max(code, i32(LEAST) if value > f32(0) else i32(0)))


# ---- which of them -------------------------------------------------------------------------------------------------------------


@inlined
def _read_weight(storage, form, high, low, low8, out):
    if form == BF16:
        if storage == SPLIT:
            _join_bf16(high, low, out)
        elif storage == SPLIT24:
            _join_bf16_8(high, low8, out)
        else:
            _read_bf16(high, f32(1), out)
            if storage == KAHAN:
                _add_bf16(low, out)
    elif storage == SPLIT:
        _join_fp16(high, low, out)
    elif storage == SPLIT24:
        _join_fp16_8(high, low8, out)
    else:
        _read_fp16(high, f32(1), out)
        if storage == KAHAN:
            _add_fp16(low, out)


@inlined
def _write_weight(x, bits, storage, form, high, low, low8):
    if form == BF16:
        if storage == SPLIT:
            _split_bf16(x, high, low)
        elif storage == SPLIT24:
            _split_bf16_8(x, bits, high, low8)
        elif storage == KAHAN:
            _kahan_bf16(x, high, low)
        elif storage == STOCHASTIC:
            _write_bf16_stochastic(x, bits, high)
        else:
            _write_bf16(x, high)
    elif storage == SPLIT:
        _split_fp16(x, high, low)
    elif storage == SPLIT24:
        _split_fp16_8(x, bits, high, low8)
    elif storage == KAHAN:
        _kahan_fp16(x, high, low)
    elif storage == STOCHASTIC:
        _write_fp16_stochastic(x, bits, high)
    else:
        _write_fp16(x, high)


@inlined
def _read_gradient(form, address, start, n, factor, out):
    """The gradient times `factor`: fp32 as it lies in memory where nothing is to be done, else in `out`."""
    g = out
    if form == FP32:
        source = floats(address, start, n)
        if factor == f32(1):
            g = source
        else:
            _read_fp32(source, factor, g)
    elif form == BF16:
        _read_bf16(halves(address, start, n), factor, g)
    else:
        _read_fp16(halves(address, start, n), factor, g)
    return g


@inlined
def _read_state(codec, address, scales, start, n, first, x):
    """A moment: as it lies in memory where it is fp32, else decoded in `x`."""
    if codec == STATE_FP32:
        x = floats(address, start, n)
    elif codec == STATE_BF16:
        _read_bf16(halves(address, start, n), f32(1), x)
    elif first:
        _read_first(signed_bytes(address, start, n), _blocks(scales, start, n), x)
    else:
        _read_second(unsigned_bytes(address, start, n), _blocks(scales, start, n), x)
    return x


@inlined
def _write_int8(first, second, m8, m_scales, v8, v_scales, key1, key2, start, n, buffers):
    """Both moments, or one, from their buffers, by blocks: the last one is filled up with zeros, and its codes go by way of a buffer.

    Draws the noise of weights too.
    """
    blocks = (n + BLOCK - 1) // BLOCK
    whole = blocks * BLOCK
    m, v, root = floats(buffers, M, whole), floats(buffers, V, whole), floats(buffers, ROOT, whole)
    scale1, scale2 = floats(buffers, SCALE1, blocks), floats(buffers, SCALE2, blocks)
    bits, mixed = naturals(buffers, BITS, whole), naturals(buffers, MIXED, whole)
    k1, k2 = integers(buffers, K1, whole), integers(buffers, K2, whole)
    for i in range(n, whole):
        m[i] = v[i] = root[i] = f32(0)
    _scale(m, scale1)
    _scale(v, scale2)
    _place_first(key1, key2, start, m, scale1, bits, mixed, k1)
    codes = m8 if first and n == whole else signed_bytes(buffers, i64(4 * SPARE), whole)
    _write_first(m, k1, mixed, scale1, codes, root, scale2, k2)
    if first:
        for i in range(blocks):
            m_scales[i] = scale1[i]
        for i in range(n if n < whole else 0):
            m8[i] = codes[i]
    if second:
        codes = v8 if n == whole else unsigned_bytes(buffers, i64(4 * SPARE), whole)
        _write_second(v, k2, mixed, scale2, codes)
        for i in range(blocks):
            v_scales[i] = scale2[i]
        for i in range(n if n < whole else 0):
            v8[i] = codes[i]


@inlined
def _write_first_int8(m8, m_scales, key1, key2, start, n, buffers):
    """The first moment alone, in the same way; draws the noise of weights too."""
    blocks = (n + BLOCK - 1) // BLOCK
    whole = blocks * BLOCK
    m, scale1, k1 = floats(buffers, M, whole), floats(buffers, SCALE1, blocks), integers(buffers, K1, whole)
    bits, mixed = naturals(buffers, BITS, whole), naturals(buffers, MIXED, whole)
    for i in range(n, whole):
        m[i] = f32(0)
    _scale(m, scale1)
    _place_first(key1, key2, start, m, scale1, bits, mixed, k1)
    codes = m8 if n == whole else signed_bytes(buffers, i64(4 * SPARE), whole)
    _write_first_alone(m, k1, mixed, scale1, codes)
    for i in range(blocks):
        m_scales[i] = scale1[i]
    for i in range(n if n < whole else 0):
        m8[i] = codes[i]


# ---- what is called, beside the update rules ---------------------------------------------------------------------------------


def _squares(addresses, forms, chunks, sums, largest, first, last, space):
    buffers = _first_line(space)
    for chunk in range(first, last):
        t, begin, end = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
        total, bits = f64(0), i32(0)
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            x = _read_gradient(forms[t], addresses[t], start, n, f32(1), floats(buffers, G, n))
            total += _sum_of_squares(x)
            bits = max(bits, f32(_largest(x)).view(i32))
        sums[chunk] = total
        largest[chunk] = i32(bits).view(f32)


def _count(addresses, counts):
    """Count a step in fp32 numbers at these addresses, and tell what they are then."""
    for i in range(addresses.shape[0]):
        place = floats(addresses[i], 0, 1)
        place[0] = f32(place[0] + f32(1))
        counts[i] = place[0]


@reordered
def _sum_of_squares(x):
    total = f64(0)
    for i in range(x.shape[0]):
        value = f64(x[i])
        total += value * value
    return total


squares_chunks = compiled(_squares, *PARTS)
count_steps = compiled(_count)
