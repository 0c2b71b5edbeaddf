"""Where elements stand in a narrower format, counted by hand."""

import math
from dataclasses import astuple

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.numerics import FORMATS, Format, Occupancy, occupancy

FP16 = FORMATS["fp16"]


def test_each_kind_is_counted_once() -> None:
    x = torch.tensor([0.0, -0.0, 1e-9, -(2.0**-25), 2.0**-24, -3e-5, 1.0, 65504.0, -65505.0, 1e6, math.inf, math.nan])
    n = 12
    assert occupancy(x, FP16) == Occupancy(2 / n, 2 / n, 2 / n, 2 / n, 2 / n, 2 / n)
    assert occupancy(x, FP16).finite == pytest.approx(8 / n)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_number_of_an_eight_bit_format_is_itself_in_a_wider_one(fmt: Format) -> None:
    """e5m2 has 256 codes: 2 zeros, 6 subnormal and 240 normal numbers, 2 infinities and 6 NaN."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e5m2).float()
    found = occupancy(codes, fmt)
    assert sum(astuple(found)) == pytest.approx(1.0)
    assert found.zeros == 2 / 256
    assert found.nonfinite == 8 / 256
    if fmt.name == "e5m2":
        assert (found.subnormals, found.normals, found.saturated, found.flushed) == (6 / 256, 240 / 256, 0.0, 0.0)
    if fmt.exponent_bits == 8:
        assert (found.subnormals, found.normals) == (0.0, 246 / 256)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_limits_of_a_format(fmt: Format) -> None:
    x = torch.tensor([fmt.largest, fmt.smallest_normal, fmt.smallest_subnormal, -fmt.largest])
    assert occupancy(x, fmt) == Occupancy(0.0, 0.0, 0.25, 0.75, 0.0, 0.0)


def test_scaling_moves_gradients_out_of_the_flushed() -> None:
    gradients = 1e-8 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    before, after = occupancy(gradients, FP16), occupancy(gradients * 2.0**16, FP16)
    assert before.flushed > 0.9
    assert after.flushed < 0.001
    assert after.normals > 0.8


def test_shape_does_not_matter_and_nothing_is_nothing() -> None:
    x = torch.randn(6, 7).t() * 1e-5
    assert occupancy(x, FP16) == occupancy(x.reshape(-1), FP16)
    assert astuple(occupancy(torch.zeros(0, 3), FP16)) == (0.0,) * 6


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp32 tensors"):
        occupancy(torch.ones(3, dtype=torch.float64), FP16)
