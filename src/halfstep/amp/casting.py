"""Bind a policy to a module: its forward pass then runs under the policy wherever it is called from."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.autocast import autocast, forward_context
from halfstep.amp.mode import Within, inside
from halfstep.amp.ops import HALF, check_lists
from halfstep.errors import ConfigError
from halfstep.policy import Policy, select


@dataclass(frozen=True)
class Binding:
    """What `bind` did. `remove()` undoes it; `fp32` names the modules held in fp32."""

    module: nn.Module
    fp32: tuple[str, ...]
    changed: tuple[tuple[str, Any, Any], ...] = ()  # name of a module, its forward now, and the one that stood on the instance before, if any

    def remove(self) -> None:
        """Give the module and its parts the forward methods back that they had; a part that was bound anew since then keeps its own."""
        for name, ours, before in self.changed:
            part = self.module.get_submodule(name)
            if part.__dict__.get("forward") is not ours:
                continue
            del part.forward
            if before is not None:
                part.forward = before


def bound_policy(module: nn.Module) -> Policy | None:
    """The policy that `module` is bound to, or None. It stands on the bound method: a module that lost that has no policy."""
    forward = module.__dict__.get("forward")
    policy = getattr(getattr(forward, "__func__", None), "halfstep_policy", None)
    return policy if isinstance(policy, Policy) else None


def bind(module: nn.Module, policy: Policy, device: torch.device) -> Binding:
    """Make `module.forward` run under `policy`, in every thread, with its 16-bit outputs cast up to fp32 if the policy says so.

    Its submodules do so too when they are called by themselves, from wherever (`model.head(x)`, a checkpointed block computed again): called
    inside the module's own forward pass they add nothing, and a block that the user opens there is obeyed.
    Modules that `policy.fp32` names run with autocast off and their 16-bit inputs cast up; they leave fp32 outputs.
    Weights are not touched: no bytes are added per parameter. The bound methods follow the module through deepcopy.
    Raises ConfigError for a pattern that matches no module, or one that torch never calls, for a name of an op that is none, and for a
    module that is bound.
    """
    already = bound_policy(module)
    if already is not None:
        raise ConfigError(f"this {type(module).__name__} is already bound to {already}", "Call remove() on that binding first, or bind a copy.")
    held = _called(module, select((name for name, _ in module.named_modules()), policy.fp32)) if policy.fp32 else ()
    own = {name: bound_policy(part) for name, part in module.named_modules() if name and bound_policy(part) is not None}
    for name in held:
        if any(f"{name}.".startswith(f"{o}.") for o in own):
            raise ConfigError(
                f"fp32={name} has no effect: that part is bound to a policy of its own, {next(iter(own.values()))}", "Leave the name out of fp32=."
            )
        if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise ConfigError(
                f"fp32={name} has no effect: nn.MultiheadAttention reads its weights and never calls it", "Name the attention module itself."
            )
    check_lists(policy.fp32_ops, policy.half_ops)
    changed: list[tuple[str, Any, Any]] = []
    for name, part in list(module.named_modules()):
        if name and (not _binds(part) or any(f"{name}.".startswith(f"{o}.") for o in own) or (not policy.is_mixed and device.type == "cpu")):
            continue
        if not name:
            function = _under(_function(part), policy, device)
            function.halfstep_policy = policy  # type: ignore[attr-defined]  # read by bound_policy
        elif name in held:
            function = _held(_function(part), policy, device)
        else:
            function = _part(_function(part), policy, device, any(name.startswith(f"{outer}.") for outer in held))
        before = part.__dict__.get("forward")
        part.forward = MethodType(function, part)
        changed.append((name, part.__dict__["forward"], before))
    return Binding(module, held, tuple(changed))


def _binds(part: nn.Module) -> bool:
    """Whether a submodule gets a bound method: it is called itself, and is no compiled script."""
    called = type(part).forward is not nn.Module.forward or "forward" in part.__dict__
    return called and not isinstance(part, torch.jit.ScriptModule)


def _function(module: nn.Module) -> Callable[..., Any]:
    """The forward method of a module as a function of (module, ...), so that it can be bound anew and survive a deepcopy."""
    forward: Any = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        within: Callable[..., Any] | None = getattr(forward.__func__, "halfstep_part_of", None)
        return within or forward.__func__

    @functools.wraps(forward)
    def borrowed(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    del borrowed.__wrapped__  # it has no `self`, so its signature would lose the first argument
    own = inspect.signature(forward)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    borrowed.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    return borrowed


def _called(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """The modules of `names`, with containers that are never called themselves (ModuleList, ModuleDict) replaced by what they hold."""
    found: list[str] = []
    for name in names:
        part = module.get_submodule(name)
        if type(part).forward is nn.Module.forward and "forward" not in part.__dict__:
            found += _called(module, tuple(f"{name}.{child}" for child, _ in part.named_children()))
        else:
            found.append(name)
    return tuple(found)


def _under(forward: Callable[..., Any], policy: Policy, device: torch.device) -> Callable[..., Any]:
    """The forward method of a bound module: each call is inside a block of its own."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Within(policy), forward_context(policy, device):
            outputs = forward(self, *args, **kwargs)
        return upcast(outputs) if policy.output == "fp32" else outputs

    return run


def _part(forward: Callable[..., Any], policy: Policy, device: torch.device, in_held: bool) -> Callable[..., Any]:
    """The forward method of a submodule: as it is inside the bound module's forward pass, else under the policy.

    in_held: it is a part of a module held in fp32, and runs in fp32 by itself too.
    """

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside.policy is policy:
            return forward(self, *args, **kwargs)
        with Within(policy), forward_context(policy, device), autocast(device.type, enabled=False) if in_held else nullcontext():
            outputs = forward(self, *args, **kwargs)
        return outputs if policy.output == "compute" or _computed_again() else upcast(outputs)

    run.halfstep_part_of = forward  # type: ignore[attr-defined]  # read by _function: binding it anew binds what it had
    return run


def _held(forward: Callable[..., Any], policy: Policy, device: torch.device) -> Callable[..., Any]:
    """The forward method of a module held in fp32."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside.policy is policy:
            with autocast(device.type, enabled=False):
                return forward(self, *upcast(args), **upcast(kwargs))
        with Within(policy), forward_context(policy, device), autocast(device.type, enabled=False):
            return forward(self, *upcast(args), **upcast(kwargs))

    run.halfstep_part_of = forward  # type: ignore[attr-defined]
    return run


def _computed_again() -> bool:
    """Whether this call is made by a backward pass (activation checkpointing): its outputs must then be as they were, in 16 bits."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def upcast(value: Any) -> Any:
    """`value` with every 16-bit floating tensor in it cast to fp32; containers keep their type, other objects are returned as they are."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(upcast(v) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(upcast(v) for v in value)
    if is_dataclass(value) and not isinstance(value, type | Mapping):
        changed = {f.name: wide for f in fields(value) if f.init and (wide := upcast(old := getattr(value, f.name))) is not old}
        return replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        wide = {k: upcast(v) for k, v in value.items()}
        if all(wide[k] is v for k, v in value.items()):
            return value
        if not isinstance(value, MutableMapping):
            return wide
        twin = copy.copy(value)  # keeps its type: OrderedDict, transformers' ModelOutput and BatchEncoding
        for key, item in wide.items():
            twin[key] = item
        return twin
    return value
