"""Formats against torch's own account of them and against their enumerated codes."""

import math

import pytest
import torch

from halfstep.numerics import FORMATS, Format, ulp

WITH_DTYPE = [f for f in FORMATS.values() if f.dtype is not None]


def names(fmt: Format) -> str:
    return fmt.name


def positive_numbers(fmt: Format) -> torch.Tensor:
    """Every finite number of an 8- or 16-bit format from zero up, in fp64, decoded by torch."""
    assert fmt.dtype is not None
    width = torch.int8 if fmt.dtype.itemsize == 1 else torch.int16
    values = torch.arange(2 ** (8 * fmt.dtype.itemsize - 1)).to(width).view(fmt.dtype).double()
    return values[values.isfinite()]


SMALL = [f for f in WITH_DTYPE if f.dtype is not None and f.dtype.itemsize <= 2]


def test_the_formats_are_known_by_name() -> None:
    assert set(FORMATS) == {"fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2"}
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=names)
def test_limits_are_those_of_torch(fmt: Format) -> None:
    assert fmt.dtype is not None
    info = torch.finfo(fmt.dtype)
    assert (fmt.largest, fmt.smallest_normal, fmt.epsilon) == (info.max, info.tiny, info.eps)
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits


@pytest.mark.parametrize("fmt", SMALL, ids=names)
def test_limits_are_those_of_the_enumerated_codes(fmt: Format) -> None:
    values = positive_numbers(fmt)
    assert float(values[0]) == 0.0
    assert float(values[1]) == fmt.smallest_subnormal
    assert float(values[-1]) == fmt.largest
    assert float(values[values > 1][0]) == 1.0 + fmt.epsilon
    assert float(values[2**fmt.mantissa_bits]) == fmt.smallest_normal


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert (tf32.smallest_normal, tf32.epsilon) == (fp32.smallest_normal, fp16.epsilon)
    assert tf32.largest == fp32.largest - 2.0**127 * (fp16.epsilon - fp32.epsilon)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", SMALL, ids=names)
def test_ulp_is_the_distance_to_the_next_number(fmt: Format, dtype: torch.dtype) -> None:
    values = positive_numbers(fmt)
    found = ulp(values[:-1].to(dtype), fmt)
    assert found.dtype == dtype
    assert torch.equal(found.double(), values.diff())
    assert torch.equal(ulp(-values[:-1].to(dtype), fmt), found)


@pytest.mark.parametrize("fmt", SMALL, ids=names)
def test_ulp_between_two_numbers_is_that_of_the_lower_one(fmt: Format) -> None:
    values = positive_numbers(fmt)
    between = values[:-1] + values.diff() * 0.7
    assert torch.equal(ulp(between, fmt), values.diff())


def test_ulp_of_fp32_is_the_next_fp32_number() -> None:
    exponents = torch.arange(255, dtype=torch.int32) << 23
    x = torch.cat([exponents, exponents + 1, exponents + 0x7FFFFF]).view(torch.float32)
    x = x[x < FORMATS["fp32"].largest]
    following = (x.view(torch.int32) + 1).view(torch.float32)
    assert torch.equal(ulp(x, FORMATS["fp32"]).double(), following.double() - x.double())


def test_ulp_beyond_the_range_is_that_of_the_largest_number() -> None:
    fp16 = FORMATS["fp16"]
    found = ulp(torch.tensor([65504.0, 1e6, math.inf, -math.inf, math.nan]), fp16)
    assert found[:2].tolist() == [32.0, 32.0]
    assert found[2:].isnan().all()
