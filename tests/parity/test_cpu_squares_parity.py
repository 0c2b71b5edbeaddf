"""The compiled sum of squares and largest magnitude against fp64 sums of torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'halfstep[cpu]'")
from halfstep.errors import ConfigError
from halfstep.kernels import cpu

FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_and_largest_agree_with_fp64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(size, generator=generator).mul_(100).to(dtype) for size in (0, 1, 7, 127, 129, 70000, 5000)]
    sums, largest = cpu.squares(tensors)
    assert (sums.dtype, largest.dtype) == (torch.float64, torch.float32)
    for t, total, most in zip(tensors, sums.tolist(), largest.tolist(), strict=True):
        assert total == pytest.approx(float(t.double().square().sum()), rel=1e-12)
        assert most == (float(t.abs().max()) if t.numel() else 0.0)


def test_every_16_bit_number_is_measured() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        sums, largest = cpu.squares(list(numbers.split(1)))
        expected = numbers.double().square()
        assert torch.equal(sums.isnan(), numbers.isnan())
        assert torch.equal(sums[~sums.isnan()], expected[~numbers.isnan()])
        assert torch.equal(largest[~sums.isnan()], numbers.float().abs()[~numbers.isnan()])
        assert bool(largest[sums.isnan()].isnan().all())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("place", [0, 511, 69999])
def test_inf_and_nan_come_through_from_anywhere(dtype: torch.dtype, place: int) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        t = torch.ones(70000, dtype=dtype)
        t[place] = bad
        sums, largest = cpu.squares([torch.ones(3, dtype=dtype), t])
        assert sums[0] == 3
        assert math.isnan(bad) == math.isnan(float(sums[1])) == math.isnan(float(largest[1]))
        assert not math.isfinite(float(sums[1]))
        assert not math.isfinite(float(largest[1]))


def test_squares_beyond_fp32_do_not_overflow() -> None:
    sums, largest = cpu.squares([torch.full((1000,), 1e30)])
    assert float(sums[0]) == pytest.approx(1e63, rel=1e-6)
    assert float(largest[0]) == pytest.approx(1e30, rel=1e-6)


def test_the_number_of_threads_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(size, generator=generator) for size in (300_001, 5, 90_000, 128)]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(cpu.squares(tensors))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_tensors_that_are_not_dense_are_measured_too() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    sums, largest = cpu.squares([base.t(), base[:, ::2], torch.ones(1).expand(5), base.t()[1]])
    assert sums.tolist() == [506.0, float(base[:, ::2].square().sum()), 5.0, 1.0 + 25.0 + 81.0]
    assert largest.tolist() == [11.0, 10.0, 1.0, 9.0]


def test_what_it_cannot_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        cpu.squares([torch.ones(3, dtype=torch.float64)])
    assert cpu.squares([])[0].shape == (0,)
