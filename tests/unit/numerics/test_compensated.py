"""Sums that keep their error, and 16-bit numbers that keep what rounding took away."""

import math
from fractions import Fraction

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.numerics import Noise, kahan_join, kahan_split, two_sum

HALVES = (torch.bfloat16, torch.float16)


def spread(n: int, low: int, high: int, seed: int = 0) -> torch.Tensor:
    """fp32 numbers of both signs and any mantissa, with exponents from `low` to `high` - 1."""
    bits = Noise(seed, 1, 0).bits(n)
    exponent = ((bits >> 23) & 0xFF) % (high - low) + low + 127
    return ((bits & -0x7F800001) | (exponent << 23)).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_sum_is_exact(dtype: torch.dtype) -> None:
    a, b = spread(3000, -40, 40, 0).to(dtype), spread(3000, -40, 40, 1).to(dtype)
    s, e = two_sum(a, b)
    assert torch.equal(s, a + b)
    for parts in zip(a.tolist(), b.tolist(), s.tolist(), e.tolist(), strict=True):
        x, y, total, lost = map(Fraction, parts)
        assert x + y == total + lost
    assert bool((e != 0).any())


@pytest.mark.parametrize("dtype", HALVES)
def test_the_weight_is_the_nearest_and_the_rest_is_nearest_too(dtype: torch.dtype) -> None:
    x = spread(2**20, -14, 15)
    hi, c = kahan_split(x, dtype)
    assert torch.equal(hi, x.to(dtype))
    assert torch.equal(c, (x - hi.float()).to(dtype))
    assert torch.equal(kahan_join(hi, c), hi.float() + c.float())


@pytest.mark.parametrize(("dtype", "relative", "absolute"), [(torch.bfloat16, 2.0**-17, 0.0), (torch.float16, 2.0**-23, 2.0**-25)])
def test_what_is_lost(dtype: torch.dtype, relative: float, absolute: float) -> None:
    x = spread(2**20, -30, 15)
    lost = (kahan_join(*kahan_split(x, dtype)).double() - x.double()).abs()
    bound = (x.double().abs() * relative).clamp(min=absolute)
    assert bool((lost <= bound).all())
    assert float((lost / bound).max()) > 0.95  # and no better: the bound is that of the format
    again = kahan_split(kahan_join(*kahan_split(x, dtype)), dtype)
    assert float((kahan_join(*again).double() - kahan_join(*kahan_split(x, dtype)).double()).abs().max()) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_the_format_have_no_compensation(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    x = x[x.isfinite()]
    hi, c = kahan_split(x, dtype)
    assert torch.equal(hi.float(), x)
    assert not c.any()


@pytest.mark.parametrize("dtype", HALVES)
def test_limits(dtype: torch.dtype) -> None:
    """Beyond the largest number hi stops there; inf and NaN stay."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest * 1.001, -largest * 1.001, math.inf, -math.inf, math.nan, 0.0])
    hi, c = kahan_split(x, dtype)
    joined = kahan_join(hi, c)
    assert hi[:2].tolist() == [largest, -largest]
    assert torch.allclose(joined[:2], x[:2], rtol=1e-5)
    assert torch.equal(joined[2:4], x[2:4])
    assert joined[4].isnan()
    assert joined[5] == 0


def test_small_updates_add_up_until_half_an_ulp_of_the_compensation() -> None:
    """Steps of 2^-12 of a bf16 ulp of 1 are lost without compensation; with one they move the weight, and those of 2^-20 do not."""
    step, n = 2.0**-7 * 2.0**-8, 1024
    plain, hi, c = torch.ones(1).bfloat16(), torch.ones(1).bfloat16(), torch.zeros(1).bfloat16()
    for _ in range(n):
        plain = (plain.float() + step).bfloat16()
        hi, c = kahan_split(kahan_join(hi, c) + step, torch.bfloat16)
    assert plain.item() == 1.0
    assert kahan_join(hi, c).item() == pytest.approx(1 + n * step, rel=1e-3)
    start = torch.tensor([1 + 2.0**-9])
    stuck = kahan_join(*kahan_split(start + 2.0**-20, torch.bfloat16))
    assert stuck.item() == start.item()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="16-bit format"):
        kahan_split(torch.ones(2), torch.float32)
