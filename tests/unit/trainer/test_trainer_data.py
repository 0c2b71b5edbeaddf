"""The order of the data is a function of (seed, epoch); batches are tensors by name; other columns and shapes are explained."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from halfstep.errors import DataError
from halfstep.trainer.columns import taken_columns
from halfstep.trainer.data import ColumnFilter, EpochBatches, default_data_collator, from_batch, make_loader

sizes = st.integers(1, 30)


def order(samples: int, size: int, *, epoch: int = 0, start: int = 0, seed: int = 0, shuffle: bool = True, drop: bool = False) -> list[list[int]]:
    batches = EpochBatches(samples, size, shuffle=shuffle, seed=seed, drop_last=drop)
    batches.epoch, batches.start = epoch, start
    return list(batches)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 8), st.integers(0, 5), st.integers(0, 9), st.booleans())
def test_every_pass_has_every_sample_once(samples: int, size: int, epoch: int, seed: int, shuffle: bool) -> None:
    batches = order(samples, size, epoch=epoch, seed=seed, shuffle=shuffle)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(samples))
    assert len(batches) == len(EpochBatches(samples, size, shuffle=shuffle, seed=seed, drop_last=False))
    assert {len(b) for b in batches[:-1]} <= {size}
    whole = order(samples, size, epoch=epoch, seed=seed, shuffle=shuffle, drop=True)
    assert whole == [b for b in batches if len(b) == size]


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 8), st.integers(0, 5), st.integers(0, 9), st.data())
def test_a_pass_entered_in_the_middle_goes_on_with_the_same_batches(samples: int, size: int, epoch: int, seed: int, data: st.DataObject) -> None:
    batches = order(samples, size, epoch=epoch, seed=seed)
    start = data.draw(st.integers(0, len(batches)))
    torch.manual_seed(data.draw(st.integers(0, 99)))  # torch's own state is no part of it
    assert order(samples, size, epoch=epoch, seed=seed, start=start) == batches[start:]


def test_passes_and_seeds_differ() -> None:
    shuffled = [order(20, 5, epoch=e, seed=s) for e, s in ((0, 0), (1, 0), (0, 5))]
    assert shuffled[0] != shuffled[1] != shuffled[2] != shuffled[0]
    assert order(4, 2, shuffle=False) == [[0, 1], [2, 3]]


def column(count: int) -> list[dict]:
    return [{"x": torch.tensor([float(i)])} for i in range(count)]


def loader(dataset: object, size: int = 4, *, shuffle: bool = True, drop: bool = False) -> DataLoader:
    return make_loader(dataset, default_data_collator, batch_size=size, shuffle=shuffle, seed=1, drop_last=drop, workers=0)


def test_iterating_a_loader_leaves_torchs_random_state_alone() -> None:
    made = loader(column(10))
    before = torch.get_rng_state()
    list(made)
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 3), st.data())
def test_every_kind_of_loader_can_be_entered_in_the_middle(samples: int, size: int, epoch: int, data: st.DataObject) -> None:
    for made in (loader(column(samples), size), loader(Stream(samples), size), DataLoader(column(samples), batch_size=size)):
        whole = [b["x"].flatten().tolist() for b in from_batch(made, epoch, 0)]
        start = data.draw(st.integers(0, len(whole)))
        assert [b["x"].flatten().tolist() for b in from_batch(made, epoch, start)] == whole[start:]
        assert [b["x"].flatten().tolist() for b in from_batch(made, epoch, 0)] == whole, "the start does not stick"


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> object:
        return iter(column(self.count))


def test_a_sampler_of_ones_own_is_told_the_epoch() -> None:
    class Own(torch.utils.data.Sampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> object:
            return iter([self.epoch, 0])

        def __len__(self) -> int:
            return 2

    made = DataLoader(column(9), batch_size=2, sampler=Own())
    assert next(from_batch(made, 7, 0))["x"].flatten().tolist() == [7.0, 0.0]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match=r"the dataset has no samples. Check the path and the filters"):
        loader([])


def test_drop_last_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(DataError, match=r"3 samples, fewer than one batch of 4, and dataloader_drop_last=True .*Use a smaller batch, or"):
        loader(column(3), drop=True)
    assert len(loader(column(4), drop=True)) == 1


# --- collation ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["tensor", "array", "list", "numbers"]), st.integers(1, 4), st.integers(1, 3))
def test_tensors_arrays_lists_and_numbers_are_stacked(kind: str, count: int, width: int) -> None:
    values = torch.randn(count, width)
    make = {"tensor": lambda v: v, "array": lambda v: v.numpy(), "list": lambda v: v.tolist(), "numbers": lambda v: float(v[0])}[kind]
    batch = default_data_collator([{"x": make(v)} for v in values])
    assert torch.equal(batch["x"], values[:, 0] if kind == "numbers" else values)
    assert batch["x"].dtype == torch.float32


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
def test_every_spelling_of_labels_becomes_labels(name: str) -> None:
    batch = default_data_collator([{"x": 1.0, name: 2}, {"x": 1.0, name: 3}])
    assert batch["labels"].tolist() == [2, 3]
    assert batch["labels"].dtype == torch.int64
    assert set(batch) == {"x", "labels"}


def test_dtypes_are_kept_except_that_python_floats_become_fp32() -> None:
    sample = {
        "half": torch.ones(2, dtype=torch.bfloat16),
        "mask": np.array([True]),
        "ids": np.array([1], dtype=np.int32),
        "f": 0.5,
        "d": np.float64(1),
    }
    batch = default_data_collator([sample, sample])
    assert {k: v.dtype for k, v in batch.items()} == {
        "half": torch.bfloat16,
        "mask": torch.bool,
        "ids": torch.int32,
        "f": torch.float32,
        "d": torch.float32,
    }


def test_columns_of_text_and_nothing_are_left_out() -> None:
    assert set(default_data_collator([{"x": 1, "text": "a", "words": ["a", "b"], "none": None}])) == {"x"}


def test_samples_that_are_not_mappings_are_refused_with_what_to_give() -> None:
    with pytest.raises(DataError) as caught:
        default_data_collator([(torch.ones(2), 1)])
    assert caught.value.cause == "the dataset gives samples of type tuple, and the model needs named inputs"
    assert "{'input_ids': ..., 'labels': ...}" in caught.value.remedy
    assert "data_collator" in caught.value.remedy


@pytest.mark.parametrize(("first", "second"), [([1, 2], [1, 2, 3]), (torch.ones(2), torch.ones(3)), ([[1], [2, 3]], [[1], [2, 3]])])
def test_lengths_that_differ_are_refused_by_column(first: object, second: object) -> None:
    with pytest.raises(
        DataError, match=r"the column 'ids' cannot be stacked into one tensor: .*Pad the samples to one length, or pass a data_collator"
    ):
        default_data_collator([{"ids": first}, {"ids": second}])


def test_a_sample_without_a_column_is_refused_by_column() -> None:
    with pytest.raises(DataError, match="ids"):
        default_data_collator([{"x": 1, "ids": 2}, {"x": 1}])


# --- columns --------------------------------------------------------------------------------------------------------------


class Takes(nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> None: ...


class TakesAll(nn.Module):
    def forward(self, **inputs: torch.Tensor) -> None: ...


def test_columns_that_the_model_does_not_take_are_dropped() -> None:
    features = [{"x": 1.0, "idx": 7, "label": 0, "text": "a"}] * 2
    assert set(ColumnFilter(default_data_collator, taken_columns(Takes(), ("labels",)))(features)) == {"x", "labels"}
    assert set(ColumnFilter(default_data_collator, taken_columns(TakesAll(), ("labels",)))(features)) == {"x", "idx", "labels"}
    assert set(ColumnFilter(default_data_collator, taken_columns(Takes(), ("idx",)))(features)) == {"x", "idx", "labels"}


def test_columns_of_which_the_model_takes_none_are_refused_with_the_nearest() -> None:
    class Ids(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> None: ...

    with pytest.raises(DataError) as caught:
        ColumnFilter(default_data_collator, taken_columns(Ids(), ("labels",)))([{"input_id": 1, "labels": 2}])
    assert "the columns input_id, labels are not inputs of the model's forward (input_ids)" in caught.value.cause
    assert "Did you mean 'input_ids'?" in caught.value.remedy
    assert "remove_unused_columns=False" in caught.value.remedy


def test_samples_that_are_not_mappings_go_to_the_collator() -> None:
    assert ColumnFilter(lambda f: {"x": torch.tensor(f)}, taken_columns(Takes(), ("labels",)))([1, 2])["x"].tolist() == [1, 2]


class Several(torch.utils.data.Dataset[dict[str, int]]):
    """Gives the samples of a batch at once, as datasets of the Hub do."""

    def __len__(self) -> int:
        return 11

    def __getitems__(self, numbers: list[int]) -> list[dict[str, int]]:
        return [{"x": n, "at_once": 1} for n in numbers]


class Faulty(list[dict[str, int]]):
    """Its seventh sample cannot be read."""

    def __getitem__(self, number: object) -> dict[str, int]:  # type: ignore[override]
        if number == 7:
            raise OSError("sample 7")
        return super().__getitem__(number)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("data", [[{"x": n} for n in range(11)], Several()], ids=["one by one", "at once"])
def test_batches_made_here_are_those_of_torchs_own_iterator(data: object, start: int) -> None:
    def make() -> DataLoader[object]:
        return make_loader(data, default_data_collator, batch_size=3, shuffle=True, seed=4, drop_last=False, workers=0)

    loader, theirs = make(), make()
    theirs.batch_sampler.start = start  # type: ignore[union-attr]
    state = torch.get_rng_state()
    found, expected = list(from_batch(loader, 0, start)), list(theirs)
    assert torch.equal(torch.get_rng_state(), state), "torch's own iterator draws from the loader's generator"
    assert len(found) == len(expected) == 4 - start
    for ours, other in zip(found, expected, strict=True):
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[k], other[k]) for k in ours)


def test_what_reading_a_sample_raises_comes_through() -> None:
    data = Faulty({"x": n} for n in range(11))
    loader = make_loader(data, default_data_collator, batch_size=3, shuffle=False, seed=0, drop_last=False, workers=0)
    batches = from_batch(loader, 0, 0)
    assert len(list(itertools.islice(batches, 2))) == 2
    with pytest.raises(OSError, match="sample 7"):
        next(batches)


@pytest.mark.parametrize("columns", [("x",), ("x", "text"), ("text", "labels", "x")])
def test_columns_that_are_taken_go_on_as_they_are_and_others_do_not(columns: tuple[str, ...]) -> None:
    seen: list[object] = []
    samples = [dict.fromkeys(columns, n) for n in range(3)] + [{"x": 3, "more": 0}]
    ColumnFilter(lambda rows: seen.extend(rows) or {}, {"x", "labels"})(samples)
    assert seen == [{k: v for k, v in sample.items() if k in ("x", "labels")} for sample in samples]


def test_a_collator_that_changes_its_samples_changes_no_dataset() -> None:
    samples = [{"x": n, "labels": n} for n in range(3)]
    ColumnFilter(lambda rows: {"labels": [row.pop("labels") for row in rows]}, {"x", "labels"})(samples)
    assert samples == [{"x": n, "labels": n} for n in range(3)]
