"""numpy's random state is captured as numpy gives it, however it has come about; that it is read anew only when it changed is not to be seen."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from halfstep.checkpoint import capture, restore


@pytest.fixture(autouse=True)
def _state_kept() -> Iterator[None]:
    bits, before = np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(before)


def same(a: Any, b: Any) -> bool:
    """Whether two random states, of nested dicts and arrays, are equal."""
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    return bool(np.array_equal(a, b))


def captured_as_it_is() -> dict[str, Any]:
    found = capture()["numpy"]
    assert same(found, np.random.get_state(legacy=False))
    return copy.deepcopy(found)


ACTS: dict[str, Callable[[], Any]] = {
    "normal": lambda: np.random.randn(),
    "two normals": lambda: np.random.randn(2),
    "uniform": lambda: np.random.rand(),
    "nothing": lambda: None,
    "integers": lambda: np.random.randint(0, 9, 3),
    "shuffle": lambda: np.random.permutation(5),
    "many": lambda: np.random.rand(700),
    "seed": lambda: np.random.seed(3),
    "a generator of one's own": lambda: np.random.default_rng(1).normal(),
}


@pytest.mark.parametrize("seed", range(12))
def test_after_anything_the_state_is_numpys(seed: int) -> None:
    """Draws, seeds, states put back, in any order, with and without a capture between."""
    chosen = random.Random(seed)
    np.random.seed(seed)
    kept = [captured_as_it_is()]
    for _ in range(60):
        if chosen.random() < 0.3:
            np.random.set_state(chosen.choice(kept))
        else:
            ACTS[chosen.choice(list(ACTS))]()
        if chosen.random() < 0.7:
            kept.append(captured_as_it_is())


def test_a_normal_number_that_waits_is_captured_where_nothing_else_differs() -> None:
    """Two legacy normals come from one draw: the state after the first and after the second differ in the number that waits alone."""
    np.random.seed(3)
    np.random.randn()
    first = captured_as_it_is()
    np.random.randn()
    second = captured_as_it_is()
    assert (first["has_gauss"], second["has_gauss"]) == (1, 0)
    assert same(first["state"], second["state"])
    for state in (first, second, first, first, second):
        np.random.set_state(state)
        assert captured_as_it_is()["has_gauss"] == state["has_gauss"]
    np.random.set_state(first | {"gauss": 0.25})
    assert captured_as_it_is()["gauss"] == 0.25


def test_a_restored_state_that_is_captured_again_draws_the_same_normals() -> None:
    np.random.seed(5)
    np.random.randn()
    begun = capture()
    expected = np.random.randn(5).tolist()
    restore(begun)
    np.random.randn()
    capture()
    restore(begun)
    again = capture()
    np.random.seed(0)
    restore(again)
    assert np.random.randn(5).tolist() == expected


def test_what_was_captured_is_not_written_to_by_what_comes_later() -> None:
    np.random.seed(1)
    one = capture()["numpy"]
    frozen = copy.deepcopy(one)
    np.random.rand(1000)
    capture()
    assert same(one, frozen)


def test_who_edits_a_captured_state_edits_no_other() -> None:
    np.random.seed(1)
    one = capture()["numpy"]
    one["state"]["key"][:] = 0
    one["has_gauss"] = 1
    captured_as_it_is()


@pytest.mark.parametrize("make", [np.random.PCG64, np.random.Philox, np.random.SFC64, np.random.MT19937], ids=lambda m: m.__name__)
def test_with_another_bit_generator_below_it_too(make: Callable[[int], Any]) -> None:
    np.random.seed(2)
    captured_as_it_is()
    np.random.set_bit_generator(make(7))
    states = []
    for name in ("normal", "uniform", "many", "nothing", "normal"):
        ACTS[name]()
        states.append(captured_as_it_is())
    begun = capture()
    expected = [*np.random.randn(3), *np.random.rand(3)]
    restore(begun)
    assert [*np.random.randn(3), *np.random.rand(3)] == expected
    assert not same(states[0], states[1])


def test_two_mersenne_twisters_in_turn_are_told_apart() -> None:
    one, other = np.random.MT19937(1), np.random.MT19937(1)
    np.random.set_bit_generator(one)
    np.random.randn()
    captured_as_it_is()
    np.random.set_bit_generator(other)
    captured_as_it_is()
    np.random.rand()
    captured_as_it_is()
    np.random.set_bit_generator(one)
    captured_as_it_is()
