"""The optimizer and the learning rate schedule that the arguments describe. The schedules are torch's own."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halfstep.errors import ConfigError
from halfstep.trainer.arguments import TrainingArguments


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
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=args.optim == "adamw_torch_fused")


def make_scheduler(optimizer: Optimizer, args: TrainingArguments, steps: int) -> LRScheduler:
    """The schedule of `args.lr_scheduler_type` over `steps` applied steps, warm-up included."""
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * steps)
    if args.lr_scheduler_type == "constant" and warmup:
        raise ConfigError("warm-up has no effect with lr_scheduler_type='constant'", "Use constant_with_warmup.")
    return LambdaLR(optimizer, functools.partial(_factor, args.lr_scheduler_type, warmup, steps))


def _factor(kind: str, warmup: int, steps: int, step: int) -> float:
    """What the learning rate is multiplied by at `step` (0 for the first): up from 0 over the warm-up, then down as the kind says."""
    if step < warmup:
        return step / warmup
    if kind.startswith("constant"):
        return 1.0
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1.0 - share if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
