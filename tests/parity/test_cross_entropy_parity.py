"""The compiled twin of cross entropy has the bits of the plain definition, which is nearer to the exact values than torch's function."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from halfstep.kernels import loss_kernels
from halfstep.numerics import cross_entropy as plain

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(dtype, classes=1501, count=23):
    generator = torch.Generator().manual_seed(classes)
    x = torch.randn(count, classes, generator=generator) * torch.tensor([0.1, 4.0, 60.0])[torch.arange(count) % 3, None]
    x[3, classes // 2], x[4, 0], x[5, :], x[6, 1:] = math.inf, math.nan, -math.inf, -math.inf
    targets = torch.randint(0, classes, (count,), generator=generator)
    targets[1], targets[2] = 0, classes - 1
    targets[7] = -100
    return x.to(dtype), targets, torch.randn(count, generator=generator)


def same(a, b):
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def compiled():
    pytest.importorskip("numba")
    kernels = loss_kernels()
    assert kernels is not None
    return kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 63, 64, 65, 511, 512, 513, 1501])
def test_bits_are_equal(dtype, classes):
    kernels = compiled()
    x, targets, above = rows(dtype, classes)
    for given in (x, x.t().contiguous().t(), torch.stack([x, x], 1)[:, 0]):  # in order, by columns, with a gap between rows
        ours, theirs = kernels.losses(given, targets, -100), plain.losses(given, targets, -100)
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        a, b = (k.gradient(given, targets, -100, *theirs[1:], above) for k in (kernels, plain))
        assert same(a, b)
        assert a.is_contiguous()
        assert b.is_contiguous()


def test_threads_make_no_difference():
    kernels, threads = compiled(), torch.get_num_threads()
    x, targets, above = rows(torch.bfloat16, 40_000)
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            loss, *kept = kernels.losses(x, targets, -100)
            found.append((loss, *kept, kernels.gradient(x, targets, -100, *kept, above)))
    finally:
        torch.set_num_threads(threads)
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def distance(x):
    """Of exponentials of fp32 numbers to the true ones, in ulps of fp32."""
    true = torch.from_numpy(np.exp(x.double().numpy()))
    ulps = torch.exp2(true.log2().floor().clamp_min(-126) - 23)
    return (plain.exponential(x).double() - true).abs() / ulps


@pytest.mark.slow
def test_every_exponential_is_within_an_ulp():
    last = int(torch.tensor(plain.LEAST).view(torch.int32)) & 0x7FFFFFFF
    for start in range(0, last + 2, 1 << 22):
        bits = torch.arange(start, min(start + (1 << 22), last + 2), dtype=torch.int64)
        assert float(distance((bits - 2**31).to(torch.int32).view(torch.float32)).max()) <= 1


def test_exponentials_are_within_an_ulp_and_have_their_limits():
    x = torch.cat([torch.linspace(-104, 0, 3_000_001), -torch.logspace(-45, 2, 100_001)])
    assert float(distance(x).max()) <= 1
    special = torch.tensor([0.0, -0.0, -1e-45, -104.1, -1e30, -math.inf, math.nan])
    assert plain.exponential(special)[:-1].tolist() == [1, 1, 1, 0, 0, 0]
    assert plain.exponential(special)[-1].isnan()
    assert special[3] == -104.1  # what is given is not written to


@pytest.mark.parametrize("size", [1.0, 10.0])
def test_losses_and_gradients_are_nearer_to_the_exact_ones_than_those_of_torch(size):
    x = size * torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 50_000, (64,), generator=torch.Generator().manual_seed(1))
    exact, wide = x.double().requires_grad_(), x.clone().requires_grad_()
    true, torchs = (F.cross_entropy(t, targets, reduction="none") for t in (exact, wide))
    (slope,), (torchs_slope,) = (torch.autograd.grad(loss.sum(), t) for loss, t in ((true, exact), (torchs, wide)))
    loss, *kept = plain.losses(x, targets, -100)
    ours = (loss, plain.gradient(x, targets, -100, *kept, torch.ones(64)))
    for mine, theirs, right in zip(ours, (torchs.detach(), torchs_slope), (true.detach(), slope), strict=True):
        off, torchs_off = ((found.double() - right).abs() for found in (mine, theirs))
        assert off.mean() < torchs_off.mean()
        assert off.max() <= torchs_off.max()
    ulps = torch.exp2(true.detach().log2().floor() - 23)
    assert float(((loss.double() - true.detach()).abs() / ulps).max()) <= 1


def test_sums_that_fp32_cannot_hold():
    x = torch.zeros(1, 1 << 25)  # in fp32, one by one, 2^24 ones stay 2^24
    loss, _, sums = plain.losses(x, torch.tensor([7]), -100)
    assert float(sums) == 1 << 25
    assert float(loss) == pytest.approx(25 * math.log(2), rel=1e-7)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_copy_in_which_one_number_is_another_is_noticed(dtype):
    kernels = compiled()
    x = torch.randn(23, 1501).to(dtype)
    targets = torch.randint(0, 1501, (23,))
    for arithmetic in (kernels, plain):
        found = arithmetic.losses_of_copy(x, targets, -100, x.float())
        assert all(same(a, b) for a, b in zip(found, plain.losses(x.float(), targets, -100), strict=True))
        for place in ((0, 0), (22, 1500), (11, 1023)):
            copy = x.float()
            copy[place] *= 1 + 2.0**-23
            assert arithmetic.losses_of_copy(x, targets, -100, copy) is None
            copy[place] = math.nan
            assert arithmetic.losses_of_copy(x, targets, -100, copy) is None
