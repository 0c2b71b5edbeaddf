"""Samples of like length together: in an order that is a function of (seed, epoch) and can be entered anywhere; workers that live on."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from halfstep.errors import DataError
from halfstep.trainer.columns import lengths_of
from halfstep.trainer.data import EpochBatches, by_length, default_data_collator, from_batch, make_loader

RNG = np.random.default_rng(0)
LENGTHS = [int(n) for n in RNG.integers(1, 200, 1000)]


def batches(epoch: int = 0, start: int = 0, seed: int = 3) -> list[list[int]]:
    made = EpochBatches(1000, 8, shuffle=True, seed=seed, drop_last=False, lengths=LENGTHS, grouped=8)
    made.epoch, made.start = epoch, start
    return list(made)


def test_every_sample_comes_once_and_batches_are_alike_in_length() -> None:
    found = batches()
    assert sorted(i for b in found for i in b) == list(range(1000))
    assert max(LENGTHS[i] for i in found[0]) == max(LENGTHS)
    padding = sum(max(LENGTHS[i] for i in b) * len(b) - sum(LENGTHS[i] for i in b) for b in found)
    plain = list(EpochBatches(1000, 8, shuffle=True, seed=3, drop_last=False))
    assert padding < 0.1 * sum(max(LENGTHS[i] for i in b) * len(b) - sum(LENGTHS[i] for i in b) for b in plain)


def test_the_order_is_a_function_of_seed_and_epoch_and_is_entered_anywhere() -> None:
    assert batches(2) == batches(2)
    assert batches(2) != batches(3)
    assert batches(2) != batches(2, seed=4)
    assert batches(2, start=17) == batches(2)[17:]


@pytest.mark.parametrize("samples", [1, 2, 5, 31, 33])
def test_little_data_is_grouped_too(samples: int) -> None:
    order = list(range(samples))
    random.Random(0).shuffle(order)
    found = by_length(order.copy(), LENGTHS, 8)
    assert sorted(found) == sorted(order)
    assert LENGTHS[found[0]] == max(LENGTHS[:samples])


def test_lengths_are_those_of_a_column_or_of_the_inputs() -> None:
    rows = [{"input_ids": [0] * n, "length": 10 - n} for n in (3, 1, 2)]
    assert lengths_of(rows, "length") == [7, 9, 8]
    assert lengths_of(rows, "other") == [3, 1, 2]
    with pytest.raises(DataError, match=r"neither a column 'length' nor 'input_ids' \(it has x, y\)"):
        lengths_of([{"x": 1, "y": 2}], "length")
    with pytest.raises(DataError, match=r"an iterable dataset has none"):
        make_loader(iter_only(), default_data_collator, batch_size=1, shuffle=False, seed=0, drop_last=False, workers=0, lengths=[1])


def iter_only() -> torch.utils.data.IterableDataset:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield {"x": 1}

    return Stream()


class Noisy(Dataset):
    """Each sample has a random number of each of the three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, float]:
        return {"i": i, "torch": torch.rand(()).item(), "numpy": float(np.random.random()), "python": random.random()}


def seen(persistent: bool, passes: list[tuple[int, int]]) -> list[list[list[float]]]:
    """The rows of each pass (epoch, first batch) over one loader."""
    loader = make_loader(Noisy(), default_data_collator, batch_size=3, shuffle=True, seed=5, drop_last=False, workers=2, persistent=persistent)
    found = [[torch.stack([v.double() for v in b.values()]).tolist() for b in from_batch(loader, epoch, start)] for epoch, start in passes]
    del loader
    return found


def test_workers_that_live_on_begin_each_pass_as_new_ones_do() -> None:
    lived = seen(True, [(0, 0), (1, 0), (2, 0)])
    assert lived[1] != lived[2]
    assert seen(True, [(2, 0)])[0] == lived[2]
    assert seen(True, [(2, 3)])[0] == lived[2][3:]
    new = seen(False, [(2, 0)])[0]
    assert [[row[0], row[1], row[3]] for row in new] == [[row[0], row[1], row[3]] for row in lived[2]]  # numpy is seeded by torch's own rule there
