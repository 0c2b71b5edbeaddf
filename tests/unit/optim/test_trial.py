"""The trial that says whether buckets will do."""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from odd_optimizers import ById, Counting, Noisy, NormOfAll, Picky, Views, close, feed, tensors
from torch import optim

from halfstep.errors import ConfigError
from halfstep.optim.trial import tried
from halfstep.optim.wrap import wrap


@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD, Counting])
def test_optimizers_that_go_by_element_split(make: Callable[[Any], optim.Optimizer]) -> None:
    assert tried(make(tensors())).splits


@pytest.mark.parametrize("bound", [1.0, 100.0])
@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_a_norm_of_all_gradients_is_found_out(bound: float, lr: float) -> None:
    """Also one that only bounds large ones, and under a learning rate that a warm-up has set to 0."""
    trial = tried(NormOfAll(tensors(), bound, lr))
    assert not trial.splits
    assert trial.copies
    assert "act on each other" in trial.reason


def test_one_bucket_is_said_with_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    one, other = tensors(), tensors(torch.bfloat16)
    plain = NormOfAll(one)
    with caplog.at_level(logging.INFO, "halfstep"):
        wrapped = wrap(NormOfAll(other), weights="split", bucket_bytes=10)
    said = [r.getMessage() for r in caplog.records if "at once" in r.getMessage()]
    assert len(said) == 1
    assert f"{sum(p.numel() for p in other) * 8 / 2**20:.1f} MiB" in said[0]
    for step in range(3):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert wrapped.buckets == 1
    for p, q in zip(one, other, strict=True):
        assert close(p, q)
    assert len([r for r in caplog.records if "at once" in r.getMessage()]) == 1


def test_an_optimizer_that_fails_on_small_tensors_gets_one_bucket(caplog: pytest.LogCaptureFixture) -> None:
    held = tensors(torch.bfloat16, [(40, 5), (50,)])
    with caplog.at_level(logging.INFO, "halfstep"):
        wrapped = wrap(Picky(held), bucket_bytes=10)
    assert "could not be tried on small tensors: ValueError: too small to be cut in blocks" in caplog.text
    feed(held)
    before = [p.detach().clone() for p in held]
    wrapped.step()
    assert wrapped.buckets == 1
    assert not torch.equal(held[0], before[0])


def test_one_that_a_copy_cannot_stand_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="Views did not do what it does itself: its weights stay where they are"):
        wrap(Views(tensors(torch.bfloat16)))
    held = tensors()
    feed(held)
    wrapped = wrap(Views(held))  # nothing needs a copy
    before = held[0].detach().clone()
    wrapped.step()
    assert not torch.equal(held[0], before)
    with pytest.raises(ConfigError, match="did not do what it does itself"):
        wrapped.step(factor=0.5)


def test_tables_by_the_id_of_a_parameter_find_its_stand_in() -> None:
    one, other = tensors(), tensors(torch.bfloat16)
    plain, wrapped = ById(one), wrap(ById(other), bucket_bytes=1)
    for step in range(2):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    for p, q in zip(one, other, strict=True):
        assert close(p, q)


def test_the_trial_leaves_no_trace() -> None:
    held = tensors(torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    noisy = Noisy(held, generator)
    feed(held)
    before = ([p.detach().clone() for p in held], [p.grad for p in held], torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    drawn = generator.get_state()
    assert tried(noisy).splits
    assert all(torch.equal(p, q) for p, q in zip(held, before[0], strict=True))
    assert all(p.grad is g for p, g in zip(held, before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])
    assert random.getstate() == before[3]
    assert np.array_equal(np.random.get_state()[1], before[4])
    assert torch.equal(generator.get_state(), drawn)
    assert not noisy.state
    assert noisy.param_groups[0].keys() == {"params", "lr"}


def test_a_trial_begins_at_the_states_there_are() -> None:
    held = tensors()
    optimizer = optim.Adagrad(held, lr=0.1)  # makes its states with itself
    assert tried(optimizer).splits
    assert tried(optimizer).keys == ("sum",)
    feed(held)
    optimizer.step()
    kept = {k: v.clone() for k, v in optimizer.state[held[0]].items()}
    assert tried(optimizer).splits
    assert all(torch.equal(v, optimizer.state[held[0]][k]) for k, v in kept.items())
