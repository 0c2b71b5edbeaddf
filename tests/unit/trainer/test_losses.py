"""Losses that are read from the device when somebody asks add up as if each had been read at once, also across a resumed run."""

import math
import random

import pytest
import torch

from halfstep.trainer.state import Losses


def values(seed: int, count: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn((), generator=made) * 10.0 ** (i % 7 - 3) for i in range(count)]


def summed(losses: list[torch.Tensor], begun: float = 0.0) -> float:
    for loss in losses:
        begun += loss.double().item()
    return begun


@pytest.mark.parametrize("count", [0, 1, 2, Losses.MOST - 1, Losses.MOST, Losses.MOST + 1, 3 * Losses.MOST + 5])
def test_the_sum_is_that_of_one_after_the_other(count: int) -> None:
    losses, given = Losses(), values(1, count)
    for loss in given:
        losses.add(loss)
    assert losses.sum == summed(given)
    assert losses.count == count
    assert losses.mean() == summed(given) / count if count else math.isnan(losses.mean())


@pytest.mark.parametrize("seed", range(5))
def test_whoever_asks_in_between_changes_no_bit(seed: int) -> None:
    chosen = random.Random(seed)
    asked, left = Losses(), Losses()
    for loss in values(seed, 2 * Losses.MOST):
        asked.add(loss)
        left.add(loss)
        if chosen.random() < 0.2:
            assert math.isfinite(asked.sum)
    assert asked.sum == left.sum


@pytest.mark.parametrize("at", [0, 1, 17, 255, 256, 300])
def test_a_resumed_sum_has_the_bits_of_an_unbroken_one(at: int) -> None:
    given = values(3, 300)
    whole, before = Losses(), Losses()
    for loss in given:
        whole.add(loss)
    for loss in given[:at]:
        before.add(loss)
    after = Losses(before.sum, before.count)
    for loss in given[at:]:
        after.add(loss)
    assert (after.sum, after.count) == (whole.sum, whole.count)


def test_a_step_without_a_loss_counts_for_nothing() -> None:
    losses = Losses()
    losses.add(None)
    losses.add(torch.tensor(2.0))
    assert (losses.sum, losses.count, losses.mean()) == (2.0, 1, 2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_shows_in_the_mean(bad: float) -> None:
    losses = Losses()
    for value in (1.0, bad, 2.0):
        losses.add(torch.tensor(value))
    assert str(losses.mean()) == str(bad)


def test_dtypes_may_differ_and_a_graph_is_not_kept() -> None:
    losses = Losses()
    weight = torch.ones((), requires_grad=True)
    for loss in (
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor(0.25, dtype=torch.float16),
        torch.tensor(0.1, dtype=torch.float64),
        weight * 2,
    ):
        losses.add(loss)
    assert losses.sum == 0.5 + 0.25 + 0.1 + 2.0


def test_a_sum_that_begins_with_numbers_of_a_checkpoint_is_theirs() -> None:
    assert (Losses(1.5, 3).sum, Losses(1.5, 3).mean()) == (1.5, 0.5)
