"""Are gradients fit? The verdict against a plain reading of every element."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfstep.step.verdict import LARGEST_GRADIENT, NAMED, judge

quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)
ELEMENTS = st.sampled_from([0.0, -1.0, 3.5, 1e-6, 1e10, 1e18, 2.0**59, -(2.0**60), 2.0**61, 1e21, -1e25, math.inf, -math.inf, math.nan])
LOSSES = st.sampled_from([None, 0.0, -3.5, 1e30, math.inf, -math.inf, math.nan])


def named(index: int) -> str:
    return f"g{index}"


def is_bad(element: float, scale: float) -> bool:
    return not abs(element) / scale <= LARGEST_GRADIENT


@quick
@given(st.lists(st.lists(ELEMENTS, min_size=1, max_size=5), min_size=1, max_size=5), LOSSES, st.sampled_from([1.0, 1024.0, 2.0**32]))
def test_a_verdict_says_what_an_element_by_element_reading_says(lists: list[list[float]], loss: float | None, scale: float) -> None:
    gradients = [torch.tensor(elements) for elements in lists]
    verdict = judge(gradients, scale, None if loss is None else torch.tensor(loss), named)
    loss_finite = loss is None or math.isfinite(loss)
    blamed = {named(i) for i, g in enumerate(gradients) if any(is_bad(float(e), scale) for e in g)}
    assert verdict.loss_finite == loss_finite
    assert verdict.fit == (loss_finite and not blamed)
    assert {c.name for c in verdict.culprits} == blamed | (set() if loss_finite else {"loss"})
    assert all(c.direction == ("forward" if c.name == "loss" else "backward") for c in verdict.culprits)
    total = float(torch.linalg.vector_norm(torch.cat(gradients).double())) / scale
    assert verdict.norm == pytest.approx(total, rel=1e-6, nan_ok=True)


@quick
@given(st.lists(st.lists(ELEMENTS, min_size=1, max_size=5), min_size=2, max_size=5))
def test_culprits_tell_the_worst_value_of_each_gradient(lists: list[list[float]]) -> None:
    gradients = [torch.tensor(elements) for elements in lists]
    for culprit in judge(gradients, 1.0, None, named).culprits:
        expected = float(gradients[int(culprit.name[1:])].abs().max())
        assert culprit.value == expected or (math.isnan(culprit.value) and math.isnan(expected))


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize(("element", "fit"), [(2.0**59, True), (2.0**60, True), (math.nextafter(2.0**60, math.inf) * 1.001, False), (1e21, False)])
def test_the_limit_is_2_60_of_the_unscaled_element(element: float, fit: bool, scale: float) -> None:
    assert judge([torch.tensor([1.0, element * scale])], scale, None, named).fit == fit


def test_many_large_elements_are_no_single_too_large_one() -> None:
    """Their norm is above 2^60 and its squares overflow fp32, yet each may be used."""
    verdict = judge([torch.full((64,), 2.0**59)], 1.0, None, named)
    assert verdict.fit
    assert verdict.norm == 2.0**62
    assert verdict.culprits == ()


def test_culprits_come_worst_first() -> None:
    gradients = [torch.tensor([v]) for v in (1.0, 1e21, 1e25, math.inf, 1e23)]
    assert [c.name for c in judge(gradients, 1.0, None, named).culprits] == ["g3", "g2", "g4", "g1"]


def test_not_more_than_a_handful_are_named_and_the_worst_among_them() -> None:
    gradients = [torch.tensor([v]) for v in [1e21] * (NAMED + 4) + [math.inf]]
    culprits = judge(gradients, 1.0, torch.tensor(1.0), named).culprits
    assert len(culprits) == NAMED
    assert math.inf in [c.value for c in culprits]


def test_culprits_read_well() -> None:
    (culprit,) = judge([torch.tensor([math.inf])], 1.0, None, named).culprits
    assert str(culprit) == "g0 (backward: inf)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_formats_are_judged_too(dtype: torch.dtype) -> None:
    good: list[Tensor] = [torch.ones(3, dtype=dtype)]
    bad = [torch.ones(3, dtype=dtype), torch.tensor([1.0, math.nan], dtype=dtype)]
    assert judge(good, 1.0, None, named).fit
    assert [c.name for c in judge(bad, 1.0, None, named).culprits] == ["g1"]


def test_opposite_infinities_at_one_sparse_index_are_seen() -> None:
    """Their sum is NaN, and the sum is what the optimizer would add."""
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([math.inf, -math.inf]), (3,), check_invariants=True)
    (culprit,) = judge([gradient], 1.0, None, named).culprits
    assert math.isnan(culprit.value)
