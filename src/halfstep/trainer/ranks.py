"""A run in several processes: rank 0 writes its files, and between steps all tell each other what each has seen."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from halfstep.accelerator import Accelerator
from halfstep.distributed import BUCKET_MB, DataParallel, Ranks, on_main, shard
from halfstep.errors import ConfigError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.data import count_inputs, is_ours
from halfstep.trainer.interrupt import Interrupt
from halfstep.trainer.run import RunFolder
from halfstep.trainer.state import Losses, TrainerControl

logger = logging.getLogger("halfstep")


def data_parallel_of(args: TrainingArguments) -> DataParallel:
    """How the arguments want processes to train together. Raises ConfigError for what cannot have an effect."""
    if args.ddp_static_graph:
        raise ConfigError("ddp_static_graph=True has no effect: which parameters are used is seen anew in every step", "Leave it out.")
    return DataParallel(
        reduce_dtype=args.reduce_dtype,
        bucket_cap_mb=BUCKET_MB if args.ddp_bucket_cap_mb is None else args.ddp_bucket_cap_mb,
        find_unused_parameters=args.ddp_find_unused_parameters,
        broadcast_buffers=args.ddp_broadcast_buffers is not False,
        backend=args.ddp_backend,
        timeout=args.ddp_timeout,
    )


def folder_of(args: TrainingArguments, ranks: Ranks) -> RunFolder:
    """The folder of a run; of several processes only rank 0 touches it. Raises ConfigError for arguments that one process alone can follow."""
    if ranks.world == 1:
        return RunFolder(args.output_dir)
    if args.auto_find_batch_size:
        raise ConfigError(
            f"auto_find_batch_size=True with {ranks.world} processes, of which one alone may run out of memory",
            "Find the size in one process, then set per_device_train_batch_size.",
        )
    if args.batch_eval_metrics:
        raise ConfigError(f"batch_eval_metrics=True with {ranks.world} processes, which have a part of each batch", "Leave it out.")
    return SharedFolder(args.output_dir, ranks)


class SharedFolder(RunFolder):
    """The folder of a run in several processes. What rank 0 finds or refuses there, all are told."""

    def __init__(self, path: str | Path, ranks: Ranks) -> None:
        super().__init__(path)
        self._ranks = ranks

    def check(self, overwrite: bool) -> None:
        """See `RunFolder`."""
        on_main(self._ranks, lambda: RunFolder.check(self, overwrite))

    def begin(self, settings: dict[str, Any], overwrite: bool) -> None:
        """See `RunFolder`."""
        on_main(self._ranks, lambda: _alone(self).begin(settings, overwrite))

    def go_on(self, settings: dict[str, Any], folder: Path, history: list[dict[str, Any]]) -> None:
        """See `RunFolder`."""
        on_main(self._ranks, lambda: _alone(self).go_on(settings, folder, history))

    def find(self, wanted: bool | str | Path) -> Path:
        """See `RunFolder`."""
        return on_main(self._ranks, lambda: RunFolder.find(self, wanted))

    def keep_newest(self, limit: int | None, best: Path | None = None) -> None:
        """See `RunFolder`."""
        on_main(self._ranks, lambda: RunFolder.keep_newest(self, limit, best))

    def keep_only(self, best: Path) -> None:
        """See `RunFolder`."""
        on_main(self._ranks, lambda: RunFolder.keep_only(self, best))


def _alone(folder: SharedFolder) -> RunFolder:
    """The same folder, whose methods call each other and not those that wait for other ranks."""
    alone = RunFolder.__new__(RunFolder)
    alone.__dict__ = folder.__dict__
    return alone


def dealt(loader: DataLoader[Any], ranks: Ranks, even: bool = True) -> DataLoader[Any]:
    """A loader of this rank's batches: ours deals them out itself, one of the user's own is made to."""
    return loader if ranks.world == 1 or is_ours(loader) else shard(loader, ranks, even)


def weight_of(loader: Any, number: int) -> float:
    """What the loss of a rank's micro-batch counts for: 1, but in a last, smaller batch of all ranks, of which they have unequal parts."""
    return loader.batch_sampler.weight(number) if is_ours(loader) else 1.0


def accelerator_for(args: TrainingArguments) -> Accelerator:
    """The accelerator that the arguments describe."""
    strict: Literal["raise", "skip"] = "raise" if args.on_overflow == "raise" else "skip"
    how = data_parallel_of(args)
    return Accelerator(precision=args.policy, cpu=args.use_cpu, patience=args.max_bad_steps, on_overflow=strict, heal=args.heal, data_parallel=how)


def used_in(window: list[Any], without_padding: bool, ranks: Ranks, interrupt: Interrupt) -> tuple[int, int, bool]:
    """The samples and inputs of all ranks in a step, and whether inputs are tokens. And whether Ctrl-C was pressed on a rank, which all then obey."""
    samples, inputs, tokens = 0, 0, False
    for batch in window:
        found = count_inputs(batch, without_padding)
        samples, inputs, tokens = samples + found[0], inputs + found[1], found[2]
    if ranks.world == 1:
        return samples, inputs, tokens
    seen = ranks.reduce(torch.tensor([samples, inputs, int(interrupt.requested)]), "sum").tolist()
    interrupt.agreed = seen[2] > 0
    return int(seen[0]), int(seen[1]), tokens


def agree_on(ranks: Ranks, control: TrainerControl) -> None:
    """A switch that a callback has set on one rank (a limit of time, say) is set on all of them: what follows needs all."""
    if ranks.world == 1:
        return
    names = [f.name for f in fields(control)]
    agreed = ranks.agree(torch.tensor([float(getattr(control, name)) for name in names])).tolist()
    for name, switch in zip(names, agreed, strict=True):
        setattr(control, name, switch > 0)


def share_losses(ranks: Ranks, losses: Losses) -> Losses:
    """The mean over ranks of what each has added up, as everybody's; NaN and inf of one rank show in it."""
    if ranks.world == 1:
        return losses
    total = float(ranks.reduce(torch.tensor(losses.sum, dtype=torch.float64), "mean"))
    return Losses(total, losses.count)


def mean_loss(ranks: Ranks, record: dict[str, Any]) -> dict[str, Any]:
    """A log record of a step with the loss of all ranks."""
    if ranks.world == 1 or record.get("loss") is None:
        return record
    return record | {"loss": float(ranks.reduce(torch.tensor(record["loss"], dtype=torch.float64), "mean"))}


def batches_gone(ranks: Ranks, saved: int | None, batches: int) -> int:
    """How many micro-batches of a pass a resumed run leaves out: those that were used, by a run on `saved` ranks (None: on one)."""
    then, now = saved or 1, ranks.world
    if then == now:
        return batches
    gone = batches * then // now
    logger.warning("%d micro-batches of this pass were used on each of %d ranks: on %d the run goes on after %d", batches, then, now, gone)
    return gone
