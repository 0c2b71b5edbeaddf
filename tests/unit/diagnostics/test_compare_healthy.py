"""`compare` of healthy models whose numbers are of other kinds (choices, complex numbers, losses near zero), and what it leaves behind."""

import gc
import math

import pytest
import torch
from compare_models import Experts, Net, Waves, texts
from torch import nn
from torch.utils.data import DataLoader

from halfstep.amp.as_written import as_written
from halfstep.diagnostics.compare import compare
from halfstep.diagnostics.comparison import judged


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


@pytest.mark.parametrize(
    ("reference", "tested", "first", "verdict"),
    [
        ((1e-6,), (3e-6,), 2.0, "not judged"),
        ((1e-6, 1.1e-6, 0.9e-6), (3e-6, 3.1e-6, 2.9e-6), 2.0, "not judged"),
        ((1e-6,), (1e-6,), 2.0, "not told apart"),
        ((1e-6,), (3e-3,), 2.0, "higher"),  # 0.15 % of what there was to learn
        ((1e-6,), (3e-6,), 1e-3, "higher"),
        ((1e-6,), (3e-6,), math.nan, "higher"),
        ((1e-6,), (math.nan,), 2.0, "nonfinite"),
    ],
)
def test_what_is_left_of_a_batch_learnt_by_heart_is_not_judged(reference, tested, first, verdict):
    found = judged(reference, tested, 1e-9, first)
    assert found.verdict == verdict
    assert ("both below 0.1% of the loss at the start" in str(found)) is (verdict == "not judged")


def test_a_batch_that_is_learnt_by_heart_is_alike():
    y = torch.randn(8, 4)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=14.0)  # an eighth of the error is left after each step

    found = compare(
        nn.Linear(8, 4, bias=False), [torch.eye(8)], "bf16-mixed", steps=6, seeds=1, optimizer=sgd, loss=lambda o: (o - y).square().mean()
    )
    assert found.final.tested[0] > 1.5 * found.final.reference[0]
    assert str(found).startswith("alike, final loss not judged: ")


def test_a_simulation_ends_with_the_comparison():
    gc.disable()  # which would end it
    before = as_written._inside
    try:
        compare(Net(), texts(1), "simulate:e5m10", steps=1, seeds=1)
        assert as_written._inside == before
    finally:
        gc.enable()


def test_a_loader_that_draws_leaves_the_random_states_too():
    model, loader = nn.Linear(4, 1), DataLoader(torch.randn(8, 4), batch_size=2, shuffle=True)
    before = torch.get_rng_state()
    compare(model, loader, "bf16-mixed", steps=2, seeds=1, loss=lambda o: o.square().mean())
    assert torch.equal(before, torch.get_rng_state())
