"""Averages that follow fp32 masters, for the CPU (numba): one compiled call for all weights of a model, and one pass over them.

What is read and written per weight: itself and the residual of its master (4 bytes), the average (4 read and 4 written). No tensor is made.
The bits are those of `halfstep.numerics.average_` of the master.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels import loops, pool
from halfstep.kernels.codes import FORMATS, FP32, RESIDUALS, STORAGES
from halfstep.kernels.compile import compiled, floats, halves, signed_bytes
from halfstep.kernels.cpu import cut

Entry = tuple[Tensor, str, Tensor | None, Tensor]  # weight, storage, residual, average


def _average(rows, chunks, share, space, first, last):
    buffers = loops._first_line(space)
    for c in range(first, last):
        t, begin, end = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        storage, form, weight, residual, average = rows[t, 0], rows[t, 1], rows[t, 2], rows[t, 3], rows[t, 4]
        for start in range(begin, end, loops.STRETCH):
            n = min(loops.STRETCH, end - start)
            new = floats(weight, start, n)
            if form != FP32:
                new = floats(buffers, loops.P, n)
                loops._read_weight(storage, form, halves(weight, start, n), halves(residual, start, n), signed_bytes(residual, start, n), new)
            old = floats(average, start, n)
            for i in range(n):
                old[i] += share * (new[i] - old[i])


follow = compiled(_average, *loops.PARTS)


def takes(weight: Tensor, storage: str, residual: Tensor | None, average: Tensor) -> bool:
    """Whether these lie on the CPU, in formats that the compiled pass knows and in the usual order in memory."""
    if weight.dtype not in FORMATS or average.dtype != torch.float32 or average.shape != weight.shape:
        return False
    expected = weight.dtype if storage == "kahan" else RESIDUALS.get(storage)
    if (None if residual is None else residual.dtype) != expected or (residual is not None and residual.shape != weight.shape):
        return False
    return all(t is None or (t.is_cpu and t.layout == torch.strided and t.is_contiguous()) for t in (weight, residual, average))


def average(entries: Sequence[Entry], share: float) -> None:
    """average += share * (master - average) for every entry, in place. All of them as `takes` asks, and no entry twice."""
    rows = np.zeros((len(entries), 5), np.int64)
    for t, (weight, storage, residual, old) in enumerate(entries):
        beside = 0 if residual is None else residual.data_ptr()
        rows[t] = STORAGES[storage], FORMATS[weight.dtype], weight.data_ptr(), beside, old.data_ptr()
    chunks, ends = cut(tuple(weight.numel() for weight, *_ in entries))

    def work(piece: int) -> None:
        space = np.empty(loops.BUFFERS, np.float32)
        follow(rows, chunks, np.float32(share), space, ends[piece], ends[piece + 1])

    pool.share(work, len(ends) - 1)
