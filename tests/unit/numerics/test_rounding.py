"""Rounding against exact fractions, against torch's casts, and over all noise values."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics import FORMATS, Format, Noise, cast, nearest, stochastic, ulp

HALVES = (torch.bfloat16, torch.float16)
EDGES = [0.0, 2.0**-149, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-14, 1.0, 65504.0, 65519.996, 65520.0, 447.0, 464.0, 464.00003, 480.0, 61439.99, 61440.0]


def name(fmt: Format | torch.dtype) -> str:
    return fmt.name if isinstance(fmt, Format) else str(fmt).removeprefix("torch.")


def fp32_numbers(n: int, seed: int = 0) -> Tensor:
    """fp32 numbers of every sign, exponent and mantissa, inf and NaN among them, and some that stand at limits."""
    bits = Noise(seed, 0, 0).bits(n)
    edges = torch.tensor(EDGES)
    beside = [(edges.view(torch.int32) + off).clamp(min=0).view(torch.float32) for off in (-1, 0, 1)]
    return torch.cat([bits.view(torch.float32), *beside, *(-b for b in beside), torch.tensor([math.inf, -math.inf, math.nan, -0.0])])


def finite_numbers(n: int, low: int, high: int) -> Tensor:
    """fp32 numbers of both signs with exponents from `low` to `high` - 1."""
    bits = Noise(11, low + 200, high + 200).bits(n)
    exponent = ((bits >> 23) & 0xFF) % (high - low) + low + 127
    return ((bits & -0x7F800001) | (exponent << 23)).view(torch.float32)


def round_exactly(x: float, fmt: Format) -> float:
    """The nearest number of a format by fractions: Python rounds a half to even."""
    if not math.isfinite(x):
        return x if fmt.infinite or math.isnan(x) else math.copysign(fmt.largest, x)
    exponent = max(math.frexp(x)[1] - 1, 2 - 2 ** (fmt.exponent_bits - 1))
    distance = Fraction(2) ** (exponent - fmt.mantissa_bits)
    rounded = abs(round(Fraction(x) / distance) * distance)
    if rounded > Fraction(fmt.largest):
        return math.copysign(math.inf if fmt.infinite else fmt.largest, x)
    return math.copysign(float(rounded), x)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits, and NaN in the same places whatever its payload."""
    integer = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    equal = a.view(integer) == b.view(integer)
    return a.dtype == b.dtype and bool((equal | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=name)
def test_nearest_is_that_of_fractions(fmt: Format) -> None:
    emin = 2 - 2 ** (fmt.exponent_bits - 1)
    near = finite_numbers(3000, max(emin - fmt.mantissa_bits - 2, -126), emin + 3)
    x = torch.cat([fp32_numbers(3000), near, finite_numbers(3000, -3, 4)])
    wanted = torch.tensor([round_exactly(v, fmt) for v in x.tolist()])
    got = nearest(x, fmt)
    assert same_bits(got, wanted)
    assert same_bits(nearest(got, fmt), got if fmt.infinite else got.clamp(-fmt.largest, fmt.largest))


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.dtype is not None], ids=name)
def test_nearest_is_the_cast_of_torch(fmt: Format) -> None:
    assert fmt.dtype is not None
    x = fp32_numbers(2**20)
    assert same_bits(nearest(x, fmt), x.to(fmt.dtype).float())


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_cast_is_that_of_torch(dtype: torch.dtype) -> None:
    x = torch.cat([fp32_numbers(2**21), finite_numbers(2**19, -30, -10), finite_numbers(2**19, 10, 17)])
    assert same_bits(cast(x, dtype), x.to(dtype))


def test_cast_makes_one_nan_of_all() -> None:
    x = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    assert cast(x, torch.bfloat16).view(torch.int16).tolist() == [0x7FC0] * 5
    assert [code & 0x7FFF for code in cast(x, torch.float16).view(torch.int16).tolist()] == [0x7E00] * 5
    noise = torch.full((5,), -1, dtype=torch.int32)
    assert all(stochastic(x, dtype, noise).isnan().all() for dtype in HALVES)


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_results_have_the_shape_of_x_whatever_its_strides(dtype: torch.dtype) -> None:
    x = torch.randn(6, 5, 4).transpose(0, 2)
    bits = Noise(0, 0, 0).bits(120).view(4, 5, 6)
    assert same_bits(cast(x, dtype), x.to(dtype).contiguous())
    assert same_bits(stochastic(x, dtype, bits), stochastic(x.contiguous(), dtype, bits))
    assert cast(torch.tensor(1.5), dtype).shape == ()
    assert cast(torch.zeros(0, 3), dtype).shape == (0, 3)


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_large_tensors_are_rounded_as_small_ones_are(dtype: torch.dtype) -> None:
    """Beyond 2^18 elements the work is cut in stretches."""
    x, bits = torch.randn(2**18 + 77), Noise(0, 1, 0).bits(2**18 + 77)
    assert same_bits(cast(x, dtype), x.to(dtype))
    tail = slice(2**18 - 5, None)
    assert same_bits(stochastic(x, dtype, bits)[tail], stochastic(x[tail], dtype, bits[tail]))


def all_rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded with each of the 65,536 noise values: [65536, numel] in fp64. The upper half of the bits is set, and must not matter."""
    noise = torch.arange(2**16, dtype=torch.int32)[:, None].expand(-1, x.numel()) | (0x5A5A << 16)
    return stochastic(x.expand(2**16, -1), dtype, noise).double()


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.bfloat16, -126, 127), (torch.float16, -14, 15)], ids=["bf16", "fp16"])
def test_the_mean_over_all_noise_is_the_number(dtype: torch.dtype, low: int, high: int) -> None:
    x = torch.cat([finite_numbers(100, low, high), torch.tensor([1.0 + 2**-23, 1.0 - 2**-24, 2.0**low])])
    assert torch.equal(all_rounded(x, dtype).mean(dim=0), x.double())


def test_the_mean_of_bf16_is_exact_in_fp32_subnormals_too() -> None:
    x = torch.tensor([1, 2, 3, 0xFFFF, 0x10001, 0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert torch.equal(all_rounded(torch.cat([x, -x]), torch.bfloat16).mean(dim=0), torch.cat([x, -x]).double())


def test_the_mean_of_fp16_subnormals_is_the_number_cut_off_at_2_to_the_minus_40() -> None:
    x = torch.cat([finite_numbers(80, -44, -14), torch.tensor([2.0**-40, 2.0**-41, 2.0**-14 - 2.0**-38])])
    kept = (x.double() * 2.0**40).trunc() * 2.0**-40
    assert torch.equal(all_rounded(x, torch.float16).mean(dim=0), kept)


@pytest.mark.parametrize("fmt", [FORMATS["bf16"], FORMATS["fp16"]], ids=name)
def test_rounding_by_chance_takes_one_of_the_two_neighbours(fmt: Format) -> None:
    assert fmt.dtype is not None
    x = finite_numbers(2**20, -24, 15).double()
    got = stochastic(x.float(), fmt.dtype, Noise(1, 1, 1).bits(x.numel())).double()
    distance = ulp(x, fmt)
    below = (x.abs() / distance).floor() * distance
    up = got.abs() == below + distance
    assert bool((up | (got.abs() == below)).all())
    assert bool((got.sign() * x.sign() >= 0).all())
    assert 0.3 < float(up.double().mean()) < 0.6


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_numbers_of_the_format_stay_whatever_the_noise(dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for noise in (0, 1, 0x7FFF, 0x8000, 0xFFFF, -1):
        got = stochastic(codes.float(), dtype, torch.full((2**16,), noise, dtype=torch.int32))
        assert same_bits(got, codes)


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_finite_numbers_stop_at_the_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    above = torch.tensor([largest, 65519.0, 65520.0, 1e38, 3.4e38, torch.finfo(torch.float32).max])
    above = above[above >= largest]
    x = torch.cat([above, -above])
    got = stochastic(x, dtype, torch.full(x.shape, 0xFFFF, dtype=torch.int32))
    assert torch.equal(got.float(), x.sign() * largest)
    infinite = torch.tensor([math.inf, -math.inf])
    assert torch.equal(stochastic(infinite, dtype, torch.zeros(2, dtype=torch.int32)).float(), infinite)


def test_other_dtypes_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ConfigError, match="fp32 tensors"):
        cast(x.double(), torch.bfloat16)
    with pytest.raises(ConfigError, match="fp32 tensors"):
        nearest(x.half(), FORMATS["fp16"])
    with pytest.raises(ConfigError, match="16-bit format"):
        cast(x, torch.float32)
    with pytest.raises(ConfigError, match="16-bit format"):
        stochastic(x, torch.float8_e5m2, torch.zeros(2, dtype=torch.int32))
