"""torch's `bernoulli_` on a CPU, drawn by whole blocks of its generator: the same numbers, and the generator left in the same state.

torch draws each number for itself, on one core (on Intel's CPUs MKL does, with numbers of its own). Its generator is the Mersenne Twister MT19937
(Matsumoto and Nishimura, ACM TOMACS 8, 1998): 624 words of 32 bits, made anew together, each of which then gives one random word. A number takes
two of them, of which 53 bits are compared with the probability.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import functools
import math
import operator
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.compile import compiled, halves, integers, naturals, pairs, part

WORDS, AHEAD = 624, 397  # of the generator, and how far on the word is that each is mixed with
BITS = 53  # of the numbers that are compared: those of fp64
HEADER = 24  # bytes of a generator's state before its words, which take 8 each: seed, words left (int32 at 8), flag, next word (at 16)
SIZE = 5056  # bytes of a state

i16, i32, u32, i64, u64 = np.int16, np.int32, np.uint32, np.int64, np.uint64


@part
def _mixed(word, after):
    y = u32(u32(word & u32(0x80000000)) | u32(after & u32(0x7FFFFFFF)))
    return u32(u32(y >> u32(1)) ^ u32(u32(u32(0) - u32(y & u32(1))) & u32(0x9908B0DF)))


@part
def _renew(words):
    for k in range(WORDS - AHEAD):
        words[k] = u32(words[k + AHEAD] ^ _mixed(words[k], words[k + 1]))
    # words that this loop itself has made are read again 227 turns later: two loops, each of which reads only what is there
    for k in range(WORDS - AHEAD, 2 * (WORDS - AHEAD)):
        words[k] = u32(words[k - (WORDS - AHEAD)] ^ _mixed(words[k], words[k + 1]))
    for k in range(2 * (WORDS - AHEAD), WORDS - 1):
        words[k] = u32(words[k - (WORDS - AHEAD)] ^ _mixed(words[k], words[k + 1]))
    words[WORDS - 1] = u32(words[AHEAD - 1] ^ _mixed(words[WORDS - 1], words[0]))


@part
def _temper(words, out):
    for k in range(WORDS):
        y = words[k]
        y = u32(y ^ u32(y >> u32(11)))
        y = u32(y ^ u32(u32(y << u32(7)) & u32(0x9D2C5680)))
        y = u32(y ^ u32(u32(y << u32(15)) & u32(0xEFC60000)))
        out[k] = u32(y ^ u32(y >> u32(18)))


@part
def _choose(pairs, limit, drawn):
    """1 where a number, of two random words each, is below the limit, else 0. Words are read two at once, the first one as the low half."""
    for i in range(pairs.shape[0]):
        number = u64(u64(u64(pairs[i] & u64(0x1FFFFF)) << u64(32)) | u64(pairs[i] >> u64(32)))
        drawn[i] = i32(1) if number < limit else i32(0)


@part
def _put(size, drawn, count, value, address, start):
    if size == 2:
        out = halves(address, start, count)
        for i in range(count):
            out[i] = i16(drawn[i] * value)
    else:
        wide = integers(address, start, count)
        for i in range(count):
            wide[i] = i32(drawn[i] * value)


def _draw(state, limit, size, value, address, count):
    words, space, drawn = np.empty(WORDS, np.uint32), np.empty(WORDS + 1, np.uint32), np.empty(WORDS, np.int32)
    buffer = i64(space.ctypes.data)
    ready = naturals(buffer, 1, WORDS)
    for k in range(WORDS):
        words[k] = u32(state[HEADER // 8 + k])
    left = i32(state[1] & u64(0xFFFFFFFF))
    at = i64(WORDS) if left == 1 else i64(state[2])
    _temper(words, ready)
    done = i64(0)
    while done < count:
        if at >= WORDS - 1:
            begun = at == WORDS - 1  # the first half of a number is the last word: it stays in front of the new ones
            space[0] = space[WORDS]
            _renew(words)
            _temper(words, ready)
            at = i64(-1) if begun else i64(0)
        n = min((WORDS - at) // 2, count - done)
        _choose(pairs(buffer, at + 1, n), limit, drawn)
        _put(size, drawn, n, value, address, done)
        done += n
        at += 2 * n
    for k in range(WORDS):
        state[HEADER // 8 + k] = u64(words[k])
    state[1] = u64(u64(state[1] & u64(0xFFFFFFFF00000000)) | u64(WORDS - at + 1))
    state[2] = u64(at)


draw_numbers = compiled(_draw)


_turn = threading.Lock()


def _renew_turn() -> None:
    global _turn
    _turn = threading.Lock()  # in a forked process nobody releases the other one


os.register_at_fork(after_in_child=_renew_turn)


def fill(out: Tensor, share: float, value: Tensor, generator: torch.Generator) -> None:
    """Fill `out` as `out.bernoulli_(share, generator=generator)` does, with `value` for 1: on a CPU, dense, fp32 or 16 bits; 0 < share <= 1.

    value: one number in the format of `out`. The generator is one of torch's for the CPU, with a state of its format. Where another thread draws from
    it meanwhile, the numbers are drawn again from the state that it left.
    """
    if not out.numel():
        return
    limit, bits = u64(math.ceil(share * 2.0**BITS)), i32(int(value.view(torch.int16 if out.element_size() == 2 else torch.int32)))
    with _turn, torch._C.DisableTorchFunction():
        while True:
            before = generator.get_state()
            after = before.clone()
            draw_numbers(after.numpy().view(np.uint64), limit, out.element_size(), bits, out.data_ptr(), out.numel())
            if _moved(generator, before, after):
                return


def _moved(generator: torch.Generator, before: Tensor, after: Tensor) -> bool:
    """Bring a generator from one state to another, unless it is no longer in the first one; whether it was.

    Look and change are one call of C code, a pipe of `map`s, within which CPython runs no other thread.
    """
    then: defaultdict[bytes, Callable[[], Any]] = defaultdict(lambda: bool)
    then[before.numpy().tobytes()] = functools.partial(generator.set_state, after)
    states: Iterator[Tensor] = map(operator.call, (generator.get_state,))
    return bool(next(map(operator.call, map(then.__getitem__, map(np.ndarray.tobytes, map(Tensor.numpy, states))))))


@functools.cache
def is_torchs() -> bool:
    """Whether torch's own `bernoulli_` gives these numbers here, tried with generators of its own: it does not where it draws by MKL."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one = torch.ones((), dtype=dtype)
        for seed, (share, before) in enumerate([(0.9, 0), (0.5, 1), (0.123456789, 622), (1.0, 623)]):
            generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
            for generator in generators:
                torch.empty(before).uniform_(generator=generator)  # a word each
            ours, torchs = torch.empty(1500, dtype=dtype), torch.empty(1500, dtype=dtype)
            if generators[0].get_state().numel() != SIZE:
                return False
            fill(ours, share, one, generators[0])
            torchs.bernoulli_(share, generator=generators[1])
            if not torch.equal(ours, torchs) or not torch.equal(generators[0].get_state(), generators[1].get_state()):
                return False
    return True
