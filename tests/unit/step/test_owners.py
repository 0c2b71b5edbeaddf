"""What is kept by owner is found by identity, in the order of meeting, and goes when the owner goes."""

import gc
from typing import Any

import pytest

from halfstep.step.owners import ByOwner


class Owner:
    """Equal to every other, so that only identity tells them apart."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner)

    def __hash__(self) -> int:
        return 1


def test_owners_are_told_apart_by_identity_and_come_in_the_order_of_meeting() -> None:
    kept: ByOwner[int] = ByOwner()
    owners = [Owner() for _ in range(4)]
    assert [kept.put(owner, number) for number, owner in enumerate(owners)] == [0, 1, 2, 3]
    assert [kept.get(owner) for owner in owners] == [0, 1, 2, 3]
    assert kept.get(Owner()) is None
    assert all(a is b for a, b in zip(kept.owners(), owners, strict=True))
    assert kept.values() == [0, 1, 2, 3]
    assert [value for _, value in kept.items()] == [0, 1, 2, 3]
    kept.put(owners[0], 7)
    kept.drop(owners[2])
    kept.drop(owners[2])
    assert kept.values() == [7, 1, 3]
    assert kept.get(owners[2]) is None


@pytest.mark.parametrize("in_a_circle", [False, True])
def test_what_is_kept_goes_with_its_owner(in_a_circle: bool) -> None:
    kept: ByOwner[int] = ByOwner()
    stays, goes = Owner(), Owner()
    if in_a_circle:
        goes.itself = goes  # type: ignore[attr-defined]
    kept.put(stays, 1)
    kept.put(goes, 2)
    del goes
    gc.collect()
    assert kept.values() == [1]
    assert len(kept.owners()) == 1


def test_a_new_owner_at_the_address_of_a_dead_one_has_nothing_of_it() -> None:
    kept: ByOwner[int] = ByOwner()
    for number in range(200):
        owner = Owner()
        assert kept.get(owner) is None
        kept.put(owner, number)
        del owner
    assert kept.values() == []


def test_an_owner_that_dies_after_its_value_was_replaced_takes_the_new_value_along() -> None:
    kept: ByOwner[Any] = ByOwner()
    owner = Owner()
    kept.put(owner, "old")
    kept.put(owner, "new")
    assert kept.values() == ["new"]
    del owner
    assert kept.values() == []


def test_an_id_that_is_given_out_again_is_another_owner() -> None:
    """In a copy of the table, whose entries stay when their owner goes."""
    kept: ByOwner[int] = ByOwner()
    gone, new = Owner(), Owner()
    kept.put(gone, 1)
    kept._kept[id(new)] = kept._kept.pop(id(gone))  # as if `new` had the id of `gone`
    assert kept.get(new) is None
