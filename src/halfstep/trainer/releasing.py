"""Gradient release in a run: how it clips, and what it leaves behind."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch import nn

from halfstep.accelerator import Accelerator
from halfstep.errors import ConfigError
from halfstep.optim import handle_of
from halfstep.trainer.arguments import TrainingArguments, clip_of

logger = logging.getLogger("halfstep")


def release_gradients(accelerator: Accelerator, model: nn.Module, optimizer: Any, args: TrainingArguments) -> None:
    """Where the arguments say so, let a prepared optimizer update inside the backward pass. Raises ConfigError where that cannot work."""
    if args.gradient_release == "no":
        return
    end_release(model)  # of an attempt that ran out of memory
    if args.on_overflow == "replay" and accelerator.scaler.is_enabled():  # known only now under precision="auto"
        raise ConfigError(REPLAY, "Use on_overflow='skip'.")
    clip: Literal["per_parameter", "last"] | None = clip_of(args)
    handle = accelerator.release(optimizer, clip=clip, max_norm=args.max_grad_norm if clip is not None else None)
    logger.info("%s", handle)


def end_release(model: nn.Module) -> None:
    """Gradients of a model stay until they are cleared again."""
    for p in model.parameters():
        handle = handle_of(p)
        if handle is not None:
            handle.remove()


REPLAY = "on_overflow='replay' runs a step again, and with gradient_release it is half applied by then"
