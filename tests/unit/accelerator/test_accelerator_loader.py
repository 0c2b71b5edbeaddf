"""Prepared data loaders give the inner loader's batches, on the device, and say which is the last."""

import collections
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from halfstep import Accelerator
from halfstep.accelerator import PreparedLoader, to_device
from halfstep.errors import DataError

CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_batches_and_length_are_those_of_the_inner_loader_and_only_the_last_is_at_the_end(samples: int, size: int, drop: bool) -> None:
    inner = DataLoader(torch.arange(samples), batch_size=size, drop_last=drop)
    loader = Accelerator(cpu=True).prepare(inner)
    assert len(loader) == len(inner)
    expected = [b.tolist() for b in inner]
    if not expected:
        return
    for _ in range(2):  # every pass anew
        seen = [(batch.tolist(), loader.at_end) for batch in loader]
        assert [b for b, _ in seen] == expected
        assert [end for _, end in seen] == [False] * (len(expected) - 1) + [True]
        assert not loader.at_end


def test_a_pass_that_is_left_early_leaves_no_end_behind() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(4), batch_size=2))
    for batch in loader:
        if loader.at_end:
            assert batch.tolist() == [2, 3]
            break
    assert not loader.at_end
    assert next(iter(loader)).tolist() == [0, 1]


def test_other_attributes_are_those_of_the_inner_loader() -> None:
    inner = DataLoader(torch.arange(4), batch_size=2)
    loader = Accelerator(cpu=True).prepare(inner)
    assert loader.batch_size == 2
    assert loader.dataset is inner.dataset
    with pytest.raises(AttributeError):
        _ = loader.nothing_of_this_name


def test_an_empty_loader_names_drop_last() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(3), batch_size=4, drop_last=True))
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    assert caught.value.cause == "the data loader yields nothing"
    assert caught.value.remedy == "Its dataset has 3 samples, fewer than one batch of 4, and drop_last=True: use a smaller batch."


def test_an_empty_dataset_is_said_to_be_empty() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader([], batch_size=4))
    with pytest.raises(DataError, match="Its dataset has 0 samples: check the path and the filters"):
        list(loader)


class Numbers(IterableDataset):
    def __init__(self, source: object) -> None:
        self.source = source

    def __iter__(self) -> object:
        return iter(self.source)


def test_iterable_data_works_and_a_spent_generator_is_explained() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Numbers(i for i in range(5)), batch_size=2))
    assert [(b.tolist(), loader.at_end) for b in loader] == [([0, 1], False), ([2, 3], False), ([4], True)]
    with pytest.raises(TypeError):
        len(loader)
    with pytest.raises(DataError, match="a generator is spent after one pass"):
        list(loader)


def test_an_error_of_the_data_comes_through_as_it_is() -> None:
    def broken() -> object:
        yield 1
        raise OSError("disk gone")

    loader = Accelerator(cpu=True).prepare(DataLoader(Numbers(broken()), batch_size=1))
    with pytest.raises(OSError, match="disk gone"):
        list(loader)


def test_one_batch_is_read_ahead_and_no_more() -> None:
    read: list[int] = []

    def counted() -> object:
        for i in range(5):
            read.append(i)
            yield torch.tensor(i)

    batches = iter(PreparedLoader(counted(), CPU))
    next(batches)
    assert read == [0, 1]


# --- moving batches -------------------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", "x y")


class Asked:
    """Has a `.to` of its own, as tokenizers' BatchEncoding has."""

    def __init__(self) -> None:
        self.device: object = None

    def to(self, device: torch.device) -> "Asked":
        self.device = device
        return self


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.builds(lambda n: torch.arange(n), st.integers(0, 3))
batches = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def flat(value: object) -> list[object]:
    """Every leaf and container type of a batch, in order."""
    if isinstance(value, dict):
        return [type(value), *itertools.chain.from_iterable([k, *flat(v)] for k, v in value.items())]
    if isinstance(value, list | tuple):
        return [type(value), *itertools.chain.from_iterable(flat(v) for v in value)]
    return [(value.device.type, value.tolist()) if torch.is_tensor(value) else value]


@settings(max_examples=60, deadline=None)
@given(batches)
def test_moving_to_where_it_is_changes_nothing(batch: object) -> None:
    assert flat(to_device(batch, CPU)) == flat(batch)


def test_every_tensor_is_moved_and_nothing_else_is_touched() -> None:
    marker = object()
    batch = {"a": [torch.ones(2), "text"], "b": Point(torch.zeros(1), 3), "c": (marker, None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"].x.device.type == "meta"
    assert moved["a"][1] == "text"
    assert moved["b"].y == 3
    assert moved["c"] == (marker, None)
    assert batch["a"][0].device.type == "cpu"


def test_an_object_with_its_own_move_is_asked() -> None:
    asked = Asked()
    assert to_device([asked], CPU)[0] is asked
    assert asked.device == CPU


def test_an_object_with_other_attributes_is_left_alone() -> None:
    thing = SimpleNamespace(to="a destination")
    assert to_device(thing, CPU) is thing
