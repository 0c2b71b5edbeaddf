"""The compiled twin of activations in 8 bits has the bits of the plain definition."""

import math
import threading
import time

import pytest
import torch

from halfstep.kernels import activation_kernels
from halfstep.numerics import activations

pytest.importorskip("numba")
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def sources(dtype):
    generator = torch.Generator().manual_seed(0)
    n = 128 * 1500 + 37
    x = torch.randn(n, generator=generator)
    yield from (x, x[:5], x[:0])
    for size in (1e-3, 1e-7, 1e-40, 1e4, 1e37):
        yield x * size * torch.exp2(torch.randint(-30, 1, (n,), generator=generator).float())
    yield torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)  # any bits, NaNs too
    if dtype != torch.float32:
        yield torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()


@pytest.mark.parametrize("kind", activations.KINDS)
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_codes_scales_and_values_are_equal(dtype, kind):
    kernels = activation_kernels(torch.empty(0))
    assert kernels is not None
    for source in sources(dtype):
        x = source.to(dtype)
        for seed in (0, 12345):
            codes, scales = activations.pack(x, kind, seed)
            ours, our_scales = kernels.pack(x, kind, seed)
            assert torch.equal(codes, ours)
            assert torch.equal(scales, our_scales)
            values, found = activations.unpack(codes, scales, kind), kernels.unpack(codes, scales, kind)
            assert torch.equal(values.isnan(), found.isnan())
            numbers = [t.nan_to_num(0.0, math.inf, -math.inf).view(WORDS[dtype]) for t in (values, found)]  # a NaN has many codes, inf has one
            assert torch.equal(*numbers)


def test_threads_make_no_difference(monkeypatch):
    x = torch.randn(128 * 3000)
    kernels, threads, found, seen = activation_kernels(x), torch.get_num_threads(), [], set()
    parts = {name: getattr(kernels, name) for name in ("pack_blocks", "unpack_blocks")}
    for name, part in parts.items():
        monkeypatch.setattr(kernels, name, lambda *given, part=part: (seen.add(threading.get_ident()), time.sleep(0.01), part(*given)))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            seen.clear()
            packed = kernels.pack(x, "int8")
            found.append((*packed, kernels.unpack(*packed, "int8")))
            assert len(seen) == count
    finally:
        torch.set_num_threads(threads)
    for alone, shared in zip(*found, strict=True):
        assert torch.equal(alone, shared)
