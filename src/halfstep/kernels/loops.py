"""The compiled loops: numba twins of the plain definitions in `halfstep.numerics`, with equal bits.

Composed, not multiplied: weights, gradients and states of a stretch are decoded into fp32 buffers that fit the first-level cache, the
update rule runs on the buffers, and everything is encoded again. Which storage, codec and format it is costs one branch per stretch.
One combination is written out as well, `_step_split_bf16`: it is bound by memory, and without buffers a fifth faster.
Rules for this file: 32-bit operations only inside a loop (numba widens int32 to int64 unless told each time, and LLVM then no longer
vectorises well); no fastmath where bits must agree with a definition; everything compiled stands in this one file, because numba's disk
cache looks at the file of the outermost function alone.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from halfstep.kernels.compile import compiled, floats, halves, inlined, part, reordered, signed_bytes, unsigned_bytes

i16, i32, i64, u8, i8, u32, f32, f64 = np.int16, np.int32, np.int64, np.uint8, np.int8, np.uint32, np.float32, np.float64

STRETCH = 512  # elements that are worked on at once: 4 fp32 buffers and the noise take 10 KB of a first-level cache
APART = 48  # elements between buffers: at distances of 4096 bytes they would compete for the same cache sets
BLOCK = 128  # elements that share a scale; this and the next as in numerics.blocks
LEAST = 6  # the lowest code of a second moment that is not zero

FP32, BF16, FP16 = 0, 1, 2  # formats of weights and gradients
EXACT, SPLIT, SPLIT24, KAHAN, STOCHASTIC = 0, 1, 2, 3, 4  # storages; EXACT: fp32 as it is, or 16 bits with nothing beside them
STATE_FP32, STATE_BF16, STATE_INT8 = 0, 1, 2  # codecs

# columns of the tables
#   places   addresses of weight, residual, first moment, its scales, second moment, its scales
#   kinds    storage, format of the weight, codec of the first and of the second moment
#   scalars  factor of the gradient, then numerics.adamw_scalars
#   chunks   tensor, first element, end
#   buffers  fp32 weight, first moment, second moment, gradient; BUFFERS is their shape
BUFFERS = (4, STRETCH + APART)


@part
def _blocks(address, start, n):
    return floats(address, start // BLOCK, (n + BLOCK - 1) // BLOCK)


# ---- one number ----------------------------------------------------------------------------------------------------------------


@part
def _bf16_value(h):
    return i32(i32(h) << i32(16)).view(f32)


@part
def _fp16_value(h):
    bits = i32(i32(h & i32(0x7FFF)) << i32(13))
    value = i32(bits + i32(0x38000000)).view(f32)  # the exponent's bias goes from 15 to 127
    if bits < i32(0x00800000):  # subnormal: a count of 2^-24
        value = f32(i32(h & i32(0x7FFF))) * f32(5.9604644775390625e-08)
    if bits >= i32(0x0F800000):  # inf or NaN
        value = i32(bits | i32(0x7F800000)).view(f32)
    return i32(f32(value).view(i32) | i32(i32(h & i32(0x8000)) << i32(16))).view(f32)


@part
def _bf16_nearest(x):
    b = f32(x).view(i32)
    h = i32(i32(b + i32(i32(0x7FFF) + i32(i32(b >> i32(16)) & i32(1)))) >> i32(16))
    if i32(b & i32(0x7FFFFFFF)) > i32(0x7F800000):
        h = i32(0x7FC0)
    return h


@part
def _fp16_nearest(x):
    b = f32(x).view(i32)
    a = i32(b & i32(0x7FFFFFFF))
    h = i32(i32(i32(a + i32(0xFFF)) + i32(i32(a >> i32(13)) & i32(1))) - i32(0x38000000)) >> i32(13)
    if a < i32(0x38800000):  # below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        h = i32(f32(a.view(f32) + f32(0.5)).view(i32) - i32(0x3F000000))
    if a >= i32(0x477FF000):  # 65520 and above
        h = i32(0x7C00)
    if a > i32(0x7F800000):
        h = i32(0x7E00)
    return i32(h | i32(i32(b >> i32(16)) & i32(0x8000)))


@part
def _bf16_stochastic(x, noise):
    b = f32(x).view(i32)
    a = i32(b & i32(0x7FFFFFFF))
    h = min(i32(i32(a + noise) >> i32(16)), i32(0x7F7F))  # a finite number stays finite
    if a >= i32(0x7F800000):
        h = i32(a >> i32(16))
    if a > i32(0x7F800000):
        h = i32(0x7FC0)
    return i32(h | i32(i32(b >> i32(16)) & i32(0x8000)))


@part
def _fp16_stochastic(x, noise):
    b = f32(x).view(i32)
    a = i32(b & i32(0x7FFFFFFF))
    h = i32(i32(i32(a + i32(noise >> i32(3))) - i32(0x38000000)) >> i32(13))  # 13 bits are dropped
    if a < i32(0x38800000):  # below 2^-14: parts of 2^-16 of a subnormal's distance
        h = i32(i32(i32(min(f32(a.view(f32) * f32(1099511627776.0)), f32(134217728.0))) + noise) >> i32(16))
    h = min(h, i32(0x7BFF))
    if a == i32(0x7F800000):
        h = i32(0x7C00)
    if a > i32(0x7F800000):
        h = i32(0x7E00)
    return i32(h | i32(i32(b >> i32(16)) & i32(0x8000)))


@part
def _bf16_rest(x, h):
    """What the code `h` misses of `x`, as a difference of bits."""
    return min(max(i32(f32(x).view(i32) - i32(h << i32(16))), i32(-0x8000)), i32(0x8000))


@part
def _fp16_ulp_exponent(h):
    """Exponent field (of fp32) of the distance of fp16 numbers at the code `h`."""
    return i32(max(i32(i32(h >> i32(10)) & i32(31)), i32(1)) + i32(102))


@part
def _fp16_saturated(x):
    """Rounded to nearest even, stopping at 65504."""
    h = _fp16_nearest(x)
    if i32(h & i32(0x7FFF)) == i32(0x7C00) and f32(abs(x)) < f32(np.inf):
        h = i32(h - i32(1))
    return h


@part
def _state_noise(bits):
    y = u32(u32(bits) * u32(0x2C1B3C6D))
    return u32(y ^ u32(y >> u32(15)))


# ---- noise ---------------------------------------------------------------------------------------------------------------------


@part
def _draw(key1, key2, start, out):
    base = u32(start)
    for i in range(out.shape[0]):
        x = u32(u32(base + u32(i)) ^ key1)
        x = u32(x ^ u32(x >> u32(16)))
        x = u32(u32(x * u32(0x7FEB352D)) ^ key2)
        x = u32(x ^ u32(x >> u32(15)))
        x = u32(x * u32(0x846CA68B))
        out[i] = u32(x ^ u32(x >> u32(16)))


# ---- decoding: into an fp32 buffer ---------------------------------------------------------------------------------------------


@part
def _read_bf16(source, factor, out):
    for i in range(out.shape[0]):
        out[i] = f32(_bf16_value(i32(source[i])) * factor)


@part
def _read_fp16(source, factor, out):
    for i in range(out.shape[0]):
        out[i] = f32(_fp16_value(i32(source[i])) * factor)


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
        unit = i32(i32(_fp16_ulp_exponent(h) - i32(16)) << i32(23)).view(f32)
        out[i] = f32(_fp16_value(h) + f32(f32(i32(low[i])) * unit))


@part
def _join_fp16_8(high, low, out):
    for i in range(out.shape[0]):
        h = i32(high[i])
        unit = i32(i32(_fp16_ulp_exponent(h) - i32(16)) << i32(23)).view(f32)
        out[i] = f32(_fp16_value(h) + f32(f32(i32(i32(low[i]) << i32(8))) * unit))


@part
def _add_bf16(source, out):
    for i in range(out.shape[0]):
        out[i] = f32(out[i] + _bf16_value(i32(source[i])))


@part
def _add_fp16(source, out):
    for i in range(out.shape[0]):
        out[i] = f32(out[i] + _fp16_value(i32(source[i])))


@part
def _first_value(code, scale):
    x = f32(f32(i32(abs(i32(code)))) * f32(1 / 127))
    return f32(f32(x * x) * scale)


@part
def _second_value(code, scale):
    x = f32(f32(i32(code)) * f32(1 / 255))
    x = f32(x * x)
    return f32(f32(x * x) * scale)


@part
def _read_first(codes, scales, out):
    for block in range(scales.shape[0]):
        begin, scale = block * BLOCK, scales[block]
        k, x = codes[begin : begin + BLOCK], out[begin : begin + BLOCK]  # indices from 0: numba then sees that none is negative
        for i in range(x.shape[0]):
            value = _first_value(k[i], scale)
            x[i] = f32(-value) if i32(k[i]) < i32(0) else value


@part
def _read_second(codes, scales, out):
    for block in range(scales.shape[0]):
        begin, scale = block * BLOCK, scales[block]
        k, x = codes[begin : begin + BLOCK], out[begin : begin + BLOCK]
        for i in range(x.shape[0]):
            x[i] = _second_value(k[i], scale)


# ---- the update rule: the twin of numerics.updates.adamw_ ------------------------------------------------------------------------


@part
def _update(p, g, m, v, scalars):
    decay, rise1, keep2, rise2, root2, floor, size = scalars[1], scalars[2], scalars[3], scalars[4], scalars[5], scalars[6], scalars[7]
    for i in range(p.shape[0]):
        gi = g[i]
        mi = f32(m[i] + f32(f32(gi - m[i]) * rise1))
        vi = f32(f32(v[i] * keep2) + f32(f32(gi * gi) * rise2))
        denominator = f32(f32(f32(np.sqrt(vi)) * root2) + floor)
        p[i] = f32(f32(p[i] * decay) - f32(f32(mi / denominator) * size))
        m[i] = mi
        v[i] = vi


@part
def _step_split_bf16(high, low, gradient, m, v, scalars):
    """The same on split bf16 weights with bf16 gradients and fp32 moments, from memory to memory."""
    factor, decay, rise1, keep2 = scalars[0], scalars[1], scalars[2], scalars[3]
    rise2, root2, floor, size = scalars[4], scalars[5], scalars[6], scalars[7]
    for i in range(high.shape[0]):
        p = i32(i32(i32(high[i]) << i32(16)) + i32(low[i])).view(f32)
        g = f32(_bf16_value(i32(gradient[i])) * factor)
        mi = f32(m[i] + f32(f32(g - m[i]) * rise1))
        vi = f32(f32(v[i] * keep2) + f32(f32(g * g) * rise2))
        denominator = f32(f32(f32(np.sqrt(vi)) * root2) + floor)
        new = f32(f32(p * decay) - f32(f32(mi / denominator) * size))
        h = _bf16_nearest(new)
        high[i] = i16(h)
        low[i] = i16(min(_bf16_rest(new, h), i32(0x7FFF)))
        m[i] = mi
        v[i] = vi


# ---- encoding: out of an fp32 buffer -------------------------------------------------------------------------------------------


@part
def _write_bf16(x, out):
    for i in range(x.shape[0]):
        out[i] = i16(_bf16_nearest(x[i]))


@part
def _write_fp16(x, out):
    for i in range(x.shape[0]):
        out[i] = i16(_fp16_nearest(x[i]))


@part
def _write_bf16_stochastic(x, bits, out):
    for i in range(x.shape[0]):
        out[i] = i16(_bf16_stochastic(x[i], i32(bits[i] & u32(0xFFFF))))


@part
def _write_fp16_stochastic(x, bits, out):
    for i in range(x.shape[0]):
        out[i] = i16(_fp16_stochastic(x[i], i32(bits[i] & u32(0xFFFF))))


@part
def _fp16_rest(x, h):
    """What the code `h` misses of `x`, in 2^-16 of the distance of fp16 numbers there."""
    count = i32(i32(i32(270) - _fp16_ulp_exponent(h)) << i32(23)).view(f32)  # 2^16 over that distance
    rest = f32(np.floor(f32(f32(x - _fp16_value(h)) * count)))
    rest = min(max(rest, f32(-32768)), f32(32768)) if rest == rest else f32(0)
    return i32(rest)


@part
def _split_bf16(x, high, low):
    for i in range(x.shape[0]):
        h = _bf16_nearest(x[i])
        high[i] = i16(h)
        low[i] = i16(min(_bf16_rest(x[i], h), i32(0x7FFF)))


@part
def _split_bf16_8(x, bits, high, low):
    for i in range(x.shape[0]):
        h = _bf16_nearest(x[i])
        rest = i32(i32(_bf16_rest(x[i], h) + i32(bits[i] & u32(0xFF))) >> i32(8))
        carried = rest == i32(128)
        high[i] = i16(i32(h + i32(carried)))
        low[i] = i8(i32(-128) if carried else rest)


@part
def _split_fp16(x, high, low):
    for i in range(x.shape[0]):
        h = _fp16_saturated(x[i])
        high[i] = i16(h)
        low[i] = i16(min(_fp16_rest(x[i], h), i32(0x7FFF)))


@part
def _split_fp16_8(x, bits, high, low):
    for i in range(x.shape[0]):
        h = _fp16_saturated(x[i])
        rest = i32(i32(_fp16_rest(x[i], h) + i32(bits[i] & u32(0xFF))) >> i32(8))
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
        h = _bf16_nearest(x[i])
        if i32(h & i32(0x7FFF)) == i32(0x7F80) and f32(abs(x[i])) < f32(np.inf):
            h = i32(h - i32(1))
        rest = f32(x[i] - _bf16_value(h))
        high[i] = i16(h)
        low[i] = i16(_bf16_nearest(f32(0) if f32(abs(x[i])) == f32(np.inf) else rest))


@part
def _kahan_fp16(x, high, low):
    for i in range(x.shape[0]):
        h = _fp16_saturated(x[i])
        rest = f32(x[i] - _fp16_value(h))
        high[i] = i16(h)
        low[i] = i16(_fp16_nearest(f32(0) if f32(abs(x[i])) == f32(np.inf) else rest))


@part
def _write_bf16_first(x, bits, out):
    for i in range(x.shape[0]):
        out[i] = i16(_bf16_stochastic(x[i], i32(_state_noise(bits[i]) & u32(0xFFFF))))


@part
def _write_bf16_second(x, bits, out):
    for i in range(x.shape[0]):
        out[i] = i16(_bf16_stochastic(x[i], i32(_state_noise(bits[i]) >> u32(16))))


@part
def _largest(x):
    """The largest magnitude in `x`."""
    found = i32(0)
    for i in range(x.shape[0]):
        found = max(found, i32(f32(x[i]).view(i32) & i32(0x7FFFFFFF)))
    return i32(found).view(f32)


@part
def _write_first(values, noise, codes, scales):
    for block in range(scales.shape[0]):
        begin = block * BLOCK
        x, bits, out = values[begin : begin + BLOCK], noise[begin : begin + BLOCK], codes[begin : begin + BLOCK]
        scale = _largest(x)
        scales[block] = scale
        by = scale if scale > f32(0) else f32(1)
        for i in range(x.shape[0]):
            value = f32(abs(x[i]))
            k = min(i32(f32(f32(np.sqrt(f32(value / by))) * f32(127))), i32(126))
            low, high = _first_value(k, scale), _first_value(i32(k + i32(1)), scale)
            chance = f32(f32(f32(i32(_state_noise(bits[i]) & u32(0xFFFF))) + f32(0.5)) * f32(1 / 65536))
            k = i32(k + i32(f32(value - low) > f32(f32(high - low) * chance)))
            out[i] = i8(i32(-k) if x[i] < f32(0) else k)


@part
def _write_second(values, noise, codes, scales):
    for block in range(scales.shape[0]):
        begin = block * BLOCK
        x, bits, out = values[begin : begin + BLOCK], noise[begin : begin + BLOCK], codes[begin : begin + BLOCK]
        scale = _largest(x)
        scales[block] = scale
        by = scale if scale > f32(0) else f32(1)
        for i in range(x.shape[0]):
            value = f32(abs(x[i]))
            k = min(i32(f32(f32(np.sqrt(f32(np.sqrt(f32(value / by))))) * f32(255))), i32(254))
            low, high = _second_value(k, scale), _second_value(i32(k + i32(1)), scale)
            chance = f32(f32(f32(i32(_state_noise(bits[i]) >> u32(16))) + f32(0.5)) * f32(1 / 65536))
            k = i32(k + i32(f32(value - low) > f32(f32(high - low) * chance)))
            out[i] = u8(max(k, i32(LEAST) if value > f32(0) else i32(0)))


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
    g = out[:n]
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


# ---- what is called ------------------------------------------------------------------------------------------------------------


def _adamw(places, kinds, scalars, keys, gradients, forms, chunks, first_chunk, last_chunk, buffers, noise):
    p_buffer, m_buffer, v_buffer, g_buffer = buffers[0], buffers[1], buffers[2], buffers[3]
    for chunk in range(first_chunk, last_chunk):
        t, begin, end = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
        storage, form, first, second = kinds[t, 0], kinds[t, 1], kinds[t, 2], kinds[t, 3]
        draws = storage in (SPLIT24, STOCHASTIC) or first != STATE_FP32 or second != STATE_FP32
        if storage == SPLIT and form == BF16 and forms[t] == BF16 and first == STATE_FP32 and second == STATE_FP32:
            n = end - begin
            high, low, g16 = halves(places[t, 0], begin, n), halves(places[t, 1], begin, n), halves(gradients[t], begin, n)
            _step_split_bf16(high, low, g16, floats(places[t, 2], begin, n), floats(places[t, 4], begin, n), scalars[t])
            continue
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            bits = noise[:n]
            if draws:
                _draw(keys[t, 0], keys[t, 1], start, bits)
            # views of the same places in all formats; only those that the codes above name are touched
            high, low, low8 = halves(places[t, 0], start, n), halves(places[t, 1], start, n), signed_bytes(places[t, 1], start, n)
            m16, m8, m_scales = halves(places[t, 2], start, n), signed_bytes(places[t, 2], start, n), _blocks(places[t, 3], start, n)
            v16, v8, v_scales = halves(places[t, 4], start, n), unsigned_bytes(places[t, 4], start, n), _blocks(places[t, 5], start, n)
            p, m, v = p_buffer[:n], m_buffer[:n], v_buffer[:n]
            if form == FP32:
                p = floats(places[t, 0], start, n)
            else:
                _read_weight(storage, form, high, low, low8, p)
            g = _read_gradient(forms[t], gradients[t], start, n, scalars[t, 0], g_buffer)
            if first == STATE_FP32:
                m = floats(places[t, 2], start, n)
            elif first == STATE_BF16:
                _read_bf16(m16, f32(1), m)
            else:
                _read_first(m8, m_scales, m)
            if second == STATE_FP32:
                v = floats(places[t, 4], start, n)
            elif second == STATE_BF16:
                _read_bf16(v16, f32(1), v)
            else:
                _read_second(v8, v_scales, v)
            _update(p, g, m, v, scalars[t])
            if first == STATE_BF16:
                _write_bf16_first(m, bits, m16)
            elif first == STATE_INT8:
                _write_first(m, bits, m8, m_scales)
            if second == STATE_BF16:
                _write_bf16_second(v, bits, v16)
            elif second == STATE_INT8:
                _write_second(v, bits, v8, v_scales)
            if form != FP32:
                _write_weight(p, bits, storage, form, high, low, low8)


def _squares(addresses, forms, chunks, sums, largest, first, last, buffers):
    for chunk in range(first, last):
        t, begin, end = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
        total, bits = f64(0), i32(0)
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            x = _read_gradient(forms[t], addresses[t], start, n, f32(1), buffers[0])
            total += _sum_of_squares(x)
            bits = max(bits, f32(_largest(x)).view(i32))
        sums[chunk] = total
        largest[chunk] = i32(bits).view(f32)


@reordered
def _sum_of_squares(x):
    total = f64(0)
    for i in range(x.shape[0]):
        value = f64(x[i])
        total += value * value
    return total


adamw_chunks = compiled(_adamw)
squares_chunks = compiled(_squares)
