"""`compare` of healthy models whose numbers are of other kinds (choices, complex numbers, losses near zero), and what it leaves behind."""

import pytest
import torch
from compare_models import Experts, Waves

from halfstep.diagnostics.compare import compare


@pytest.mark.parametrize(("seed", "rows"), [(0, 512), (3, 64), (13, 8)])
def test_choices_near_a_tie_may_fall_otherwise(seed, rows):
    torch.manual_seed(seed)
    found = compare(Experts(), [torch.randn(rows, 16)], "bf16-mixed", steps=2, seeds=1)
    assert found.alike, found


def test_a_module_that_gives_other_integers_is_named():
    found = compare(Experts(planted=True), [torch.randn(64, 16)], "bf16-mixed,products=native", steps=1, seeds=1)
    assert [(d.fault, d.module, d.what) for d in found.divergences] == [("error", "router", "its output 3")]


def test_complex_numbers_are_compared_as_what_they_are():
    found = compare(Waves(), [torch.randn(8, 16)], "bf16-mixed", steps=2, seeds=1)
    assert found.alike, found
    assert {d.module for d in found.damage} >= {"", "spectrum", "enter", "leave"}
    assert found.moved == pytest.approx(1, abs=0.05)
