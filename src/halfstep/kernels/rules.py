"""The compiled update rules: numba twins of `halfstep.numerics.updates`, with equal bits, between the loops that read and write.

One driver for each shape of states, compiled when it is first used: two moments (AdamW), and at most one (SGD, Lion).
One combination is written out as well, `_adamw_split_bf16`: it is bound by memory, and without buffers a fifth faster.
Rules for this file as in `halfstep.kernels.loops`.
To add a rule: its number in `halfstep.kernels.codes`, its loop here, its driver or a place in one, a row in `DRIVERS`, which states it has in
`halfstep.kernels.items.check`, its place in `cuda.py`; then what `halfstep.optim.onepass` says.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from halfstep.kernels import loops
from halfstep.kernels.codes import BF16, FP32, LION, SGD, SPLIT, SPLIT24, STATE_BF16, STATE_FP32, STATE_INT8, STATE_NONE, STOCHASTIC
from halfstep.kernels.compile import compiled, floats, halves, naturals, part, signed_bytes, unsigned_bytes
from halfstep.kernels.loops import (
    BITS,
    MIXED,
    ROOT,
    STRETCH,
    G,
    M,
    P,
    V,
    _blocks,
    _draw,
    _first_line,
    _read_gradient,
    _read_state,
    _read_weight,
    _write_bf16_first,
    _write_bf16_second,
    _write_first_int8,
    _write_int8,
    _write_weight,
)
from halfstep.kernels.scalar import bf16_nearest, bf16_rest, bf16_value

i16, i32, i64, f32 = np.int16, np.int32, np.int64, np.float32

# ---- AdamW ---------------------------------------------------------------------------------------------------------------------


@part
def _step_adamw(p, g, m, v, root, scalars):
    decay, rise1, keep2, rise2, root2, floor, size = scalars[1], scalars[2], scalars[3], scalars[4], scalars[5], scalars[6], scalars[7]
    for i in range(p.shape[0]):
        gi = g[i]
        mi = f32(m[i] + f32(f32(gi - m[i]) * rise1))
        vi = f32(f32(v[i] * keep2) + f32(f32(gi * gi) * rise2))
        ri = f32(np.sqrt(vi))
        denominator = f32(f32(ri * root2) + floor)
        p[i] = f32(f32(p[i] * decay) - f32(f32(mi / denominator) * size))
        m[i] = mi
        v[i] = vi
        root[i] = ri


@part
def _adamw_split_bf16(high, low, gradient, m, v, scalars):
    """The same on split bf16 weights with bf16 gradients and fp32 moments, from memory to memory."""
    factor, decay, rise1, keep2 = scalars[0], scalars[1], scalars[2], scalars[3]
    rise2, root2, floor, size = scalars[4], scalars[5], scalars[6], scalars[7]
    for i in range(high.shape[0]):
        p = i32(i32(i32(high[i]) << i32(16)) + i32(low[i])).view(f32)
        g = f32(bf16_value(i32(gradient[i])) * factor)
        mi = f32(m[i] + f32(f32(g - m[i]) * rise1))
        vi = f32(f32(v[i] * keep2) + f32(f32(g * g) * rise2))
        denominator = f32(f32(f32(np.sqrt(vi)) * root2) + floor)
        new = f32(f32(p * decay) - f32(f32(mi / denominator) * size))
        h = bf16_nearest(new)
        high[i] = i16(h)
        low[i] = i16(min(bf16_rest(new, h), i32(0x7FFF)))
        m[i] = mi
        v[i] = vi


def _adamw(places, kinds, scalars, keys, gradients, forms, chunks, first_chunk, last_chunk, space):
    buffers, numbers = _first_line(space), i64(scalars.ctypes.data)
    for chunk in range(first_chunk, last_chunk):
        t, begin, end = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
        storage, form, first, second = kinds[t, 0], kinds[t, 1], kinds[t, 2], kinds[t, 3]
        draws = storage in (SPLIT24, STOCHASTIC) or first == STATE_BF16 or second == STATE_BF16
        if storage == SPLIT and form == BF16 and forms[t] == BF16 and first == STATE_FP32 and second == STATE_FP32:
            n = end - begin
            high, low, g16 = halves(places[t, 0], begin, n), halves(places[t, 1], begin, n), halves(gradients[t], begin, n)
            _adamw_split_bf16(high, low, g16, floats(places[t, 2], begin, n), floats(places[t, 4], begin, n), floats(numbers, 8 * t, 8))
            continue
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            # views of the same places in all formats; only those that the codes above name are touched
            high, low, low8 = halves(places[t, 0], start, n), halves(places[t, 1], start, n), signed_bytes(places[t, 1], start, n)
            m8, m_scales = signed_bytes(places[t, 2], start, n), _blocks(places[t, 3], start, n)
            v8, v_scales = unsigned_bytes(places[t, 4], start, n), _blocks(places[t, 5], start, n)
            p, bits, mixed = floats(buffers, P, n), naturals(buffers, BITS, n), naturals(buffers, MIXED, n)
            if form == FP32:
                p = floats(places[t, 0], start, n)
            else:
                _read_weight(storage, form, high, low, low8, p)
            g = _read_gradient(forms[t], gradients[t], start, n, scalars[t, 0], floats(buffers, G, n))
            m = _read_state(first, places[t, 2], places[t, 3], start, n, True, floats(buffers, M, n))
            v = _read_state(second, places[t, 4], places[t, 5], start, n, False, floats(buffers, V, n))
            _step_adamw(p, g, m, v, floats(buffers, ROOT, n), floats(numbers, 8 * t, 8))
            if first == STATE_INT8 or second == STATE_INT8:
                _write_int8(first == STATE_INT8, second == STATE_INT8, m8, m_scales, v8, v_scales, keys[t, 0], keys[t, 1], start, n, buffers)
            elif draws:
                _draw(keys[t, 0], keys[t, 1], start, bits, mixed)
            if first == STATE_BF16:
                _write_bf16_first(m, mixed, halves(places[t, 2], start, n))
            if second == STATE_BF16:
                _write_bf16_second(v, mixed, halves(places[t, 4], start, n))
            if form != FP32:
                _write_weight(p, bits, storage, form, high, low, low8)


# ---- SGD and Lion --------------------------------------------------------------------------------------------------------------


@part
def _step_plain(p, g, scalars):
    decay, size = scalars[1], scalars[5]
    for i in range(p.shape[0]):
        gi = f32(f32(p[i] * decay) + g[i])
        p[i] = f32(p[i] - f32(gi * size))


@part
def _step_momentum(p, g, b, scalars):
    decay, keep, rise, size = scalars[1], scalars[2], scalars[3], scalars[5]
    for i in range(p.shape[0]):
        gi = f32(f32(p[i] * decay) + g[i])
        bi = f32(f32(b[i] * keep) + f32(gi * rise))
        p[i] = f32(p[i] - f32(bi * size))
        b[i] = bi


@part
def _step_nesterov(p, g, b, scalars):
    decay, keep, rise, ahead, size = scalars[1], scalars[2], scalars[3], scalars[4], scalars[5]
    for i in range(p.shape[0]):
        gi = f32(f32(p[i] * decay) + g[i])
        bi = f32(f32(b[i] * keep) + f32(gi * rise))
        p[i] = f32(p[i] - f32(f32(f32(bi * ahead) + gi) * size))
        b[i] = bi


@part
def _sign(x):
    """1, 0 or -1; NaN for NaN."""
    return f32(f32(x > f32(0)) - f32(x < f32(0))) if x == x else x


@part
def _step_lion(p, g, m, scalars):
    decay, rise1, rise2, size = scalars[1], scalars[2], scalars[3], scalars[4]
    for i in range(p.shape[0]):
        change = f32(g[i] - m[i])
        direction = f32(m[i] + f32(change * rise1))
        p[i] = f32(f32(p[i] * decay) - f32(_sign(direction) * size))
        m[i] = f32(m[i] + f32(change * rise2))


def _single(rule, places, kinds, scalars, keys, gradients, forms, chunks, first_chunk, last_chunk, space):
    buffers, numbers = _first_line(space), i64(scalars.ctypes.data)
    for chunk in range(first_chunk, last_chunk):
        t, begin, end = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
        storage, form, first = kinds[t, 0], kinds[t, 1], kinds[t, 2]
        draws = storage in (SPLIT24, STOCHASTIC) or first == STATE_BF16
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            # views of the same places in all formats; only those that the codes above name are touched
            high, low, low8 = halves(places[t, 0], start, n), halves(places[t, 1], start, n), signed_bytes(places[t, 1], start, n)
            p, bits, mixed = floats(buffers, P, n), naturals(buffers, BITS, n), naturals(buffers, MIXED, n)
            if form == FP32:
                p = floats(places[t, 0], start, n)
            else:
                _read_weight(storage, form, high, low, low8, p)
            g, row = _read_gradient(forms[t], gradients[t], start, n, scalars[t, 0], floats(buffers, G, n)), floats(numbers, 8 * t, 8)
            if first == STATE_NONE:
                _step_plain(p, g, row)
            else:
                m = _read_state(first, places[t, 2], places[t, 3], start, n, True, floats(buffers, M, n))
                if rule == LION:
                    _step_lion(p, g, m, row)
                elif row[4] == f32(0):
                    _step_momentum(p, g, m, row)
                else:
                    _step_nesterov(p, g, m, row)
                if first == STATE_BF16:
                    _draw(keys[t, 0], keys[t, 1], start, bits, mixed)
                    _write_bf16_first(m, mixed, halves(places[t, 2], start, n))
            if first == STATE_INT8:
                codes, scales = signed_bytes(places[t, 2], start, n), _blocks(places[t, 3], start, n)
                _write_first_int8(codes, scales, keys[t, 0], keys[t, 1], start, n, buffers)
            elif draws and first != STATE_BF16:
                _draw(keys[t, 0], keys[t, 1], start, bits, mixed)
            if form != FP32:
                _write_weight(p, bits, storage, form, high, low, low8)


adamw_chunks = compiled(_adamw, *loops.PARTS)
single_chunks = compiled(_single, *loops.PARTS)


def _sgd_chunks(*given):
    single_chunks(SGD, *given)


def _lion_chunks(*given):
    single_chunks(LION, *given)


DRIVERS = {"adamw": adamw_chunks, "sgd": _sgd_chunks, "lion": _lion_chunks}
