"""Activations in 8 bits: what the formats hold exactly, how far off the rest is, and that its mean is right."""

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.numerics import activations
from halfstep.numerics.activations import KINDS, SMALLEST, pack, unpack

DTYPES = tuple(SMALLEST)
TOP = {"int8": 126, "fp8": 125}


def every_number(dtype):
    """All finite bf16 or fp16 numbers, in the order of their codes."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[x.isfinite()]


def samples(dtype):
    """Tensors of every kind of block: all numbers of one size, all mixed, normal ones, and a few sizes of fp32."""
    if dtype == torch.float32:
        x = torch.randn(128 * 60 + 5)
        return [x, x * torch.exp2(torch.randint(-60, 60, x.shape).float()), x * 1e-42, x * 3e37]
    whole = every_number(dtype)
    return [whole, whole[torch.randperm(whole.numel())], torch.randn(128 * 60 + 5).to(dtype)]


def blocks(x):
    missing = -x.numel() % 128
    return torch.nn.functional.pad(x, (0, missing)).view(-1, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_signs_and_the_largest_of_a_block_are_exact_and_nothing_becomes_zero(dtype, kind):
    for x in samples(dtype):
        y = unpack(*pack(x, kind), kind)
        assert y.dtype == dtype
        assert y.isfinite().all()
        assert torch.equal(y.sign(), x.sign())
        largest = blocks(x).abs() == blocks(x).abs().amax(1, keepdim=True)
        assert torch.equal(blocks(y)[largest], blocks(x)[largest])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_goes_to_one_of_the_levels_beside_it(dtype, kind):
    for x in samples(dtype):
        y, wide = unpack(*pack(x, kind), kind).double(), x.double()
        scale = blocks(wide).abs().amax(1, keepdim=True).expand(-1, 128).reshape(-1)[: x.numel()]
        rounding = torch.finfo(dtype).eps * torch.maximum(wide.abs(), y.abs()) + SMALLEST[dtype]
        step = scale / 125 if kind == "int8" else torch.maximum(wide.abs() / 8, scale * 2.0**-9 / 416)
        assert ((y - wide).abs() <= step + rounding).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level_stays_what_it_is_whatever_the_noise(dtype, kind):
    scales = torch.tensor([1.0, 0.37, 1000.0, 6e-5, 3.2e4]).to(dtype)
    levels = torch.arange(TOP[kind] + 1, dtype=torch.int32)
    values = torch.where(levels == 0, 0.0, activations._value(levels, scales.float()[:, None], dtype, kind))
    x = torch.nn.functional.pad(values, (0, 128 - values.shape[1])).to(dtype).view(-1)
    for seed in range(5):
        codes, found = pack(x, kind, seed)
        assert torch.equal(found, scales)
        assert torch.equal(unpack(codes, found, kind), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_over_all_noise_is_the_number_itself(dtype, kind, monkeypatch):
    share = torch.rand(7, dtype=torch.float64) * 0.98 + 0.02
    numbers = torch.cat([share, share * 1e-3, share * (activations.LOWEST if kind == "int8" else 2.0**-9 / 416) * 2]).to(dtype)
    place = torch.arange(517 * 128).view(-1, 128) - torch.arange(517)[:, None] - 1  # each of 0 .. 65535 once, but in the first column
    noise = (place.clamp(0, 0xFFFF) << 16).to(torch.int32)
    monkeypatch.setattr(activations, "_random", lambda bits, seed, first: noise.clone())
    for number in numbers:
        x = number.expand(517, 128).clone()
        x[:, 0] = 1
        found = unpack(*pack(x.view(-1), kind), kind).view(-1, 128)[:, 1:].reshape(-1)[: 1 << 16].double()
        values = found.unique()
        assert 1 <= values.numel() <= 2
        lowest = float(activations._value(torch.tensor(1, dtype=torch.int32), torch.tensor(1.0), dtype, kind))
        wanted = max(float(number), lowest)
        distance = float(values[-1] - values[0])
        assert abs(float(found.mean()) - wanted) <= distance * 2.0**-16 + 2.0**-23 * wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_and_nan_come_back_and_leave_their_neighbours_alone(dtype, kind):
    x = torch.randn(640).to(dtype)
    clean = x.clone()
    clean[3::50] = 0
    x[3::150], x[53::150], x[103::150] = torch.inf, -torch.inf, torch.nan
    y = unpack(*pack(x, kind), kind)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y[x.isinf()], x[x.isinf()])
    bound = 0.01 if kind == "int8" else 0.13
    finite = x.isfinite()
    assert ((y - x)[finite].float().abs() <= bound * clean.float().abs().max()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_without_a_finite_number_and_one_of_zeros(kind):
    x = torch.tensor([torch.inf, -torch.inf] * 64 + [0.0] * 128)
    assert torch.equal(unpack(*pack(x, kind), kind), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_masks_are_exact(dtype, kind):
    for p in (0.1, 0.5, 0.37):
        mask = torch.nn.functional.dropout(torch.ones(1000, dtype=dtype), p)
        assert torch.equal(unpack(*pack(mask, kind), kind), mask)


def test_noise_follows_what_is_rounded_and_where_it_lies():
    x = torch.randn(128).repeat(3)
    codes, _ = pack(x, "int8")
    again, _ = pack(x.clone(), "int8")
    assert torch.equal(codes, again)
    first, second, third = codes.view(3, 128)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    other = x.clone()
    other[5] += 1e-3
    changed = (pack(other, "int8")[0] != codes).view(3, 128).sum(1)
    assert changed[0] > 10  # one element of it is another
    assert changed[1] == changed[2] == 0
    assert not torch.equal(pack(x, "int8", 1)[0], codes)


@pytest.mark.parametrize("kind", KINDS)
def test_mean_over_seeds_comes_near_as_independent_noise_would(kind):
    x = torch.randn(128 * 40)
    errors = torch.stack([unpack(*pack(x, kind, seed), kind).double() - x.double() for seed in range(64)])
    one, mean = errors.square().sum(1).mean().sqrt(), errors.mean(0).norm()
    assert 0.9 < float(mean / (one / 8)) < 1.1
    lean = (errors.mean(0) * x.sign()).sum() / (errors.std(0).square().sum().sqrt() / 8)
    assert abs(float(lean)) < 4


def test_size_and_refusals():
    codes, scales = pack(torch.randn(1280).bfloat16(), "int8")
    assert (codes.nbytes, scales.nbytes) == (1280, 20)
    assert pack(torch.randn(0), "int8")[0].numel() == 0
    for x, kind in ((torch.randn(4).double(), "int8"), (torch.randn(4, 4), "int8"), (torch.randn(4), "int4")):
        with pytest.raises(ConfigError, match="cannot be packed"):
            pack(x, kind)
