"""How long a run is, and what its optimizer is told at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from halfstep.errors import ConfigError
from halfstep.trainer.arguments import TrainingArguments, spaced
from halfstep.trainer.callbacks import CallbackList


@dataclass(frozen=True)
class Lengths:
    """How long a run is. per_epoch: steps in a pass over the data, None when it has no length."""

    per_epoch: int | None
    steps: int
    epochs: int


def lengths(args: TrainingArguments, loader: DataLoader[Any]) -> Lengths:
    """The length of a run over `loader`. Raises ConfigError when neither the data nor the arguments say it."""
    try:
        per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    except TypeError:
        per_epoch = None
    if args.max_steps < 0 and per_epoch is None:
        raise ConfigError("the training data has no length, so the number of steps is not known", "Set max_steps.")
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * (per_epoch or 0))
    return Lengths(per_epoch, steps, math.ceil(steps / per_epoch) if per_epoch else 1)


def step_options(args: TrainingArguments, optimizer: Any, callbacks: CallbackList, step: int, total: int) -> dict[str, Any]:
    """What the optimizer is told at the step after `step` applied ones of `total`.

    max_norm: clipping is left to its own pass, where it can and no callback looks at the gradients before the step.
    stalled: the share of updates that round away is measured, since the step will be logged.
    """
    itself = getattr(optimizer, "takes_factor", False) or getattr(optimizer, "_step_supports_amp_scaling", False)
    late = args.max_grad_norm > 0 and itself and args.gradient_release == "no" and not callbacks.listens("on_pre_optimizer_step")
    return {"max_norm": args.max_grad_norm if late else None, "stalled": args.log_stalled and (step + 1) % spaced(args.logging_steps, total) == 0}
