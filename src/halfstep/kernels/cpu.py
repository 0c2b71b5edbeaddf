"""AdamW and the sum of squares over many tensors in one compiled call each, for the CPU (numba).

What is called works on addresses: tensors are checked once, when a `Plan` is made, and gradients at every run. Tensors are cut into chunks of
whole blocks, and chunks are shared out to as many threads as torch uses. Neither the cut nor the number of threads changes a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.kernels import loops, pool
from halfstep.numerics.updates import adamw_scalars

State = Tensor | tuple[Tensor, Tensor]
Table = npt.NDArray[np.int64]

CHUNK = 1 << 16  # elements that one thread works on in turn: a multiple of the block of 128 that shares a scale
PIECES = 16  # that a call is cut into: enough to keep threads busy to the end when one of them is held up

FORMATS = {torch.float32: loops.FP32, torch.bfloat16: loops.BF16, torch.float16: loops.FP16}
STORAGES = {
    "fp32": loops.EXACT,
    "plain": loops.EXACT,
    "split": loops.SPLIT,
    "split24": loops.SPLIT24,
    "kahan": loops.KAHAN,
    "stochastic": loops.STOCHASTIC,
}
RESIDUALS = {"split": torch.int16, "split24": torch.int8}


@dataclass(frozen=True, eq=False)
class Item:
    """One weight and what stands beside it.

    weight: fp32 (storage "fp32"), bf16 or fp16 (any other).  residual: int16 for split, int8 for split24, the weight's dtype for
    kahan, None for the others; in the weight's shape and strides.
    first, second: the moments: an fp32 or bf16 tensor in the weight's shape and strides, or (codes, scales): int8 (first) or uint8
    (second) codes, flat [numel] or like the weight, and fp32 scales [ceil(numel / 128)].
    parameter: what tells this weight's noise from that of others.
    All of them CPU tensors. The weight is dense: its elements fill one piece of memory, in any order of dimensions, and everything else
    lies in the same order.
    """

    weight: Tensor
    storage: str
    residual: Tensor | None
    first: State
    second: State
    parameter: int = 0


@dataclass(frozen=True)
class Step:
    """The settings of one AdamW step of one weight. step counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False

    def scalars(self, factor: float) -> tuple[float, ...]:
        """A row of the kernel's table; the gradient is multiplied by `factor`."""
        numbers = adamw_scalars(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.step)
        return (-factor if self.maximize else factor, *numbers)


class Plan:
    """The steps of `items`: checks and tables that stay the same from step to step.

    It keeps addresses and the tensors that they belong to: make a new one when a tensor is replaced or its data moves. Results are written
    where the tensors lie and bump no version. Memory: 100 bytes per item.
    """

    def __init__(self, items: Sequence[Item], seed: int = 0) -> None:
        self.items = tuple(items)
        for i, item in enumerate(self.items):
            _check(item, i)
        self._seed = seed
        self._places = np.array([_places(item) for item in self.items], dtype=np.int64).reshape(-1, 6)
        self._kinds = np.array([_kinds(item) for item in self.items], dtype=np.int32).reshape(-1, 4)
        self._parameters = np.array([item.parameter & 0xFFFFFFFF for item in self.items], dtype=np.uint32)
        self._chunks = _cut([item.weight.numel() for item in self.items])
        self._ends = _pieces(self._chunks)

    def run(self, gradients: Sequence[Tensor | None], steps: Sequence[Step], factor: float = 1.0, noise_step: int | None = None) -> None:
        """One AdamW step of every item that has a gradient, by `numerics.adamw_` on fp32 numbers, in place on weights, residuals and moments.

        gradients: fp32, bf16 or fp16 in the shape and strides of the weights; multiplied by `factor` (clip coefficient over loss scale)
        in fp32 as they are read. steps: one for each item. The noise of item i is that of
        `Noise(seed, items[i].parameter, noise_step)`, `noise_step` being its own step where it is None.
        Raises ConfigError, before anything is written, for a gradient that does not lie as its weight does.
        """
        if len(gradients) != len(self.items) or len(steps) != len(self.items):
            raise ConfigError(
                f"{len(gradients)} gradients and {len(steps)} steps were given for {len(self.items)} weights", "Give one of each for each weight."
            )
        addresses = np.zeros(len(self.items), dtype=np.int64)
        forms = np.zeros(len(self.items), dtype=np.int32)
        for i, (gradient, item) in enumerate(zip(gradients, self.items, strict=True)):
            if gradient is not None:
                _check_gradient(gradient, item, i)
                addresses[i], forms[i] = gradient.data_ptr(), FORMATS[gradient.dtype]
        rows = {step: step.scalars(factor) for step in set(steps)}
        scalars = np.array([rows[step] for step in steps], dtype=np.float32).reshape(-1, 8)
        self.launch(addresses, forms, scalars, [step.step if noise_step is None else noise_step for step in steps])

    def launch(self, addresses: Table, forms: npt.NDArray[np.int32], scalars: npt.NDArray[np.float32], noise_steps: int | Sequence[int]) -> None:
        """`run` without looking: addresses of gradients (0: none), their formats, `Step.scalars` of each item, and the steps of the noise."""
        keys = _keys(self._seed, self._parameters, noise_steps)
        chunks, ends = self._chunks, self._ends
        if not addresses.all():
            chunks = chunks[addresses[chunks[:, 0]] != 0]
            ends = _pieces(chunks)

        def work(piece: int) -> None:
            ends_here = ends[piece], ends[piece + 1]
            space = np.empty(loops.BUFFERS, np.float32)
            loops.adamw_chunks(self._places, self._kinds, scalars, keys, addresses, forms, chunks, *ends_here, space)

        pool.share(work, len(ends) - 1)


def adamw(items: Sequence[Item], gradients: Sequence[Tensor | None], steps: Sequence[Step], factor: float = 1.0, seed: int = 0) -> None:
    """One AdamW step of `items`: a `Plan` that is used once."""
    Plan(items, seed).run(gradients, steps, factor)


def squares(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(sums of squares, largest magnitudes) of fp32, bf16 or fp16 CPU tensors: fp64 [n] and fp32 [n], in one pass.

    Sums are taken in fp64, so that no square overflows, in an order that the number of threads does not change. An inf gives inf and a
    NaN gives NaN, in both. An empty tensor gives 0. One that is not dense (expanded, or a slice) is copied first.
    """
    if False in [t.is_contiguous() for t in tensors]:  # lists: this is called with hundreds of tensors in every step
        tensors = [t.resolve_neg() for t in tensors]
    tensors = [t.detach() if _is_dense(t) else t.detach().contiguous() for t in tensors]
    formats = [FORMATS.get(t.dtype) if t.is_cpu else None for t in tensors]
    if None in formats:
        t = tensors[formats.index(None)]
        raise ConfigError(f"squares of a {t.dtype} tensor on {t.device} were asked for", "Give dense fp32, bf16 or fp16 tensors on the CPU.")
    addresses = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
    forms = np.array(formats, dtype=np.int32)
    chunks, ends = _cut_and_parted(tuple([t.numel() for t in tensors]))
    sums, largest = np.zeros(len(chunks)), np.zeros(len(chunks), dtype=np.float32)

    def work(piece: int) -> None:
        loops.squares_chunks(addresses, forms, chunks, sums, largest, ends[piece], ends[piece + 1], np.empty(loops.BUFFERS, np.float32))

    pool.share(work, len(ends) - 1)
    totals, peaks = np.bincount(chunks[:, 0], weights=sums, minlength=len(tensors)), np.zeros(len(tensors), dtype=np.float32)
    with np.errstate(invalid="ignore"):  # a NaN is an answer
        np.maximum.at(peaks, chunks[:, 0], largest)
    return torch.from_numpy(totals), torch.from_numpy(peaks)


@functools.lru_cache(maxsize=16)
def _cut_and_parted(sizes: tuple[int, ...]) -> tuple[Table, list[int]]:
    """Chunks of tensors of these sizes and where to part them: the same in every step of a model."""
    chunks = _cut(sizes)
    return chunks, _pieces(chunks)


def _cut(sizes: Sequence[int]) -> Table:
    """Chunks of tensors of these sizes: rows of tensor, begin, end."""
    rows = [(i, begin, min(begin + CHUNK, size)) for i, size in enumerate(sizes) for begin in range(0, size, CHUNK)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _pieces(chunks: Table) -> list[int]:
    """Where to part the rows of `chunks`, so that each piece has about as many elements: 0, ..., len(chunks)."""
    upto = np.cumsum(chunks[:, 2] - chunks[:, 1])
    if not len(upto):
        return [0]
    size = max(int(upto[-1]) / PIECES, CHUNK / 2)
    goals = np.arange(1, int(upto[-1] / size) + 1) * size
    ends = np.searchsorted(upto, goals, side="left") + 1
    return sorted({0, len(chunks), *(int(end) for end in ends if end < len(chunks))})


def count_steps(steps: Table) -> npt.NDArray[np.float32]:
    """Add 1 to the fp32 numbers at these addresses; what they are then."""
    counts = np.empty(len(steps), dtype=np.float32)
    loops.count_steps(steps, counts)
    return counts


def _keys(seed: int, parameters: npt.NDArray[np.uint32], steps: int | Sequence[int]) -> npt.NDArray[np.uint32]:
    """`Noise(seed, parameter, step).keys` of each weight, as a table of two columns."""
    at = np.array([step & 0xFFFFFFFF for step in ([steps] if isinstance(steps, int) else steps)], dtype=np.uint32)
    first = _mix(np.uint32(seed & 0xFFFFFFFF) ^ _mix(parameters ^ _mix(at)))
    return np.stack((first, _mix(first ^ np.uint32(0x9E3779B9))), axis=1)


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _codec(state: State) -> int:
    if not isinstance(state, Tensor):
        return loops.STATE_INT8
    return loops.STATE_FP32 if state.dtype == torch.float32 else loops.STATE_BF16


def _kinds(item: Item) -> tuple[int, int, int, int]:
    return STORAGES[item.storage], FORMATS[item.weight.dtype], _codec(item.first), _codec(item.second)


def _places(item: Item) -> tuple[int, ...]:
    """Addresses: weight, residual, first moment and its scales, second moment and its scales."""
    residual = 0 if item.residual is None else item.residual.data_ptr()
    states = [
        place
        for state in (item.first, item.second)
        for place in ((state.data_ptr(), 0) if isinstance(state, Tensor) else (state[0].data_ptr(), state[1].data_ptr()))
    ]
    return item.weight.data_ptr(), residual, *states


def _is_dense(t: Tensor) -> bool:
    """Whether the elements fill one piece of memory, each once, in any order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _lies_as(t: Tensor, weight: Tensor) -> bool:
    """Whether `t` has the shape of `weight` and its elements the same order in memory, given that `weight` is dense."""
    if t.shape != weight.shape or t.layout != torch.strided:
        return False
    if t.stride() == weight.stride() or not t.numel():
        return True
    return all(a == b for a, b, size in zip(t.stride(), weight.stride(), t.shape, strict=True) if size != 1)


def _check_gradient(gradient: Tensor, item: Item, i: int) -> None:
    if gradient.dtype in FORMATS and gradient.device.type == "cpu" and _lies_as(gradient, item.weight):
        return
    raise ConfigError(
        f"gradient {i} is {gradient.dtype} on {gradient.device} of shape {tuple(gradient.shape)} and strides {gradient.stride()}, its weight has "
        f"shape {tuple(item.weight.shape)} and strides {item.weight.stride()}",
        "Give fp32, bf16 or fp16 gradients that lie in memory as the weights do: torch.empty_like(weight).copy_(gradient).",
    )


def _check(item: Item, i: int) -> None:
    """Raise ConfigError for an item whose tensors do not fit together: the kernel works on addresses and would write somewhere else."""
    weight, name = item.weight, f"item {i} ({item.storage}, shape {tuple(item.weight.shape)})"
    if item.storage not in STORAGES or (weight.dtype == torch.float32) != (item.storage == "fp32") or weight.dtype not in FORMATS:
        raise ConfigError(
            f"{name} has {weight.dtype} weights", f"Use fp32 weights with fp32, bf16 or fp16 weights with the others of {', '.join(STORAGES)}."
        )
    if weight.device.type != "cpu" or weight.layout != torch.strided or not _is_dense(weight):
        raise ConfigError(f"{name} is not dense on the CPU", "Keep weights that are slices or expanded out of the kernels.")
    expected = weight.dtype if item.storage == "kahan" else RESIDUALS.get(item.storage)
    found = None if item.residual is None else item.residual.dtype
    if found != expected or (item.residual is not None and not _lies_as(item.residual, weight)):
        raise ConfigError(
            f"{name} has a residual of {found}, not of {expected}, or one that lies otherwise", "Make it with torch.empty_like(weight, dtype=...)."
        )
    for state, codes in ((item.first, torch.int8), (item.second, torch.uint8)):
        if isinstance(state, Tensor):
            fits = state.dtype in (torch.float32, torch.bfloat16) and _lies_as(state, weight)
        else:
            part, scales = state
            lies = _lies_as(part, weight) or (part.dim() == 1 and part.is_contiguous() and part.numel() == weight.numel())
            fits = lies and part.dtype == codes and scales.dtype == torch.float32 and scales.is_contiguous()
            fits = fits and scales.numel() == -(-weight.numel() // loops.BLOCK)
        if not fits:
            raise ConfigError(
                f"{name} has a moment that is not in one of the formats",
                f"Use fp32 or bf16 that lies as the weight does, or ({codes} codes, fp32 scales of blocks of {loops.BLOCK}).",
            )
