"""Batches for the trainer: an order that is a function of (seed, epoch) and can be entered anywhere, and collation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from halfstep.accelerator import EpochStart
from halfstep.checkpoint import seed_everything
from halfstep.distributed import Ranks, Solo, refuse_unlike_data, shard
from halfstep.errors import DataError, suggest
from halfstep.trainer.given import check_data

RANKS_APART = 1_000_003  # between the seeds of the workers of two ranks
ALONE = Solo()
LABELS = ("labels", "label", "label_ids")
LABEL_NAMES = frozenset(LABELS)
Collator = Callable[[list[Any]], Mapping[str, Any]]


class EpochBatches(Sampler[list[int]]):
    """Lists of sample numbers, batch by batch. The order depends on (seed, epoch) only; `start` batches are left out.

    So a run that stops in the middle of an epoch goes on with the very next batch, without reading the ones before.
    lengths: of the samples, to put such of like length together. grouped: samples of a step, which are made alike too.
    ranks: a batch is that of all ranks together, batch_size for each, and this gives the part of one. Of a last, smaller batch ranks get as many
    samples, give or take one; `padded` gives a rank without any the first sample, whose loss then weighs nothing (`weight`).
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        lengths: Sequence[int] | None = None,
        grouped: int = 1,
        rank: int = 0,
        world: int = 1,
        padded: bool = True,
    ) -> None:
        self.samples, self.batch_size, self.shuffle, self.seed, self.drop_last = samples, batch_size, shuffle, seed, drop_last
        self.lengths, self.grouped = lengths, grouped
        self.rank, self.world, self.padded = rank, world, padded
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        if self.shuffle:
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        else:
            order = list(range(self.samples))
        if self.lengths is not None:
            order = by_length(order, self.lengths, self.grouped)
        for b in range(self.start, len(self)):
            begin, size = self._part(b)
            if size or self.padded:
                yield Batch(order[begin : begin + size] or order[:1], self.epoch)

    def _part(self, number: int) -> tuple[int, int]:
        """Where this rank's part of a batch begins, and how many samples it has."""
        first = number * self.batch_size * self.world
        each, more = divmod(min(self.batch_size * self.world, self.samples - first), self.world)
        return first + self.rank * each + min(self.rank, more), each + (self.rank < more)

    def weight(self, number: int) -> float:
        """What the mean loss of this rank's part counts for, so that the mean over ranks is that over all samples of the batch."""
        if self.world == 1:
            return 1.0
        whole = min(self.batch_size * self.world, self.samples - number * self.batch_size * self.world)
        return self._part(number)[1] * self.world / whole

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size * self.world)
        return whole + (rest > 0 and not self.drop_last)


class EpochOrder(Sampler[int]):
    """The samples of `EpochBatches` one by one."""

    def __init__(self, batches: EpochBatches) -> None:
        self.batches = batches

    def set_epoch(self, epoch: int) -> None:
        """The pass that begins next."""
        self.batches.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.batches)

    def __len__(self) -> int:
        return self.batches.samples


def has_places(dataset: Any) -> bool:
    """Whether samples are read by their number, so that a sampler can say in which order."""
    return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


class Batch(list[int]):
    """The sample numbers of a batch, and the pass over the data that it belongs to: workers that live on are told by it."""

    def __init__(self, numbers: Iterable[int], epoch: int) -> None:
        super().__init__(numbers)
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (list(self), self.epoch)


def by_length(order: list[int], lengths: Sequence[int], grouped: int) -> list[int]:
    """A shuffled order in which samples of like length stand together.

    Stretches of 50 steps of `grouped` samples (fewer for little data, so that there are 4 at least) are each sorted from long to short. The
    longest sample of all comes first, so that a batch that does not fit into memory shows at once. Order within a length is that of `order`.
    """
    longest = max(order, key=lengths.__getitem__)
    place = order.index(longest)
    order[0], order[place] = order[place], order[0]
    stretch = grouped * max(1, min(50, len(order) // (grouped * 4)))
    parts = (order[i : i + stretch] for i in range(0, len(order), stretch))
    return [sample for part in parts for sample in sorted(part, key=lengths.__getitem__, reverse=True)]


class Reseeded:
    """A map-style dataset for workers that live through several passes: each begins a pass with the random states that a new worker would have.

    So what is random in the data is a function of (seed, epoch) there too, and a run that goes on from the middle sees the same.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: Batch) -> list[Any]:
        worker = get_worker_info()
        if worker is not None and batch.epoch != self.epoch:
            self.epoch = batch.epoch
            base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(self.seed + batch.epoch)))
            seed_everything((base + worker.id) % 2**63)
        several = getattr(self.dataset, "__getitems__", None)
        return list(several(list(batch))) if several is not None else [self.dataset[i] for i in batch]


def make_loader(
    dataset: Any,
    collate: Collator,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    workers: int,
    pin: bool = False,
    prefetch: int | None = None,
    persistent: bool = False,
    started: str | None = None,
    lengths: Sequence[int] | None = None,
    grouped: int = 1,
    ranks: Ranks = ALONE,
    padded: bool = True,
    order: Sampler[int] | None = None,
) -> DataLoader[Any]:
    """A DataLoader over a map-style dataset (with an `EpochBatches` sampler) or an iterable one.

    pin: batches lie in pinned memory, from which copies to a GPU overlap with what runs there. prefetch: batches that each worker makes ahead.
    persistent: workers stay between passes. started: how they are (fork, spawn, forkserver); the system's way when not given.
    lengths, grouped, ranks, padded: as in `EpochBatches`. An iterable dataset is read by every rank, which keeps its own share.
    order: a sampler of a map-style dataset, instead of `shuffle`.
    It has a random generator of its own, so that starting it leaves torch's random state alone.
    """
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": pin, "prefetch_factor": prefetch, "persistent_workers": persistent}
    options["multiprocessing_context"] = started
    own = torch.Generator().manual_seed(seed)
    check_data("the dataset", dataset)
    if not has_places(dataset):
        if lengths is not None:
            raise DataError(
                "group_by_length needs data with a length, and an iterable dataset has none", "Leave it out, or give a map-style dataset."
            )
        whole: Any = DataLoader(dataset, batch_size=batch_size, collate_fn=collate, drop_last=drop_last, generator=own, **options)
        return shard(whole, ranks, even=padded)
    refuse_unlike_data(ranks, dataset)
    if len(dataset) == 0:
        raise DataError("the dataset has no samples", "Check the path and the filters.")
    if order is not None:
        whole = DataLoader(dataset, batch_size=batch_size, sampler=order, collate_fn=collate, drop_last=drop_last, generator=own, **options)
        return shard(whole, ranks, even=padded)
    how: dict[str, Any] = {"lengths": lengths, "grouped": grouped * ranks.world, "rank": ranks.rank, "world": ranks.world, "padded": padded}
    batches = EpochBatches(len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, **how)
    if len(batches) == 0:
        raise DataError(
            f"the dataset has {len(dataset)} samples, fewer than one batch of {batch_size * ranks.world}, "
            "and dataloader_drop_last=True leaves that out",
            "Use a smaller batch, or dataloader_drop_last=False.",
        )
    data: Any = Reseeded(dataset, seed) if persistent else dataset
    return DataLoader(data, batch_sampler=batches, collate_fn=collate, generator=own, **options)


def is_ours(loader: Any) -> bool:
    """Whether a loader was made by `make_loader` over a map-style dataset: its order needs no random state."""
    return isinstance(getattr(loader, "batch_sampler", None), EpochBatches)


def from_batch(loader: Any, epoch: int, start: int, begun: EpochStart | None = None) -> Iterator[Any]:
    """The batches of pass `epoch` over `loader` from number `start` on.

    One of our loaders skips without reading. Another's is started as this pass began (`begun`), so that it shuffles as it did,
    and read past; the random states of now are then put back.
    """
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, EpochBatches):
        workers = loader.num_workers > 0  # they have random numbers of their own, so they make again what was used
        batches.epoch, batches.start = epoch, 0 if workers else start
        # seeds worker processes, which have random numbers of their own on each rank, and do not depend on the epochs before
        loader.generator.manual_seed(batches.seed + epoch + batches.rank * RANKS_APART)
        return itertools.islice(loader, start, None) if workers else _made_here(loader)
    told: list[Any] = [getattr(loader, name, None) for name in ("sampler", "dataset")]
    for item in told:
        if hasattr(item, "set_epoch"):
            item.set_epoch(epoch)
    begun = begun if begun is not None else EpochStart()
    if start:
        return begun.again(loader, start)
    begun.begin(loader)
    return iter(loader)


def _made_here(loader: Any) -> Iterator[Any]:
    """The batches of one of our loaders without workers: what torch's iterator does, without the marks that it makes for profilers in each batch."""
    if loader.pin_memory or type(loader) is not DataLoader:
        yield from loader
        return
    dataset, collate = loader.dataset, loader.collate_fn
    batches: Any = loader.batch_sampler
    several = getattr(dataset, "__getitems__", None)
    for numbers in batches:
        yield collate(several(numbers) if several else [dataset[i] for i in numbers])


def default_data_collator(features: list[Any]) -> dict[str, Tensor]:
    """Stack samples that are mappings of numbers, lists, arrays or tensors; `label` and `label_ids` become `labels`.

    Columns of text are left out. Raises DataError for samples that are not mappings, or whose lengths differ.
    """
    first = features[0]
    if not isinstance(first, Mapping):
        raise DataError(
            f"the dataset gives samples of type {type(first).__name__}, and the model needs named inputs",
            "Let it give dicts such as {'input_ids': ..., 'labels': ...}, or pass a data_collator that makes one of a list of samples.",
        )
    batch: dict[str, Tensor] = {}
    for key, value in first.items():
        if isinstance(value, str) or value is None or (isinstance(value, list) and value and isinstance(value[0], str)):
            continue
        name = "labels" if is_label(key) else key
        if name in batch:
            raise DataError(f"the samples have {key!r} and another column of labels", "Keep one of labels, label and label_ids.")
        if [f for f in features if key not in f]:
            raise DataError(f"some samples have a column {key!r} and others have none", "Give every sample of the dataset the same columns.")
        try:
            values = [f[key] for f in features]
            batch[name] = torch.stack(values if isinstance(value, Tensor) and {*map(type, values)} == {Tensor} else list(map(_tensor, values)))
        except (RuntimeError, ValueError, TypeError) as error:
            raise DataError(
                f"the column {key!r} cannot be stacked into one tensor: {error}",
                "Pad the samples to one length, or pass a data_collator that does (for example transformers.DataCollatorWithPadding).",
            ) from error
    return batch


def count_inputs(inputs: Mapping[str, Any], without_padding: bool = False) -> tuple[int, int, bool]:
    """Samples in a batch, its inputs (tokens where it has `input_ids`, else samples), and whether they are tokens.

    without_padding: only tokens that `attention_mask` has.
    """
    samples = next((v.shape[0] for v in inputs.values() if isinstance(v, Tensor) and v.dim()), 0)
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor):
        return samples, samples, False
    mask = inputs.get("attention_mask")
    if without_padding and isinstance(mask, Tensor):
        return samples, int(mask.sum()), True
    return samples, int(tokens.numel()), True


def is_label(column: str) -> bool:
    """Whether a column of this name becomes `labels`."""
    return column in LABELS


def _tensor(value: Any) -> Tensor:
    """A tensor of a sample's value; Python floats and float arrays as fp32."""
    if isinstance(value, Tensor):
        return value
    made = torch.as_tensor(np.asarray(value))
    return made.float() if made.dtype == torch.float64 else made


class ColumnFilter:
    """A collator that drops the columns a model's forward does not take, then hands on to another collator. taken: those it takes, None for any."""

    def __init__(self, collate: Collator, taken: set[str] | None) -> None:
        self.collate = collate
        self.taken = taken

    def __call__(self, features: list[Any]) -> Mapping[str, Any]:
        """Drop and collate."""
        if self.taken is None or not isinstance(features[0], Mapping):
            return self.collate(features)
        if all(map(self.taken.issuperset, features)):
            kept = list(map(dict, features))  # a collator may change what it is given, and the dataset's own must not change
        else:
            kept = [{k: v for k, v in f.items() if k in self.taken} for f in features]
        if not set(kept[0]) - LABEL_NAMES:
            column = next(iter(features[0]), "")
            raise DataError(
                f"the columns {', '.join(features[0])} are not inputs of the model's forward ({', '.join(sorted(self.taken - set(LABELS)))})",
                f"Rename them, or pass remove_unused_columns=False. {suggest(str(column), self.taken)}",
            )
        return self.collate(kept)
