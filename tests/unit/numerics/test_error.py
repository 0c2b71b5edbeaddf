"""Distances from a reference, counted by hand."""

import math
from dataclasses import astuple

import pytest
import torch

from halfstep.numerics import FORMATS, Error, error


def test_by_hand() -> None:
    found = error(torch.tensor([1.0, 2.5, 0.0]), torch.tensor([1.0, 2.0, 0.0]), FORMATS["fp16"])
    assert found == Error(0.5, 0.25, pytest.approx(0.5 / math.sqrt(5)), 0.5 / 2.0**-9)


def test_equal_tensors_have_no_error() -> None:
    x = torch.tensor([0.0, -1.5, math.inf, -math.inf, math.nan])
    assert astuple(error(x, x.clone())) == (0.0,) * 4
    assert astuple(error(torch.zeros(0), torch.zeros(0))) == (0.0,) * 4
    assert astuple(error(torch.tensor([-0.0]), torch.tensor([0.0]))) == (0.0,) * 4


@pytest.mark.parametrize(("got", "wanted"), [(math.inf, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, math.nan), (math.inf, -math.inf)])
def test_finite_beside_not_finite_is_infinitely_far(got: float, wanted: float) -> None:
    assert astuple(error(torch.tensor([got, 3.0]), torch.tensor([wanted, 3.0]))) == (math.inf,) * 4


def test_a_reference_of_zero() -> None:
    found = error(torch.tensor([1e-3, 1.0]), torch.tensor([0.0, 1.0]))
    assert found.largest_absolute == pytest.approx(1e-3)
    assert found.largest_relative == math.inf
    assert found.rms_relative == pytest.approx(1e-3)
    assert error(torch.ones(2), torch.zeros(2)).rms_relative == math.inf


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e4m3", "e5m2"])
def test_rounding_is_half_an_ulp_of_its_format(name: str) -> None:
    exact = torch.float64 if name == "fp32" else torch.float32  # torch rounds fp64 to narrower formats in two steps
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1), dtype=exact)
    dtype = FORMATS[name].dtype
    assert dtype is not None
    assert 0.45 < error(x.to(dtype), x).ulps <= 0.5


def test_ulps_of_another_format() -> None:
    x = torch.tensor([1.0 + 2.0**-10])
    assert error(x, torch.ones(1)).ulps == 2.0**13
    assert error(x, torch.ones(1), FORMATS["tf32"]).ulps == 1.0


def test_sums_do_not_overflow_and_differences_do_not_round() -> None:
    far = error(torch.tensor([3e38, 3e38]), torch.tensor([-3e38, 1.0]))
    assert far.largest_absolute == pytest.approx(6e38)
    near = error(torch.tensor([1.0 + 2.0**-40], dtype=torch.float64), torch.ones(1))
    assert near.largest_absolute == 2.0**-40
