"""What a model takes in training under a policy, before anything is allocated: weights, what lies beside them, gradients and states."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.amp.discovery import owned, tables
from halfstep.diagnostics.memory import memory
from halfstep.diagnostics.under import device_of
from halfstep.errors import ConfigError, HalfstepError
from halfstep.policy import Policy, select, tensor_bytes
from halfstep.policy.memory import name_of
from halfstep.policy.policy import Castable

logger = logging.getLogger("halfstep")
WALKED = ("activations", "casts", "peak")
KINDS = {"weight": "weights", "residual": "residuals", "gradient": "gradients", "states": "states"}


def optimizer_of(optimizer: Any, model: nn.Module) -> tuple[Any, dict[str, Any] | None]:
    """What is counted for an optimizer given as a name, a class, an instance, or a function of parameters: itself, and the settings of its groups.

    Raises ConfigError for one whose states are not known.
    """
    made = optimizer
    known = isinstance(optimizer, str | type | Optimizer) or name_of(optimizer) is not None
    if not known and callable(optimizer):
        build: Callable[..., Any] = optimizer
        made = build([p for p in model.parameters() if p.requires_grad])
    if name_of(made) is None:
        shown = made if isinstance(made, str) else type(made).__name__
        raise ConfigError(f"the states of the optimizer {shown} are not known", "Name one of torch's, or leave optimizer= out for AdamW.")
    groups = getattr(made, "param_groups", None)
    return made, dict(groups[0]) if groups else None


@dataclass(frozen=True)
class Counted:
    """How bytes are counted: the optimizer as it was given, what is counted for it, and the settings of its groups."""

    given: Any
    optimizer: Any
    group: dict[str, Any] | None


def counted_for(optimizer: Any, model: nn.Module) -> Counted:
    """How the bytes of a model trained with this optimizer are counted. Raises ConfigError for one whose states are not known."""
    return Counted(optimizer, *optimizer_of(optimizer, model))


def whole_step(model: nn.Module, policy: Policy, counted: Counted, batch: Any, loss: Callable[..., Any] | None) -> dict[str, int]:
    """Bytes of a step by kind: those of `predicted`, and where the step can be walked through on shapes activations, casts, and all at its peak."""
    found = predicted(model, policy, counted.optimizer, counted.group)
    try:
        step = memory(model, batch, precision=policy, optimizer=counted.given, loss=loss, savings=False).as_dict()
    except (HalfstepError, RuntimeError, TypeError, ValueError) as error:  # it decides by numbers what to do, or gives no loss
        logger.info("activations under %s were not predicted: %s", policy, error)
        return found
    return found | {kind: step[kind] for kind in WALKED if step[kind]}


def predicted(model: nn.Module, policy: Policy, optimizer: Any, group: dict[str, Any] | None) -> dict[str, int]:
    """Bytes by kind; `frozen` are weights that are not trained, and buffers. Activations are not counted."""
    castable = _castable(model, policy)
    looked_up = castable & tables(model).keys()
    total = dict.fromkeys(KINDS.values(), 0)
    for p in model.parameters():
        if not p.requires_grad or torch.nn.parameter.is_lazy(p):
            continue
        kind: Castable = "table" if id(p) in looked_up else id(p) in castable
        as_loaded = policy.is_mixed and policy.weights == "fp32" and p.dtype == policy.dtype  # and a master is put beside it
        stored = replace(policy, weights="split") if as_loaded else policy
        found = tensor_bytes(stored, optimizer, tuple(p.shape), castable=kind, group=group)
        total = {kind_of: total[kind_of] + int(getattr(found, own)) for own, kind_of in KINDS.items()}
    frozen = sum(t.nbytes for t in (*(p for p in model.parameters() if not p.requires_grad), *model.buffers()))
    return {k: v for k, v in (total | {"frozen": frozen}).items() if v}


def _castable(model: nn.Module, policy: Policy) -> set[int]:
    """The weights that a policy may hold in 16 bits, by id."""
    if policy.autocast == "fp32":
        return set()
    if not policy.whole:
        return {id(p) for p in owned(model, policy, device_of(model)).values()}
    names = [name for name, _ in model.named_modules()]
    held = select(names, policy.fp32) if policy.fp32 else ()
    wide = {id(p) for name in held for p in model.get_submodule(name).parameters()}
    return {id(p) for p in model.parameters() if id(p) not in wide}
