"""The optimizer and the learning rate schedule that the arguments describe. The schedules are torch's own."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader

from halfstep.amp import bound_policy
from halfstep.errors import ConfigError
from halfstep.optim import HALF, AdamW, FusedAdamW
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


def make_optimizer(model: nn.Module, args: TrainingArguments) -> Optimizer:
    """The optimizer of `args.optim` over the trainable parameters; weight decay only on those of two or more dimensions.

    Raises ConfigError when the model has no trainable parameter.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter", "Set requires_grad=True on those to train.")
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=args.learning_rate)
    betas = (args.adam_beta1, args.adam_beta2)
    policy = bound_policy(model) or args.policy  # what "auto" became
    stored = policy.weights != "fp32" or policy.states != "fp32" or any(p.dtype in HALF for p in trainable)
    if args.optim == "adamw_halfstep" or (args.optim == "auto" and stored):
        return AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, seed=args.seed)
    if args.optim != "adamw_torch" and all(p.device.type == "cpu" for p in trainable):
        return FusedAdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=args.optim != "adamw_torch")


def step_options(args: TrainingArguments, optimizer: Any, callbacks: CallbackList, step: int, total: int) -> dict[str, Any]:
    """What the optimizer is told at the step after `step` applied ones of `total`.

    max_norm: clipping is left to its own pass, where it can and no callback looks at the gradients before the step.
    stalled: the share of updates that round away is measured, since the step will be logged.
    """
    itself = getattr(optimizer, "takes_factor", False) or getattr(optimizer, "_step_supports_amp_scaling", False)
    late = args.max_grad_norm > 0 and itself and not callbacks.listens("on_pre_optimizer_step")
    return {"max_norm": args.max_grad_norm if late else None, "stalled": args.log_stalled and (step + 1) % spaced(args.logging_steps, total) == 0}


def make_scheduler(optimizer: Optimizer, args: TrainingArguments, steps: int) -> LRScheduler:
    """The schedule of `args.lr_scheduler_type` over `steps` applied steps, warm-up included."""
    warmup = int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil((args.warmup_steps or args.warmup_ratio) * steps)
    return LambdaLR(optimizer, functools.partial(_factor, args.lr_scheduler_type, warmup, steps))


def _factor(kind: str, warmup: int, steps: int, step: int) -> float:
    """What the learning rate is multiplied by at `step` (0 for the first): up from 0 over the warm-up, then down as the kind says."""
    if step < warmup:
        return step / warmup
    if kind.startswith("constant"):
        return 1.0
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1.0 - share if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
