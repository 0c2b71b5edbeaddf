"""The batches of one rank: a data loader's batches dealt out in rounds, none lost, and what is doubled to fill the last round told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from halfstep.distributed.ranks import Ranks
from halfstep.errors import ConfigError


class BatchShard(Sampler[list[int]]):
    """Of the batches of `batches`, every world-th, beginning with the rank's own: the batches of a round are on the ranks at the same time.

    The random states in which a pass begins are those of rank 0 on every rank, so that all deal out the same order, the one that rank 0 would have by
    itself. even: a last round that is not full is filled with samples from the beginning of the pass, so that every rank has as many batches of the
    same size; `round_samples` says then how many samples of the round are its own. Without it the last ranks have fewer. A `batches` that drops its
    last, smaller batch drops a last round that is not full too.
    """

    def __init__(self, batches: Any, ranks: Ranks, even: bool = True) -> None:
        self.batches, self.ranks, self.even = batches, ranks, even
        self.batch_size, self.drop_last = getattr(batches, "batch_size", None), bool(getattr(batches, "drop_last", False))
        self.sampler, self.generator = getattr(batches, "sampler", None), getattr(batches, "generator", None)  # what draws the order
        self.round_samples: int | None = None  # of the last round, if it was filled

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batches), self.ranks.world)
        if self.drop_last or not rest:
            return whole
        return whole + (self.even or self.ranks.rank < rest)

    def __iter__(self) -> Iterator[list[int]]:
        self.round_samples = None
        world, rank, size = self.ranks.world, self.ranks.rank, self.batch_size
        beginning: list[list[int]] = []  # batches of the first round
        batches = self._started()
        while dealt := list(itertools.islice(batches, world)):
            beginning = beginning or dealt
            whole = len(dealt) == world and (size is None or len(dealt[-1]) == size)
            if not whole and self.drop_last:
                return
            if not whole and self.even:
                self.round_samples = sum(map(len, dealt))
                dealt = _filled(dealt, beginning, world, size)
            if rank < len(dealt):
                yield dealt[rank]

    def _started(self) -> Iterator[list[int]]:
        """The batches of all ranks; what is drawn when their order is made is drawn from the random states of rank 0."""
        generators = [g for g in (self.generator, getattr(self.sampler, "generator", None)) if isinstance(g, torch.Generator)]
        states = self.ranks.broadcast_object((_states(), [g.get_state() for g in generators]))
        for generator, state in zip(generators, states[1], strict=True):
            generator.set_state(state)
        with _under(states[0], keep=self.ranks.is_main):
            iterator = iter(self.batches)
            first = list(itertools.islice(iterator, 1))
        return itertools.chain(first, iterator)

    def set_epoch(self, epoch: int) -> None:
        """Tell a sampler inside that has a set_epoch of its own."""
        for inner in (self.batches, self.sampler):
            tell: Any = getattr(inner, "set_epoch", None)
            if tell is not None:
                tell(epoch)


def _filled(dealt: list[list[int]], beginning: list[list[int]], world: int, size: int | None) -> list[list[int]]:
    """A round of `world` batches: what is there, then samples from the beginning of the pass, over and over if need be."""
    if size is None:
        return dealt + list(itertools.islice(itertools.cycle(beginning), world - len(dealt)))
    samples = itertools.chain(itertools.chain.from_iterable(dealt), itertools.cycle(itertools.chain.from_iterable(beginning)))
    return [list(itertools.islice(samples, size)) for _ in range(world)]


class IterableShard(IterableDataset[Any]):
    """Of the samples of an iterable dataset, the same on every rank, those of one: of each world x batch_size in a row a block of batch_size.

    even: the last block is filled with samples from the beginning; drop_last leaves it out instead. Every rank reads all samples.
    """

    def __init__(self, dataset: Any, ranks: Ranks, batch_size: int, drop_last: bool, even: bool = True) -> None:
        self.dataset, self.rank, self.world = dataset, ranks.rank, ranks.world
        self.batch_size, self.drop_last, self.even = batch_size, drop_last, even
        self.round_samples: int | None = None  # of the last round, if it was filled; known where no worker processes read

    def set_epoch(self, epoch: int) -> None:
        """Tell a dataset that has a set_epoch of its own."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        samples, size = len(self.dataset), self.batch_size * self.world  # without a length: TypeError, as ever
        return (samples // size if self.drop_last else -(-samples // size)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self.round_samples = None
        size = self.batch_size * self.world
        samples, beginning = iter(self.dataset), list[Any]()
        while block := list(itertools.islice(samples, size)):
            beginning = beginning or block
            if len(block) < size and self.drop_last:
                return
            if len(block) < size and self.even:
                self.round_samples = len(block)
                block += itertools.islice(itertools.cycle(beginning), size - len(block))
            yield from block[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]


def shard(loader: DataLoader[Any], ranks: Ranks, even: bool = True, split: bool = False) -> DataLoader[Any]:
    """A loader of this rank's batches of `loader`; itself for one process, and where its sampler deals out samples already (DistributedSampler).

    split: a batch of the loader is that of all ranks together and not of each.
    Raises ConfigError for data of unlike length on the ranks, for a loader without batches (batch_size=None), and with `split` for batches that do
    not come out even.
    """
    if ranks.world == 1 or isinstance(loader.batch_sampler, BatchShard):
        return loader
    refuse_unlike_data(ranks, loader.dataset)
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    if isinstance(loader.dataset, IterableShard):
        return loader
    iterable = isinstance(loader.dataset, IterableDataset)
    if loader.batch_sampler is None and (loader.batch_size is None or not iterable):
        raise ConfigError("a loader with batch_size=None has no batches to deal out to ranks", "Give it a batch_size, or shard its dataset by rank.")
    settings = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    }
    if loader.num_workers:
        settings |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    size: Any = getattr(loader.batch_sampler, "batch_size", None) if loader.batch_sampler is not None else loader.batch_size
    if split and (size is None or size % ranks.world):
        raise ConfigError(f"split_batches=True with batches of {size} samples for {ranks.world} processes", "Use a batch_size that they can divide.")
    size = size // ranks.world if split else size
    if iterable:
        dealt = IterableShard(loader.dataset, ranks, size, loader.drop_last, even)
        return DataLoader(dealt, batch_size=size, drop_last=loader.drop_last, **settings)
    batches: Any = loader.batch_sampler
    if split:
        batches = BatchSampler(batches.sampler, size, loader.drop_last)
    return DataLoader(loader.dataset, batch_sampler=BatchShard(batches, ranks, even), **settings)


def refuse_unlike_data(ranks: Ranks, dataset: Any) -> None:
    """Raise ConfigError, on every rank alike, where ranks have data of unlike length; data without a length are not compared."""
    lengths = ranks.gather_object(_samples(dataset)) if ranks.world > 1 else [None]
    unlike = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
    if unlike is not None:
        raise ConfigError(
            f"the data has {lengths[0]} samples on rank 0 and {lengths[unlike]} on rank {unlike}: samples would be lost, or a rank would wait",
            "Give every rank the whole of the data: its batches are dealt out.",
        )


def _samples(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def samples_of_last_round(loader: Any) -> int | None:
    """How many samples of a sharded loader's last round are its own, where it was filled; None where nothing was doubled."""
    for part in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
        if isinstance(part, BatchShard | IterableShard):
            return part.round_samples
    return None


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


@contextmanager
def _under(states: tuple[Any, Any, torch.Tensor], keep: bool) -> Iterator[None]:
    """Inside, Python's, numpy's and torch's random numbers go on from `states`; keep: they go on from what was drawn here afterwards too."""
    before = _states()
    _set(states)
    try:
        yield
    finally:
        if not keep:
            _set(before)


def _set(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
