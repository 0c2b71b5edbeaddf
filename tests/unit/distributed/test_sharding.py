"""Batches dealt out to ranks: every sample once, and what is doubled to fill the last round is told."""

from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from halfstep.distributed import BatchShard, IterableShard, Solo


class Rank(Solo):
    """One of several ranks, which nobody else is needed for."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world  # type: ignore[misc]


@pytest.mark.parametrize("samples", [16, 17, 23, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_batches_are_dealt_out_in_rounds(samples: int, world: int) -> None:
    shards = [BatchShard(BatchSampler(SequentialSampler(range(samples)), 4, False), Rank(rank, world)) for rank in range(world)]
    dealt = [list(shard) for shard in shards]
    assert {len(batches) for batches in dealt} == {len(shards[0])}
    assert all(len(batch) == 4 for batches in dealt for batch in batches)
    flat = [sample for round_ in zip(*dealt, strict=True) for batch in round_ for sample in batch]
    assert flat[:samples] == list(range(samples))
    last = samples - (len(shards[0]) - 1) * 4 * world
    assert shards[0].round_samples == (last if len(flat) > samples else None)


@pytest.mark.parametrize(("even", "drop", "kept"), [(False, False, 23), (True, True, 16)])
def test_without_filling_no_sample_comes_twice(even: bool, drop: bool, kept: int) -> None:
    dealt = [list(BatchShard(BatchSampler(SequentialSampler(range(23)), 4, drop), Rank(rank, 2), even)) for rank in range(2)]
    assert sorted(sample for batches in dealt for batch in batches for sample in batch) == list(range(kept))


def test_a_stream_is_dealt_out_in_blocks() -> None:
    def parts(**how: Any) -> list[list[int]]:
        return [list(IterableShard(range(11), Rank(rank, 2), 3, **how)) for rank in range(2)]

    assert parts(drop_last=False) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 0]]
    assert parts(drop_last=True) == [[0, 1, 2], [3, 4, 5]]
    assert parts(drop_last=False, even=False) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10]]
