"""The clip coefficient is the one of torch's clip_grad_norm_, bit for bit, for every norm and every limit."""

import math

import numpy as np
import pytest
import torch

from halfstep.numerics import clip_factor


def torchs(total: float, max_norm: float) -> float:
    """As `torch.nn.utils.clip_grads_with_norm_` has it, on an fp32 norm."""
    return float(torch.clamp(max_norm / (torch.tensor(total, dtype=torch.float32) + 1e-6), max=1.0))


ODD = [0.0, 1e-45, 1e-40, 2.0**-126, 1e-7, 1e-6, 0.999999, 1.0, 1.0 + 2.0**-23, 1e6, 1e30, 3.4e38, 3.4028234663852886e38]


@pytest.mark.parametrize("max_norm", [*ODD, 0.1, 3.5e38, 1e39, 1e300, math.inf])
def test_odd_pairs(max_norm: float) -> None:
    for total in ODD:
        assert clip_factor(total, max_norm) == torchs(total, max_norm), total


@pytest.mark.parametrize("seed", range(4))
def test_random_pairs(seed: int) -> None:
    made = np.random.default_rng(seed)
    totals = 10.0 ** made.uniform(-45, 38.5, 1500)
    near = totals * made.uniform(0.5, 1.5, 1500)  # where the coefficient is about 1
    far = 10.0 ** made.uniform(-45, 39, 1500)
    for total, limits in zip(totals.tolist(), zip(near.tolist(), far.tolist(), strict=True), strict=True):
        for max_norm in limits:
            assert clip_factor(total, max_norm) == torchs(total, max_norm), (total, max_norm)


@pytest.mark.parametrize("total", [3.4028235e38, 3.4028235677973366e38, 2.0**128 - 2.0**103, 2.0**128 * (1 - 2.0**-53), 2.0**128, 1e200, 1.7e308])
def test_a_norm_beyond_fp32_clips_to_nothing_and_warns_of_nothing(total: float) -> None:
    """Such a norm, an fp64 one, rounds to inf in fp32, of which torch makes a coefficient of 0; an infinite limit clips nothing."""
    expected = torchs(min(total, 3.4028235677973366e38), 1.0) if total < 2.0**128 else 0.0
    assert clip_factor(total, 1.0) == expected
    assert clip_factor(total, 0.0) == 0.0


@pytest.mark.parametrize("total", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_clips_nothing(total: float) -> None:
    assert clip_factor(total, 1.0) == 1.0


def test_gradients_clipped_with_it_are_torchs_to_the_bit() -> None:
    for i in range(50):
        made = torch.Generator().manual_seed(i)
        p = torch.nn.Parameter(torch.zeros(37))
        p.grad = torch.randn(37, generator=made) * 10.0 ** (i % 11 - 5)
        ours = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([p], 0.7)
        assert torch.equal(ours * clip_factor(float(norm), 0.7), p.grad)
