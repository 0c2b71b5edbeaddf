"""AdamW, SGD, Lion and the sum of squares over many tensors in one launch for all that are alike, on CUDA devices (Triton).

What is launched works on addresses in a table: tensors are checked once, when a `Plan` is made, and gradients at every run. Tensors are cut
into chunks, one for each program; the cut changes no bit. Nothing here waits for the device: one copy from pinned memory tells it the
addresses of gradients, the numbers of the step and the keys of its noise.
Under Triton's interpreter (TRITON_INTERPRET=1, before the first import) the same code runs on CPU tensors, slowly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from halfstep.errors import ConfigError
from halfstep.kernels import codes
from halfstep.kernels.codes import FORMATS as FORMATS
from halfstep.kernels.cuda_parts import (
    COLUMNS,
    bits_of,
    magnitude,
    of_bits,
    random_word,
    read_state,
    read_values,
    read_weight,
    state_noise,
    write_state,
    write_weight,
)
from halfstep.kernels.items import Item as Item
from halfstep.kernels.items import check, is_dense, kinds, places
from halfstep.kernels.rows import ROW as ROW
from halfstep.kernels.rows import keys, tables
from halfstep.kernels.rows import row as row
from halfstep.numerics import Settings
from halfstep.numerics.noise import WORD

Table = npt.NDArray[np.int64]

BLOCKS = 4  # rows of 128 that a program works on at once: 4 elements for each of its 128 threads, 16 bytes of an fp32 tensor. With 8 a
# thread needs four times the registers, and elements change threads between loads and stores
TURNS = 8  # times that a program does so: finding out what to do takes about as long as one of them
WARPS = 4
WIDE = 16  # bytes that a thread moves at once, where all addresses are multiples of it

ADAMW, LION = tl.constexpr(codes.ADAMW), tl.constexpr(codes.LION)
STATE_NONE, NUMBERS = tl.constexpr(codes.STATE_NONE), tl.constexpr(ROW)


# ---- update rules: twins of numerics.updates -----------------------------------------------------------------------------------------


@triton.jit
def _adamw(p, g, m, v, numbers):
    decay, rise1, keep2, rise2 = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)
    root2, floor, size = tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7)
    m = m + (g - m) * rise1
    v = v * keep2 + (g * g) * rise2
    denominator = tl.sqrt_rn(v) * root2 + floor
    return p * decay - tl.div_rn(m, denominator) * size, m, v


@triton.jit
def _sgd(p, g, b, numbers, CODEC: tl.constexpr):
    decay, keep, rise = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    ahead, size = tl.load(numbers + 4), tl.load(numbers + 5)
    g = p * decay + g
    if CODEC != STATE_NONE:
        b = b * keep + g * rise
        g = tl.where(ahead != 0.0, b * ahead + g, b)
    return p - g * size, b


@triton.jit
def _lion(p, g, m, numbers):
    decay, rise1, rise2, size = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)
    change = g - m
    direction = m + change * rise1
    sign = (direction > 0.0).to(tl.float32) - (direction < 0.0).to(tl.float32)
    return p * decay - tl.where(direction == direction, sign, direction) * size, m + change * rise2


# ---- what is launched ----------------------------------------------------------------------------------------------------------------


@triton.jit
def _stretch(
    places, gradient, numbers, factor, key1, key2, start, size,
    RULE: tl.constexpr, STORAGE: tl.constexpr, FORM: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A step of the elements from `start` on of one tensor. MASKED: some of them lie behind its end."""
    weight, residual, first, second = tl.load(places), tl.load(places + 1), tl.load(places + 2), tl.load(places + 4)
    first_scales, second_scales = tl.load(places + 3), tl.load(places + 5)
    at = tl.arange(0, BLOCKS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = start + at < size
    p = read_weight(weight, residual, start, at, inside, STORAGE, FORM, ALIGNED, MASKED)
    g = read_values(gradient, start, at, inside, GRADIENT, ALIGNED, MASKED) * factor
    m, v = g, g
    if FIRST != STATE_NONE:
        m = read_state(first, first_scales, start, at, inside, size, FIRST, True, ALIGNED, MASKED, BLOCKS)
    if RULE == ADAMW:
        v = read_state(second, second_scales, start, at, inside, size, SECOND, False, ALIGNED, MASKED, BLOCKS)
        p, m, v = _adamw(p, g, m, v, numbers)
    elif RULE == LION:
        p, m = _lion(p, g, m, numbers)
    else:
        p, m = _sgd(p, g, m, numbers, FIRST)
    bits = random_word(key1, key2, start.to(tl.uint32) + at.to(tl.uint32))  # nothing is left of it where nobody draws
    mixed = state_noise(bits)
    if FIRST != STATE_NONE:
        write_state(m, mixed, first, first_scales, start, at, inside, size, FIRST, True, ALIGNED, MASKED, BLOCKS)
    if RULE == ADAMW:
        write_state(v, mixed, second, second_scales, start, at, inside, size, SECOND, False, ALIGNED, MASKED, BLOCKS)
    write_weight(p, bits, weight, residual, start, at, inside, STORAGE, FORM, ALIGNED, MASKED)


@triton.jit
def step_chunks(
    places, sizes, gradients, keys, numbers, chunks,
    RULE: tl.constexpr, STORAGE: tl.constexpr, FORM: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCKS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """A step of many tensors that are alike; one program for each row of `chunks`: which tensor, which chunk of it.

    places [n, 6], sizes [n], gradients [n]: int64. keys [n, 2]: int32. numbers [n, 8]: fp32, see `rows.row`. chunks: int32.
    """
    chunk = chunks + 2 * tl.program_id(0)
    t = tl.load(chunk).to(tl.int64)
    begin = tl.load(chunk + 1).to(tl.int64) * (TURNS * BLOCKS * COLUMNS)
    size = tl.load(sizes + t)
    row = numbers + t * NUMBERS
    factor = tl.load(row)
    key1, key2 = tl.load(keys + 2 * t).to(tl.uint32, bitcast=True), tl.load(keys + 2 * t + 1).to(tl.uint32, bitcast=True)
    gradient, own = tl.load(gradients + t), places + 6 * t
    for turn in range(TURNS):
        start = begin + turn * (BLOCKS * COLUMNS)
        if start + BLOCKS * COLUMNS <= size:
            _stretch(own, gradient, row, factor, key1, key2, start, size,
                     RULE, STORAGE, FORM, FIRST, SECOND, GRADIENT, ALIGNED, False, BLOCKS)  # fmt: skip
        elif start < size:
            _stretch(own, gradient, row, factor, key1, key2, start, size,
                     RULE, STORAGE, FORM, FIRST, SECOND, GRADIENT, ALIGNED, True, BLOCKS)  # fmt: skip


@triton.jit
def square_chunks(
    addresses, sizes, chunks, sums, largest,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The sum of squares (fp64) and the bits of the largest magnitude (int32) of each chunk: tensor, chunk of it, place of the result."""
    chunk = chunks + 3 * tl.program_id(0)
    t = tl.load(chunk).to(tl.int64)
    begin = tl.load(chunk + 1).to(tl.int64) * (TURNS * BLOCKS * COLUMNS)
    slot = tl.load(chunk + 2)
    size, address = tl.load(sizes + t), tl.load(addresses + t)
    at = tl.arange(0, BLOCKS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((BLOCKS, COLUMNS), tl.float64)
    top = tl.zeros((BLOCKS, COLUMNS), tl.int32)
    for turn in range(TURNS):
        start = begin + turn * (BLOCKS * COLUMNS)
        if start + BLOCKS * COLUMNS <= size:
            x = read_values(address, start, at, at >= 0, FORM, ALIGNED, False)
        else:
            x = read_values(address, start, at, start + at < size, FORM, ALIGNED, True)
        wide = x.to(tl.float64)
        total += wide * wide
        top = tl.maximum(top, bits_of(magnitude(x)))
    tl.store(sums + slot, tl.sum(tl.sum(total, axis=1), axis=0))
    tl.store(largest + slot, tl.max(tl.max(top, axis=1), axis=0))


@triton.jit
def square_totals(ends, sums, largest, totals, peaks, WIDTH: tl.constexpr):
    """The same of each tensor: its chunks' results lie from `ends[t]` to `ends[t + 1]`, and are added in one order."""
    t = tl.program_id(0)
    first, last = tl.load(ends + t), tl.load(ends + t + 1)
    total = tl.zeros((WIDTH,), tl.float64)
    top = tl.zeros((WIDTH,), tl.int32)
    for begin in range(first, last, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        total += tl.load(sums + at, mask=at < last, other=0.0)
        top = tl.maximum(top, tl.load(largest + at, mask=at < last, other=0))
    tl.store(totals + t, tl.sum(total, axis=0))
    tl.store(peaks + t, of_bits(tl.max(top, axis=0)))


DEVICE = "cpu" if isinstance(step_chunks, InterpretedFunction) else "cuda"  # kind of device whose tensors are taken
OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}  # every product and every sum is rounded, as in the definition


# ---- what is called ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Launch:
    """The chunks [c, 2] of weights that are alike: storage, format, codecs, the gradient's format, and whether all addresses are aligned."""

    about: dict[str, Any]
    chunks: Tensor


class Plan:
    """The steps of `items` by one rule: checks and tables that stay the same from step to step.

    rule: "adamw" (items have both moments), "sgd" (the first is the momentum buffer, or None) or "lion" (the first is the average). All
    tensors lie on one device. It keeps addresses and the tensors that they belong to: make a new one when a tensor is replaced or its data
    moves. Results are written where the tensors lie and bump no version. Memory on the device: 64 bytes per item and 8 per 4,096 elements.
    """

    def __init__(self, items: Sequence[Item], seed: int = 0, rule: str = "adamw") -> None:
        self.items, self.rule = tuple(items), rule
        for i, item in enumerate(self.items):
            check(item, i, rule, DEVICE)
        devices = sorted({str(item.weight.device) for item in self.items})
        if len(devices) > 1:
            raise ConfigError(f"the weights of one plan lie on {', '.join(devices)}", "Make a plan for each device.")
        self._device = self.items[0].weight.device if self.items else torch.device(DEVICE)
        self._seed = seed
        where = np.array([places(item) for item in self.items], dtype=np.int64).reshape(-1, 6)
        sizes = [item.weight.numel() for item in self.items]
        self._aligned = (where % WIDE == 0).all(axis=1)
        self._kinds = [kinds(item) for item in self.items]
        self._parameters = np.array([item.parameter & WORD for item in self.items], dtype=np.uint32)
        self._chunks = [np.stack((np.full(number, i), np.arange(number)), axis=1) for i, number in enumerate(map(_chunks_of, sizes))]
        self._places, self._sizes = _sent(where, self._device), _sent(np.array(sizes, dtype=np.int64), self._device)
        self._launches: tuple[bytes, list[_Launch]] = (b"", [])  # of the step before, and what told them from others

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
        launches = self._alike(addresses, forms)
        if not launches:
            return
        n = len(addresses)
        words = np.empty((2 + ROW // 2) * n, dtype=np.int64)  # all that is told about a step, in one copy
        words[:n] = addresses
        words[n : 2 * n] = keys(self._seed, self._parameters, noise_step).astype(np.uint32).view(np.int64).reshape(-1)
        words[2 * n :] = np.ascontiguousarray(scalars, dtype=np.float32).view(np.int64).reshape(-1)
        sent = _sent(words, self._device)
        told = (self._places, self._sizes, sent[:n], sent[n : 2 * n].view(torch.int32), sent[2 * n :].view(torch.float32))
        with _on(self._device):
            for launch in launches:
                step_chunks[(len(launch.chunks),)](*told, launch.chunks, **launch.about, **OPTIONS)

    def _alike(self, addresses: Table, forms: npt.NDArray[np.int32]) -> list[_Launch]:
        """What is to be launched: the same from step to step, as long as gradients are of the same formats."""
        aligned = self._aligned & (addresses % WIDE == 0)
        about = b"".join(a.tobytes() for a in (addresses != 0, forms, aligned))
        if self._launches[0] == about:
            return self._launches[1]
        found: dict[tuple[Any, ...], list[npt.NDArray[np.int64]]] = {}
        for i in np.flatnonzero(addresses):
            found.setdefault((*self._kinds[i], int(forms[i]), bool(aligned[i])), []).append(self._chunks[i])
        names = ("STORAGE", "FORM", "FIRST", "SECOND", "GRADIENT", "ALIGNED")
        fixed = {"RULE": codes.RULES[self.rule], "BLOCKS": BLOCKS, "TURNS": TURNS}
        launches = []
        for kind, parts in found.items():
            chunks = np.concatenate(parts).astype(np.int32)
            if len(chunks):
                launches.append(_Launch(dict(zip(names, kind, strict=True)) | fixed, _sent(chunks, self._device)))
        self._launches = (about, launches)
        return launches


def squares(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(sums of squares, largest magnitudes) of fp32, bf16 or fp16 tensors on one device: fp64 [n] and fp32 [n] there, in one pass.

    Sums are taken in fp64, so that no square overflows, and in one order. An inf gives inf and a NaN gives NaN, in both. An empty tensor
    gives 0. One that is not dense (expanded, or a slice) is copied first. Nothing is read to the host.
    """
    tensors = [t.detach() if is_dense(t) and not t.is_neg() else t.detach().resolve_neg().contiguous() for t in tensors]
    device = tensors[0].device if tensors else torch.device(DEVICE)
    for t in tensors:
        if t.dtype not in FORMATS or t.device != device or t.device.type != DEVICE:
            raise ConfigError(
                f"squares of a {t.dtype} tensor on {t.device} were asked for", f"Give dense fp32, bf16 or fp16 tensors on one {DEVICE}."
            )
    totals, peaks = torch.zeros(len(tensors), dtype=torch.float64, device=device), torch.zeros(len(tensors), device=device)
    if not tensors:
        return totals, peaks
    addresses = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
    about = tuple((t.numel(), FORMATS[t.dtype], wide) for t, wide in zip(tensors, (addresses % WIDE == 0).tolist(), strict=True))
    sizes, ends, count, launches = _measured(about, device)
    sums, largest = torch.empty(count, dtype=torch.float64, device=device), torch.empty(count, dtype=torch.int32, device=device)
    sent = _sent(addresses, device)
    with _on(device):
        for form, wide, chunks in launches:
            square_chunks[(len(chunks),)](sent, sizes, chunks, sums, largest, FORM=form, ALIGNED=wide, BLOCKS=BLOCKS, TURNS=TURNS, **OPTIONS)
        square_totals[(len(tensors),)](ends, sums, largest, totals, peaks, WIDTH=codes.BLOCK, **OPTIONS)
    return totals, peaks


@functools.lru_cache(maxsize=16)
def _measured(about: tuple[tuple[int, int, bool], ...], device: torch.device) -> tuple[Tensor, Tensor, int, list[tuple[int, bool, Tensor]]]:
    """Tables for tensors of these sizes, formats and alignments: the same in every step of a model. Sizes, ends of chunks, their number, launches."""
    numbers = [_chunks_of(size) for size, _, _ in about]
    ends = np.cumsum([0, *numbers]).astype(np.int32)
    found: dict[tuple[int, bool], list[npt.NDArray[np.int64]]] = {}
    for i, (number, (_, form, wide)) in enumerate(zip(numbers, about, strict=True)):
        if number:
            part = np.arange(number)
            found.setdefault((form, wide), []).append(np.stack((np.full(number, i), part, ends[i] + part), axis=1))
    launches = [(form, wide, _sent(np.concatenate(rows).astype(np.int32), device)) for (form, wide), rows in found.items()]
    return _sent(np.array([size for size, _, _ in about], dtype=np.int64), device), _sent(ends, device), int(ends[-1]), launches


def count_steps(steps: Table) -> npt.NDArray[np.float32]:
    """Add 1 to the fp32 numbers at these addresses on the host; what they are then."""
    counts = np.empty(len(steps), dtype=np.float32)
    for i, address in enumerate(steps.tolist()):
        place = ctypes.c_float.from_address(address)
        place.value += 1.0
        counts[i] = place.value
    return counts


def _chunks_of(size: int) -> int:
    """How many programs work on a tensor of this size."""
    return -(-size // (TURNS * BLOCKS * codes.BLOCK))


def _sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A table on the device. To a GPU by way of pinned memory, so that nobody waits; torch keeps that memory until it is copied."""
    here = torch.from_numpy(np.ascontiguousarray(array))
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the current device, which need not be the tensors'."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
