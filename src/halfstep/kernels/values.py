"""Numbers of a tensor in fp32, bf16 or fp16 from and to an fp32 buffer, for the compiled loops."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from halfstep.kernels import codes, scalar
from halfstep.kernels.codes import BF16, FP32
from halfstep.kernels.compile import floats, halves, part
from halfstep.kernels.scalar import bf16_nearest, bf16_value, fp16_nearest, fp16_value

PARTS = (__file__, codes.__file__, *scalar.PARTS)

i16, i32 = np.int16, np.int32


@part
def as_fp32(form, address, start, n, buffer):
    """Numbers where they lie if they are fp32, else in the buffer at this address. No slices: numba counts references to those, by locking."""
    if form == FP32:
        return floats(address, start, n)
    x, half = floats(buffer, 0, n), halves(address, start, n)
    if form == BF16:
        for i in range(n):
            x[i] = bf16_value(i32(half[i]))
    else:
        for i in range(n):
            x[i] = fp16_value(i32(half[i]))
    return x


@part
def write(form, x, address, start):
    """fp32 numbers to a tensor, rounded to nearest even where it is in 16 bits."""
    n = x.shape[0]
    if form == FP32:
        out = floats(address, start, n)
        for i in range(n):
            out[i] = x[i]
    elif form == BF16:
        half = halves(address, start, n)
        for i in range(n):
            half[i] = i16(bf16_nearest(x[i]))
    else:
        half = halves(address, start, n)
        for i in range(n):
            half[i] = i16(fp16_nearest(x[i]))


@part
def round_to(form, x):
    """The same in place."""
    if form == BF16:
        for i in range(x.shape[0]):
            x[i] = bf16_value(bf16_nearest(x[i]))
    elif form != FP32:
        for i in range(x.shape[0]):
            x[i] = fp16_value(fp16_nearest(x[i]))
