"""The optimizer of a step that is planned or measured: which it is, what its states take, and what its step takes for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import optim
from halfstep.diagnostics.surroundings import inner
from halfstep.errors import ConfigError, suggest
from halfstep.optim import HALF, with_masters
from halfstep.policy import ROLES, Policy, chosen, name_of
from halfstep.policy.policy import Castable


def optimizer_for(asked: Any, parameters: Iterable[Tensor], policy: Policy) -> Optimizer:
    """The optimizer that is asked for, over these parameters, as a run under `policy` would have it.

    asked: the name of one of halfstep's (AdamW, SGD, Lion) or of torch's; a class, or a function of parameters; an optimizer, of which another of the
    same class and settings is made, with the groups of the first.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter that is trained", "Set requires_grad=True on those to train.")
    return with_masters(_made(asked, trained, policy), chosen(policy))


def _made(asked: Any, trained: list[Tensor], policy: Policy) -> Optimizer:
    if isinstance(asked, Optimizer):
        own: Optimizer = inner(asked)
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names", "initial_lr")} for g in own.param_groups]
        sizes, made = [len(g["params"]) for g in own.param_groups], iter(trained)
        if sum(sizes) != len(trained):
            raise ConfigError(f"the optimizer has {sum(sizes)} parameters and the model trains {len(trained)}", "Pass its class, or a function.")
        return type(own)([{"params": [next(made) for _ in range(n)], **g} for n, g in zip(sizes, groups, strict=True)])  # type: ignore[call-arg]
    if isinstance(asked, str):
        asked = _named(asked, policy, trained)
    if not callable(asked):
        raise ConfigError(f"optimizer={asked!r} is none", "Pass a name (AdamW), a class, a function of parameters, or an optimizer.")
    made = asked(trained)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"optimizer= gave a {type(made).__name__}", "Let it return a torch.optim.Optimizer.")
    return made


def _named(name: str, policy: Policy, trained: list[Tensor]) -> Callable[..., Optimizer]:
    """The class that the Trainer would take for a name: torch's fused AdamW where everything is fp32."""
    if name == "AdamW" and policy.weights == "fp32" and policy.states == "fp32" and not any(p.dtype in HALF for p in trained):
        on_cpu = all(p.device.type == "cpu" for p in trained)
        return optim.FusedAdamW if on_cpu else functools.partial(torch.optim.AdamW, fused=True)
    found = getattr(optim, name, None) if name in ("AdamW", "SGD", "Lion") else getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"optimizer={name!r} is not known", suggest(name, ROLES))
    return found


def takes_nothing(optimizer: Optimizer) -> bool:
    """Whether a step makes no tensors: halfstep's one-pass optimizers where their kernels run, and fused ones."""
    if isinstance(optimizer, optim.MasteredOptimizer) and not hasattr(optimizer, "optimizer"):
        return True
    return all(group.get("fused") for group in optimizer.param_groups)


def sizes_of(parameters: Iterable[nn.Parameter], policy: Policy) -> list[tuple[tuple[int, ...], Castable]]:
    """Trained parameters as `halfstep.policy.model_bytes` wants them."""
    found: list[tuple[tuple[int, ...], Castable]] = []
    for p in parameters:
        if p.requires_grad:
            kept: Castable = p.dtype in HALF and ("table" if p.grad_dtype != p.dtype and not policy.whole else True)
            found.append((tuple(p.shape), kept))
    return found


def states_known(optimizer: Optimizer) -> bool:
    """Whether `halfstep.policy` knows the states of an optimizer."""
    return name_of(optimizer) not in (None, "LBFGS")


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors in the states of an optimizer, as they are."""
    for state in optimizer.state.values():
        yield from (t for t in (state.values() if isinstance(state, dict) else (state,)) if isinstance(t, Tensor))


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of these tensors, each memory once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in states_of(optimizer)}.values())


def name_told(optimizer: Optimizer) -> str:
    """The class of an optimizer, for people: of the one inside where masters are kept around it."""
    return type(inner(optimizer)).__name__
