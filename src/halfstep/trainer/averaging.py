"""The average of a run's weights: kept after each applied step, in the model while it is evaluated, and its weights at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from halfstep import checkpoint
from halfstep.accelerator import Accelerator
from halfstep.optim import EMA
from halfstep.trainer.arguments import TrainingArguments


class NoAverage:
    """A run without an average."""

    average: EMA | None = None
    to_save: EMA | None = None  # what `save_model` writes instead of the weights

    def follow(self, accelerator: Accelerator, optimizer: Any) -> None:
        """From now on take the weights into the average after each applied step, and keep it in checkpoints."""

    def in_use(self) -> AbstractContextManager[Any]:
        """The block of an evaluation: the model has the weights that are to be evaluated."""
        return nullcontext()

    def told(self) -> dict[str, str]:
        """What the record of an evaluation says of them."""
        return {}

    def go_back(self, folder: Path) -> None:
        """Take the average of a checkpoint."""

    def finish(self) -> None:
        """The run is over."""


class RunAverage(NoAverage):
    """The average of one run. evaluated: evaluations see it, and it becomes the model's weights at the end."""

    def __init__(self, model: nn.Module, args: TrainingArguments) -> None:
        self.average: EMA = EMA(model, args.ema_decay or 0.0, warmup=args.ema_warmup)
        self._evaluated, self._finished = args.ema_in_evaluation, False
        self._part = ""  # its name in a checkpoint

    @property
    def to_save(self) -> EMA | None:  # type: ignore[override]
        """See NoAverage."""
        return self.average if self._is_to_be_put_in() else None

    def _is_to_be_put_in(self) -> bool:
        return self._evaluated and not self._finished and self.average.updates > 0

    def follow(self, accelerator: Accelerator, optimizer: Any) -> None:
        """See NoAverage."""
        (self._part,) = accelerator.register_for_checkpointing(self.average)
        accelerator.on_applied(optimizer, self.average.update)

    def in_use(self) -> AbstractContextManager[Any]:
        """See NoAverage."""
        return self.average.applied() if self._is_to_be_put_in() else nullcontext()

    def told(self) -> dict[str, str]:
        """See NoAverage."""
        return {"eval_weights": "average" if self._finished or self._is_to_be_put_in() else "trained"}

    def go_back(self, folder: Path) -> None:
        """See NoAverage."""
        self.average.load_state_dict(checkpoint.load(folder).parts[self._part])  # there may be averages of others beside it

    def finish(self) -> None:
        """See NoAverage."""
        if self._is_to_be_put_in():
            self.average.copy_to_model()
            self._finished = True


def average_of(model: nn.Module, args: TrainingArguments) -> NoAverage:
    """The average that the arguments ask for."""
    return RunAverage(model, args) if args.ema_decay is not None else NoAverage()
