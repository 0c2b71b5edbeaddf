"""What gradient release cannot be done with, and why: refused before anything is changed."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from halfstep.errors import ConfigError, suggest

CLIPS = ("per_parameter", "last")
AFTER_BAD = ("tensor", "rest")
RANKS = "Use accelerator.release(optimizer) after prepare(), or the trainer: they bring gradients together first. Or train in one process."


def refuse(optimizer: Any, model: Any, clip: Any, max_norm: Any, after_bad: Any, shared: bool) -> None:
    """Raise ConfigError for what can be seen to be wrong."""
    if getattr(optimizer, "takes_steps_itself", False):
        raise ConfigError("this optimizer was prepared by an accelerator", "Use accelerator.release(optimizer), which knows its windows and scale.")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"a {type(optimizer).__name__} is not a torch.optim.Optimizer", "Give the optimizer itself.")
    name = type(optimizer).__name__
    if "halfstep_release" in vars(optimizer) and not vars(optimizer)["halfstep_release"].removed:
        raise ConfigError(f"the gradients of this {name} are released already", "Use the handle, or remove() it first.")
    if "halfstep_wrapped" in vars(optimizer):
        raise ConfigError(f"this {name} was wrapped", "Give the optimizer that halfstep.optim.wrap has returned.")
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ConfigError(f"model is a {type(model).__name__}, whose gradients are complete only when the backward pass has ended", RANKS)
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}", "Give it the module, or leave it out.")
    if not shared:
        refuse_ranks()
    if clip is not None and clip not in CLIPS:
        exact = "the norm over all gradients is known only when they are used up. " if clip in ("global", "exact", "norm", True) else ""
        raise ConfigError(f"clip={clip!r} is not known", f"{exact}{suggest(str(clip), CLIPS)} Each is a mode of clipping without that norm.")
    if (clip is None) != (max_norm is None):
        given, missing = (f"clip={clip!r}", "max_norm") if max_norm is None else (f"max_norm={max_norm}", f"clip ({' or '.join(CLIPS)})")
        raise ConfigError(
            f"{given} was given without {missing}: the exact norm over all gradients is known only when they are used up", "Give both or none."
        )
    if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not float(max_norm) > 0):
        raise ConfigError(f"max_norm={max_norm!r} is no norm to clip to", "Use a number above 0, or leave out clip and max_norm.")
    if after_bad not in AFTER_BAD:
        raise ConfigError(f"after_bad={after_bad!r} is not known", suggest(str(after_bad), AFTER_BAD))
    if any(settings.get("differentiable") for settings in (optimizer.defaults, *optimizer.param_groups)):
        raise ConfigError(f"{name} has differentiable=True, and a step inside the backward pass has no gradient", "Use differentiable=False.")
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise ConfigError(f"{name} takes its step in two phases, each of which needs all gradients", "Leave out the release.")
    refuse_hooks(optimizer)


def refuse_hooks(optimizer: Any) -> None:
    """Raise ConfigError where something is to be run before the step."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if optimizer._optimizer_step_pre_hooks or inner._optimizer_step_pre_hooks:
        name = type(optimizer).__name__
        raise ConfigError(f"{name} has hooks that run before its step, and would see no gradients", "Remove them, or leave out the release.")


def refuse_ranks() -> None:
    """Raise ConfigError under several processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        world = torch.distributed.get_world_size()
        raise ConfigError(f"gradients of {world} processes are means over all, and a released one is used up before anybody makes it one", RANKS)
