"""What stands before and after the tanh of a GELU that is written out in operations of torch, forward and backward, in a pass each, with their bits.

The form is x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) (Hendrycks and Gimpel, Gaussian error linear units, 2016) with the cube in fp32,
and so all that follows it; x / 2 is in the format of x. tanh and its derivative are torch's own.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from halfstep.kernels import pool, values
from halfstep.kernels.codes import FORMATS
from halfstep.kernels.compile import added_to, floats, for_team, part
from halfstep.kernels.pool import COUNT, FIRST, SELF, STEP
from halfstep.kernels.values import as_fp32, round_to, write

CUBE, ROOT = 0.044715, math.sqrt(2 / math.pi)
STRETCH, PIECE = 1024, 1 << 14  # elements that are worked on at once, and that a thread takes
PARTS = (*values.PARTS, pool.__file__)

f32, i64 = np.float32, np.int64


@part
def _piece(about):
    """The next elements that are nobody's yet: begin and end; no more where they are the same."""
    begin = min(added_to(about[SELF], about[STEP]), about[COUNT])
    return begin, min(begin + about[STEP], about[COUNT])


def _inner(data):
    about, space = carray(data, (FIRST + 3,), np.int64), np.empty(STRETCH, np.float32)
    form, x, out = about[FIRST], about[FIRST + 1], about[FIRST + 2]
    a0 = i64(space.ctypes.data)
    begin, end = _piece(about)
    while begin < end:
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            a, u = as_fp32(form, x, start, n, a0), floats(out, start, n)
            for i in range(n):
                cube = f32(f32(a[i] * a[i]) * a[i])
                u[i] = f32(f32(ROOT) * f32(a[i] + f32(f32(CUBE) * cube)))
        begin, end = _piece(about)


def _times_half(data):
    """x / 2, rounded to the format of x, times another tensor; times 1 + that one where `rise` is not 0."""
    about, space = carray(data, (FIRST + 5,), np.int64), np.empty(2 * STRETCH, np.float32)
    form, x, rise, other, out = about[FIRST], about[FIRST + 1], about[FIRST + 2], about[FIRST + 3], about[FIRST + 4]
    a0 = i64(space.ctypes.data)
    begin, end = _piece(about)
    while begin < end:
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            # to another buffer than that of x: in one the loop would not be vectorised
            source, a, b, y = as_fp32(form, x, start, n, a0), floats(a0, STRETCH, n), floats(other, start, n), floats(out, start, n)
            for i in range(n):
                a[i] = f32(source[i] * f32(0.5))
            round_to(form, a)
            if rise:
                for i in range(n):
                    y[i] = f32(a[i] * f32(f32(1) + b[i]))
            else:
                for i in range(n):
                    y[i] = f32(a[i] * b[i])
        begin, end = _piece(about)


def _to_x(data):
    """The gradient of x from its three places, in the order in which autograd adds them up; above: the gradient of what the tanh is of."""
    about, space = carray(data, (FIRST + 6,), np.int64), np.empty(4 * STRETCH, np.float32)
    form, x, t, grad, above, out = about[FIRST], about[FIRST + 1], about[FIRST + 2], about[FIRST + 3], about[FIRST + 4], about[FIRST + 5]
    a0 = i64(space.ctypes.data)
    begin, end = _piece(about)
    while begin < end:
        for start in range(begin, end, STRETCH):
            n = min(STRETCH, end - start)
            source, cube = as_fp32(form, x, start, n, a0), floats(a0, STRETCH, n)
            half, total = floats(a0, 2 * STRETCH, n), floats(a0, 3 * STRETCH, n)
            tanh, g, u = floats(t, start, n), floats(grad, start, n), floats(above, start, n)
            for i in range(n):
                total[i] = f32(u[i] * f32(ROOT))
                cube[i] = f32(f32(total[i] * f32(CUBE)) * f32(f32(3) * f32(source[i] * source[i])))
                half[i] = f32(g[i] * f32(f32(1) + tanh[i]))
            round_to(form, total)
            round_to(form, cube)
            round_to(form, half)
            for i in range(n):
                total[i] = f32(total[i] + cube[i])
                half[i] = f32(half[i] * f32(0.5))
            round_to(form, total)
            round_to(form, half)
            for i in range(n):
                total[i] = f32(total[i] + half[i])
            write(form, total, out, start)
        begin, end = _piece(about)


inner_of, times_half, to_x = (for_team(function, *PARTS) for function in (_inner, _times_half, _to_x))


def _shared(entry: int, x: Tensor, out: Tensor, *others: Tensor | int) -> Tensor:
    given = (t if isinstance(t, int) else t.data_ptr() for t in others)
    pool.run(entry, x.numel(), PIECE, FORMATS[x.dtype], x.data_ptr(), *given, out.data_ptr())
    return out


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device="cpu")


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """(GELU, the tanh in it) of a contiguous tensor on the CPU in fp32 or 16 bits: both in fp32."""
    t = _shared(inner_of, x, _like(x)).tanh_()
    return _shared(times_half, x, _like(x), 1, t), t


def backward(x: Tensor, t: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `x`, in its format, from the tanh that `forward` gave and the fp32 gradient of its result, all contiguous."""
    above = torch.ops.aten.tanh_backward(_shared(times_half, x, _like(x), 0, grad), t)  # of what the tanh is of
    return _shared(to_x, x, torch.empty(x.shape, dtype=x.dtype), t, grad, above)
