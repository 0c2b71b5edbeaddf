"""The GELU in three passes has the bits of the operations that transformers writes out, whoever's threads take part."""

import math

import pytest
import torch

from halfstep.kernels import gelu_kernels, pool

pytest.importorskip("numba")


def written_out(x):
    """As autocast runs it with CUDA's list of ops: the cube in fp32, and all that follows it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x.float(), 3.0))))


def same(a, b):
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("whose", ["torch's", "Python's"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_number_and_every_rest(dtype, whose, threads, monkeypatch):
    kernels, before = gelu_kernels(), torch.get_num_threads()
    assert kernels is not None
    if whose == "Python's":
        monkeypatch.setattr(pool, "_team", lambda: None)
    torch.set_num_threads(threads)
    try:
        if dtype == torch.float32:
            codes = torch.cat([torch.randn(70_000) * 3, torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-42, 1e30])])
        else:
            codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        for x in (codes, codes.repeat(3), codes[:1], codes[-1025:], codes[:0]):
            leaf, above = x.clone().requires_grad_(), torch.linspace(-3, 3, len(x)) ** 3
            expected = written_out(leaf)
            y, t = kernels.forward(x)
            assert same(y, expected.detach())
            assert same(kernels.backward(x, t, above), torch.autograd.grad(expected, leaf, above)[0])
    finally:
        torch.set_num_threads(before)
