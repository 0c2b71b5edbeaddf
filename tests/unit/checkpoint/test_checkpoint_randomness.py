"""Random states go into a checkpoint and come back, so that the numbers drawn afterwards are the same."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.checkpoint import capture, load, restore, save, seed_everything


def draw() -> list[object]:
    """Numbers from all three generators, with those that keep a second normal number in store."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        torch.nn.functional.dropout(torch.ones(20)).tolist(),
        torch.randperm(7).tolist(),
    ]


@pytest.fixture(autouse=True)
def _states_kept():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 5))
def test_restored_states_draw_the_same_numbers(seed: int, drawn_before: int) -> None:
    seed_everything(seed)
    for _ in range(drawn_before):
        draw()
    states = capture()
    expected = [draw(), draw()]
    seed_everything(seed + 1)
    draw()
    restore(states)
    assert [draw(), draw()] == expected


def test_states_survive_the_files_of_a_checkpoint(tmp_path) -> None:
    seed_everything(7)
    draw()
    save(tmp_path / "c", {"random": capture()})
    expected = draw()
    restore(load(tmp_path / "c").parts["random"])
    assert draw() == expected
    restore(load(tmp_path / "c").parts["random"])
    assert draw() == expected


def test_capturing_draws_nothing() -> None:
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    capture()
    assert draw() == expected


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40))
def test_one_seed_gives_one_sequence(seed: int) -> None:
    seed_everything(seed)
    first = draw()
    seed_everything(seed)
    assert draw() == first
    seed_everything(seed + 1)
    assert draw() != first
