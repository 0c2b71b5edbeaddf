"""Saved states and settings that are of another optimizer, or that no step can be taken with: refused by name, before anything changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep import policy as policies
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim.codec import SCALE
from halfstep.optim.rule import as_number

LATER = ("maximize", "nesterov", "dampening")
"""Settings that came later to some optimizers: a saved group without them keeps those that the optimizer was made with (torch switches them off)."""

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Settings of torch's that say how a step is computed and not which."""

KEPT = (*LATER, *HOW, "amsgrad", "decoupled_weight_decay")
"""Settings that a group which is loaded keeps where the saved one has none."""

RULES = {
    "alpha",
    "beta2_decay",
    "betas",
    "centered",
    "dampening",
    "eps",
    "etas",
    "lambd",
    "lr_decay",
    "momentum",
    "momentum_decay",
    "nesterov",
    "rho",
}
"""Settings that belong to some rules and not to others."""

ROUNDING = 1e-12  # schedules that end at 0 end this near to it, on either side
PARTIAL = ("Adafactor", "LBFGS", "Lion")  # rows of ROLES whose states are not one tensor for each key and weight, or are of any library
AGAIN = "Use another checkpoint of the run."


def refuse_other_sizes(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError unless a saved state has states, and its groups as many parameters as those that are here."""
    if not {"state", "param_groups"} <= state_dict.keys():
        there = ", ".join(map(str, state_dict)) or "nothing"
        raise CheckpointError(f"the state of an optimizer has state and param_groups, and this one has {there}", "Load what its state_dict() gave.")
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in state_dict["param_groups"]]
    if sizes != saved_sizes:
        raise CheckpointError(
            f"the state is of an optimizer with groups of {saved_sizes} parameters, and this one has {sizes}",
            "Build the optimizer as the run that saved it did.",
        )


def refuse_states(states: Mapping[Any, Any], known: Collection[str], name: str) -> None:
    """Raise CheckpointError for states that `name`, which keeps `known` ones, has no use for."""
    for number, state in states.items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if value is not None and key != "step" and key.removesuffix(SCALE) not in known:
                raise _strange(number, key, name)


def refuse_amsgrad(groups: Iterable[Mapping[str, Any]], name: str, remedy: str) -> None:
    """Raise CheckpointError for saved groups of AdamW's amsgrad variant."""
    if any(group.get("amsgrad") for group in groups):
        raise CheckpointError(f"the state is of an AdamW with amsgrad=True, and {name} has no such rule", remedy)


def refuse_torchs(name: str, **given: Any) -> None:
    """Raise ConfigError for a setting of torch's optimizer that the one-pass optimizer of its name does not have and that is switched on."""
    for key, value in given.items():
        if value:
            wrapped = f"Use halfstep.optim.wrap(torch.optim.{name}(..., {key}=True)), which trains masters by torch's own rule."
            remedy = wrapped if key == "amsgrad" else "Leave it out: a step through masters is neither differentiated nor captured."
            raise ConfigError(f"halfstep.optim.{name} has no {key}={value!r}", remedy)


def refuse_incomplete(saved: Mapping[str, Any], needed: Iterable[str], number: int) -> None:
    """Raise CheckpointError for the saved state of a parameter that has begun and lacks some of what each step needs."""
    missing = [key for key in needed if key not in saved] if saved else []
    if missing:
        raise CheckpointError(f"the saved state of parameter {number} lacks {missing[0]}", AGAIN)


def count_of(value: Any, number: int) -> Tensor:
    """A saved number of steps as it is kept here: fp32, on the CPU. Others save a number, or an integer tensor."""
    count = as_number(value)
    if not 0 <= count < math.inf:
        raise CheckpointError(f"the saved step of parameter {number} is {value!r}, which is no number of steps", AGAIN)
    return torch.tensor(count, dtype=torch.float32)


def groups_of(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], needed: Collection[str], name: str, check: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """The saved groups as they are to be loaded in the place of `groups`, those that are here; what older optimizers had not is taken from these.

    needed: settings that a step of `name` needs. check: raises ConfigError for those that no step can be taken with.
    Raises CheckpointError for both, and for groups of another rule.
    """
    other, found = _other(name), []
    for number, (theirs, own) in enumerate(zip(saved, groups, strict=True)):
        foreign = sorted(RULES & theirs.keys() - own.keys())
        missing = [key for key in own if key in needed and key not in theirs and key not in KEPT]
        if foreign or missing:
            said = f"has {', '.join(foreign)}" if foreign else f"lacks {', '.join(missing)}"
            raise CheckpointError(f"group {number} of the saved state {said}: it is of another optimizer than {name}", other)
        apart = own.get("decoupled_weight_decay", True)
        if theirs.get("decoupled_weight_decay", apart) != apart and theirs.get("weight_decay"):
            parts = "as a part of the gradient", "apart from the gradient"
            how = f"weight_decay={theirs['weight_decay']} {parts[not apart]}, and {name} has it {parts[bool(apart)]}"
            raise CheckpointError(f"group {number} of the saved state has {how}", other)
        made = {key: own[key] for key in KEPT if key in own and key not in theirs} | dict(theirs)
        made |= {key: tuple(value) for key, value in made.items() if key in needed and isinstance(value, list)}
        try:
            check(made | ({"lr": 0.0} if -ROUNDING < as_number(made.get("lr")) < 0 else {}))
        except ConfigError as error:
            raise CheckpointError(f"group {number} of the saved state cannot be used: {error.cause}", AGAIN) from error
        found.append(made)
    return found


def check_stock(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that the class of `optimizer`, if it is one of torch's, refuses when it is made, or that are NaN."""
    cls = type(optimizer)
    if _row(optimizer) is None:
        return
    taken = {key: value for key, value in group.items() if key in inspect.signature(cls).parameters and key not in ("params", *HOW)}
    for key, value in taken.items():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (float, Tensor)) and not abs(as_number(part)) <= (math.inf if key != "lr" else 1e38):
                raise ConfigError(f"{key}={value!r} is out of range")
    if isinstance(taken.get("lr"), Tensor):
        taken["lr"] = as_number(taken["lr"])
    try:
        cls([torch.nn.Parameter(torch.zeros(1, 1))], **taken)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_stock_state(
    optimizer: Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any], p: Tensor, number: int, encoded: Collection[str]
) -> None:
    """Raise CheckpointError for the saved state of a parameter that an optimizer of torch's could not go on with, under the settings of `group`.

    encoded: states that may be in another format, and are looked at when they are converted.
    """
    row, name = _row(optimizer), type(optimizer).__name__
    if row is None or not saved:
        return
    for key, value in saved.items():
        if not isinstance(value, Tensor) or key.removesuffix(SCALE) in row:
            continue
        if value.dim() and value.shape == p.shape:
            raise _strange(number, key, name)
    if name in PARTIAL:
        return
    kept = policies.roles_of(optimizer, group) if name != "SGD" else ()  # whose buffer is made when it is first used
    refuse_incomplete(saved, (*counters(optimizer), *kept), number)
    for key in row:
        value = saved.get(key)
        if key in encoded or not isinstance(value, Tensor):
            continue
        if value.shape != p.shape or not (value.is_floating_point() or value.is_complex()):
            raise CheckpointError(f"the saved {key} of parameter {number} is {named(value)}, and the parameter is {named(p)}", AGAIN)


def counters(optimizer: Optimizer) -> tuple[str, ...]:
    """The fp32 scalars that a class of torch's keeps for each parameter; () for other classes."""
    name = type(optimizer).__name__
    return policies.COUNTERS.get(name, policies.STEP) if _row(optimizer) is not None else ()


def _row(optimizer: Optimizer) -> Mapping[str, Any] | None:
    """The states that a class of torch's keeps with a value per weight. None for other classes, which may keep what they like."""
    cls = type(optimizer)
    return policies.ROLES.get(cls.__name__) if cls.__module__.split(".")[:2] == ["torch", "optim"] else None


def _strange(number: int, key: str, name: str) -> CheckpointError:
    return CheckpointError(f"the saved state of parameter {number} has {key}, which {name} does not keep: it is of another optimizer", _other(name))


def _other(name: str) -> str:
    return f"Load it into an optimizer of the kind that saved it, or start {name} with new states."


def named(t: Tensor) -> str:
    """A tensor in a message: its dtype and shape."""
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
