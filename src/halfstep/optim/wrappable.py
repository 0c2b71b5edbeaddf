"""What cannot be wrapped, and why: refused before anything is tried."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.optim.copies import bare_step

STAY = "Keep its weights and states in fp32, or use halfstep.optim.AdamW."


def refuse(optimizer: Optimizer) -> None:
    """Raise ConfigError for what can be seen to be wrong before anything is tried."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"a {type(optimizer).__name__} is not a torch.optim.Optimizer", "Give the optimizer itself, not its class.")
    name = type(optimizer).__name__
    if getattr(optimizer, "knows_masters", False) or "halfstep_wrapped" in vars(optimizer):
        raise ConfigError(f"this {name} has masters already", "Use it as it is: weights= and states= are arguments of it, and one wrap is enough.")
    if "halfstep_release" in vars(optimizer):
        raise ConfigError(f"the gradients of this {name} are released, which steps it by itself", "Wrap it first, then release what wrap returns.")
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise ConfigError(
            f"{name} takes its step in two phases, between which the model runs on weights that are no step's result",
            "Train it on fp32 weights without wrap, or wrap the optimizer that it is made around.",
        )
    if any(settings.get("differentiable") for settings in (optimizer.defaults, *optimizer.param_groups)):
        raise ConfigError(
            f"{name} has differentiable=True, and a step through 16-bit weights or copies has no gradient",
            "Use differentiable=False, or leave out wrap.",
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step cannot be asked of it without a closure."""
    known = inspect.signature(bare_step(optimizer)).parameters.get("closure")
    return known is not None and known.default is inspect.Parameter.empty


def closure_error(name: str, about: str) -> ConfigError:
    """The error for an optimizer that evaluates a closure inside its step."""
    return ConfigError(
        f"{name} evaluates the closure itself, on weights that are not a step's result; {about}, which the closure's model does not see", STAY
    )
