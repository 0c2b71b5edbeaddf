"""Cross entropy of rows of logits, forward and backward, each in one call: the twin of `halfstep.numerics.cross_entropy`, with its bits.

A row is read once for its largest logit and once more, from the cache, for its sum; the backward pass reads it once and writes its gradient.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels import pool, values
from halfstep.kernels.codes import FORMATS, FP32
from halfstep.kernels.compile import compiled, floats, part
from halfstep.kernels.values import as_fp32, write
from halfstep.numerics import cross_entropy as plain
from halfstep.numerics.cross_entropy import BLOCK, LANES, SERIES
from halfstep.numerics.standins import is_shape

PARTS = (*values.PARTS, plain.__file__)
ROUNDER_BITS = int(np.float32(plain.ROUNDER).view(np.int32))

i32, f32, i64, f64 = np.int32, np.float32, np.int64, np.float64


@part
def _raise(x, lanes):
    """The largest so far of every lane; a NaN is none, and shows in the sum."""
    whole = x.shape[0] // LANES * LANES
    for start in range(0, whole, LANES):
        for i in range(LANES):
            lanes[i] = x[start + i] if x[start + i] > lanes[i] else lanes[i]
    for i in range(whole, x.shape[0]):
        lanes[0] = x[i] if x[i] > lanes[0] else lanes[0]


@part
def _exponential(y):
    y = f32(plain.LEAST) if y < f32(plain.LEAST) else y
    rounded = f32(f32(y * f32(plain.LOG2E)) + f32(plain.ROUNDER))
    n = f32(rounded - f32(plain.ROUNDER))
    r = f32(f32(y - f32(n * f32(plain.LN2_HIGH))) - f32(n * f32(plain.LN2_LOW)))
    q = f32(f32(f32(SERIES[0]) * r) + f32(SERIES[1]))
    q = f32(f32(q * r) + f32(SERIES[2]))
    q = f32(f32(q * r) + f32(SERIES[3]))
    q = f32(f32(q * r) + f32(SERIES[4]))
    value = f32(f32(f32(q * f32(r * r)) + r) + f32(1))
    power = i32(rounded.view(i32) - i32(ROUNDER_BITS))
    half = i32(power >> i32(1))
    low, high = i32(i32(half + i32(127)) << i32(23)).view(f32), i32(i32(i32(power - half) + i32(127)) << i32(23)).view(f32)
    return f32(f32(value * low) * high)


@part
def _exponentials(x, top, share, out):
    """e^(x - top) * share."""
    for i in range(x.shape[0]):
        out[i] = f32(_exponential(f32(x[i] - top)) * share)


@part
def _fold(x, lanes):
    """Add a block of exponentials to the sums in fp64; x is overwritten."""
    for i in range(256):
        x[i] = f32(x[i] + x[i + 256])
    for i in range(128):
        x[i] = f32(x[i] + x[i + 128])
    for i in range(LANES):
        lanes[i] += f64(f32(x[i] + x[i + LANES]))


@part
def _total(lanes):
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@part
def _differ(a, b):
    """How many numbers are not equal."""
    count = i32(0)
    for i in range(a.shape[0]):
        count = i32(count + (i32(0) if a[i] == b[i] else i32(1)))
    return count


def _losses(form, logits, stride, classes, targets, ignored, found, largest, sums, copy, others, first, last):
    space, tops, lanes = np.empty(2 * BLOCK, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float64)
    buffer = i64(space.ctypes.data)
    block = floats(buffer, BLOCK, BLOCK)
    for row in range(first, last):
        at = row * stride
        tops[:] = -np.inf
        for start in range(0, classes, BLOCK):
            x = as_fp32(form, logits, at + start, min(BLOCK, classes - start), buffer)
            _raise(x, tops)
            if copy != 0:
                others[row] += _differ(x, floats(copy, row * classes + start, x.shape[0]))
        top = tops.max()
        lanes[:] = 0
        for start in range(0, classes, BLOCK):
            n = min(BLOCK, classes - start)
            _exponentials(as_fp32(form, logits, at + start, n, buffer), top, f32(1), block)
            for i in range(n, BLOCK):
                block[i] = f32(0)
            _fold(block, lanes)
        largest[row], sums[row] = top, _total(lanes)
        if targets[row] != ignored:
            chosen = as_fp32(form, logits, at + targets[row], 1, buffer)[0]
            found[row] = f32(math.log(sums[row]) - (f64(chosen) - f64(top)))


def _gradients(form, logits, stride, classes, targets, ignored, largest, sums, above, to, out, first, last):
    space = np.empty(2 * BLOCK, np.float32)
    buffer = i64(space.ctypes.data)
    for row in range(first, last):
        counted = targets[row] != ignored
        given = above[row] if counted else f32(0)
        share = f32(f64(given) / sums[row])
        chosen = targets[row] if counted else 0
        for start in range(0, classes, BLOCK):
            n = min(BLOCK, classes - start)
            x = floats(out, row * classes + start, n) if to == FP32 else floats(buffer, BLOCK, n)
            _exponentials(as_fp32(form, logits, row * stride + start, n, buffer), largest[row], share, x)
            if start <= chosen < start + n:
                x[chosen - start] = f32(x[chosen - start] - given)
            if to != FP32:
                write(to, x, out, row * classes + start)


losses_of_rows = compiled(_losses, *PARTS)
gradients_of_rows = compiled(_gradients, *PARTS)


def _rows(logits: Tensor) -> Tensor:
    given = logits.detach().resolve_neg()
    return given if given.stride(1) == 1 else given.contiguous()


def _array(t: Tensor) -> Any:
    return t.detach().resolve_neg().contiguous().numpy()


def losses(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """`halfstep.numerics.cross_entropy.losses` of tensors on the CPU."""
    return plain.losses(logits, targets, ignored) if is_shape(logits) else _computed(logits, targets, ignored, 0)[:3]


def losses_of_copy(logits: Tensor, targets: Tensor, ignored: int, copy: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """`halfstep.numerics.cross_entropy.losses_of_copy` of tensors on the CPU; `copy` is contiguous."""
    if is_shape(logits):
        return plain.losses_of_copy(logits, targets, ignored, copy)
    *found, others = _computed(logits, targets, ignored, copy.data_ptr())
    return None if others.any() else (found[0], found[1], found[2])


def _computed(logits: Tensor, targets: Tensor, ignored: int, copy: int) -> tuple[Tensor, Tensor, Tensor, Any]:
    given, classes = _rows(logits), logits.shape[1]
    found, largest, sums = np.zeros(len(given), np.float32), np.empty(len(given), np.float32), np.empty(len(given), np.float64)
    others = np.zeros(len(given), np.int64)
    about = (FORMATS[given.dtype], given.data_ptr(), given.stride(0), classes, _array(targets), ignored, found, largest, sums, copy, others)
    pool.share_range(len(given), max(1, pool.CHUNK // classes), lambda first, last: losses_of_rows(*about, first, last))
    return torch.from_numpy(found), torch.from_numpy(largest), torch.from_numpy(sums), others


def gradient(logits: Tensor, targets: Tensor, ignored: int, largest: Tensor, sums: Tensor, above: Tensor, form: torch.dtype | None = None) -> Tensor:
    """`halfstep.numerics.cross_entropy.gradient` of tensors on the CPU."""
    if is_shape(logits):
        return plain.gradient(logits, targets, ignored, largest, sums, above, form)
    given, classes = _rows(logits), logits.shape[1]
    out = torch.empty(given.shape, dtype=form or given.dtype)
    of_rows = (_array(targets), ignored, _array(largest), _array(sums), _array(above))
    about = (FORMATS[given.dtype], given.data_ptr(), given.stride(0), classes, *of_rows, FORMATS[out.dtype], out.data_ptr())
    pool.share_range(len(given), max(1, pool.CHUNK // classes), lambda first, last: gradients_of_rows(*about, first, last))
    return out
