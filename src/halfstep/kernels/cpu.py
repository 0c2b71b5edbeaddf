"""AdamW, SGD, Lion and the sum of squares over many tensors in one compiled call each, for the CPU (numba).

What is called works on addresses: tensors are checked once, when a `Plan` is made, and gradients at every run. Tensors are cut into chunks of
whole blocks, and chunks are shared out to as many threads as torch uses. Neither the cut nor the number of threads changes a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.kernels import loops, pool, rules
from halfstep.kernels.codes import EXACT, FORMATS, KAHAN, SPLIT, STATE_FP32, STATE_NONE
from halfstep.kernels.items import Item, check, is_dense, kinds, places
from halfstep.kernels.rows import ROW as ROW
from halfstep.kernels.rows import keys, tables
from halfstep.kernels.rows import row as row
from halfstep.numerics import Settings
from halfstep.numerics.noise import WORD

Table = npt.NDArray[np.int64]

PIECES = 16  # that a call is cut into: enough to keep threads busy to the end when one of them is held up


class Plan:
    """The steps of `items` by one rule: checks and tables that stay the same from step to step.

    rule: "adamw" (items have both moments), "sgd" (the first is the momentum buffer, or None) or "lion" (the first is the average).

    It keeps addresses and the tensors that they belong to: make a new one when a tensor is replaced or its data moves. Results are written
    where the tensors lie and bump no version. Memory: 100 bytes per item.
    """

    def __init__(self, items: Sequence[Item], seed: int = 0, rule: str = "adamw") -> None:
        self.items, self.rule = tuple(items), rule
        for i, item in enumerate(self.items):
            check(item, i, rule)
        self._seed = seed
        self._places = np.array([places(item) for item in self.items], dtype=np.int64).reshape(-1, 6)
        self._kinds = np.array([kinds(item) for item in self.items], dtype=np.int32).reshape(-1, 4)
        self._parameters = np.array([item.parameter & WORD for item in self.items], dtype=np.uint32)
        self._draws = not {*self._kinds[:, 0]} <= {EXACT, SPLIT, KAHAN} or not {*self._kinds[:, 2:].flat} <= {STATE_FP32, STATE_NONE}
        self._unused = np.zeros((len(self.items), 2), dtype=np.uint32)  # the keys of noise that nobody draws
        self._chunks, self._ends = cut(tuple(item.weight.numel() for item in self.items))

    def run(self, gradients: Sequence[Tensor | None], steps: Sequence[Settings], factor: float = 1.0, noise_step: int = 0) -> None:
        """One step of every item that has a gradient, by the rule's plain definition on fp32 numbers, in place on weights, residuals and states.

        gradients: fp32, bf16 or fp16 in the shape and strides of the weights; multiplied by `factor` (clip coefficient over loss scale)
        in fp32 as they are read. steps: the settings of each item, of this plan's rule. The noise of item i is that of
        `Noise(seed, items[i].parameter, noise_step)`.
        Raises ConfigError, before anything is written, for a gradient that does not lie as its weight does and for settings of another rule.
        """
        self.launch(*tables(self.items, self.rule, gradients, steps, factor), noise_step)

    def launch(self, addresses: Table, forms: npt.NDArray[np.int32], scalars: npt.NDArray[np.float32], noise_step: int) -> None:
        """`run` without looking: addresses of gradients (0: none), their formats, the `row` of each item, and the step of the noise."""
        noise = keys(self._seed, self._parameters, noise_step) if self._draws else self._unused
        chunks, ends, driver = self._chunks, self._ends, rules.DRIVERS[self.rule]
        if not addresses.all():
            chunks = chunks[addresses[chunks[:, 0]] != 0]
            ends = pieces(chunks)

        def work(piece: int) -> None:
            ends_here = ends[piece], ends[piece + 1]
            space = np.empty(loops.BUFFERS, np.float32)
            driver(self._places, self._kinds, scalars, noise, addresses, forms, chunks, *ends_here, space)

        pool.share(work, len(ends) - 1)


def squares(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(sums of squares, largest magnitudes) of fp32, bf16 or fp16 CPU tensors: fp64 [n] and fp32 [n], in one pass.

    Sums are taken in fp64, so that no square overflows, in an order that the number of threads does not change. An inf gives inf and a
    NaN gives NaN, in both. An empty tensor gives 0. One that is not dense (expanded, or a slice) is copied first.
    """
    if False in [t.is_contiguous() for t in tensors]:  # lists: this is called with hundreds of tensors in every step
        tensors = [t if is_dense(t) else t.contiguous() for t in (t.detach().resolve_neg() for t in tensors)]
    formats = [FORMATS.get(t.dtype) if t.is_cpu else None for t in tensors]
    if None in formats:
        t = tensors[formats.index(None)]
        raise ConfigError(f"squares of a {t.dtype} tensor on {t.device} were asked for", "Give dense fp32, bf16 or fp16 tensors on the CPU.")
    addresses = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
    forms = np.array(formats, dtype=np.int32)
    sizes = tuple([t.numel() for t in tensors])
    chunks, ends = cut(sizes)
    sums, largest = np.zeros(len(chunks)), np.zeros(len(chunks), dtype=np.float32)

    def work(piece: int) -> None:
        loops.squares_chunks(addresses, forms, chunks, sums, largest, ends[piece], ends[piece + 1], np.empty(loops.BUFFERS, np.float32))

    pool.share(work, len(ends) - 1)
    if len(chunks) == len(sizes) and 0 not in sizes:  # each is one chunk
        return torch.from_numpy(sums), torch.from_numpy(largest)
    totals, peaks = np.bincount(chunks[:, 0], weights=sums, minlength=len(tensors)), np.zeros(len(tensors), dtype=np.float32)
    with np.errstate(invalid="ignore"):  # a NaN is an answer
        np.maximum.at(peaks, chunks[:, 0], largest)
    return torch.from_numpy(totals.astype(np.float64, copy=False)), torch.from_numpy(peaks)  # no numbers add up to an integer


@functools.lru_cache(maxsize=16)
def cut(sizes: tuple[int, ...]) -> tuple[Table, list[int]]:
    """Chunks of tensors of these sizes, rows of tensor, begin, end, and where to part them: the same in every step of a model."""
    rows = [(i, begin, min(begin + pool.CHUNK, size)) for i, size in enumerate(sizes) for begin in range(0, size, pool.CHUNK)]
    chunks = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return chunks, pieces(chunks)


def pieces(chunks: Table) -> list[int]:
    """Where to part the rows of `chunks`, so that each piece has about as many elements: 0, ..., len(chunks)."""
    upto = np.cumsum(chunks[:, 2] - chunks[:, 1])
    if not len(upto):
        return [0]
    size = max(int(upto[-1]) / PIECES, pool.CHUNK / 2)
    goals = np.arange(1, int(upto[-1] / size) + 1) * size
    ends = np.searchsorted(upto, goals, side="left") + 1
    return sorted({0, len(chunks), *(int(end) for end in ends if end < len(chunks))})


def count_steps(steps: Table) -> npt.NDArray[np.float32]:
    """Add 1 to the fp32 numbers at these addresses; what they are then."""
    counts = np.empty(len(steps), dtype=np.float32)
    loops.count_steps(steps, counts)
    return counts
