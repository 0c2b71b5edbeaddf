"""Bind a policy to a module: its forward pass then runs under the policy wherever it is called from."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.autocast import autocast, forward_context
from halfstep.errors import ConfigError
from halfstep.policy import Policy, select

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Binding:
    """What `bind` did. `remove()` undoes it; `fp32` names the modules held in fp32."""

    module: nn.Module
    fp32: tuple[str, ...]
    before: tuple[tuple[str, Any], ...] = ()  # names of the modules changed, with the forward that stood on the instance, if any

    def remove(self) -> None:
        """Give the module and its fp32 parts the forward methods back that they had."""
        for name, forward in self.before:
            part = self.module.get_submodule(name)
            part.__dict__.pop("forward", None)
            if forward is not None:
                part.forward = forward


def bound_policy(module: nn.Module) -> Policy | None:
    """The policy that `module` is bound to, or None. It stands on the bound method: a module that lost that has no policy."""
    forward = module.__dict__.get("forward")
    policy = getattr(getattr(forward, "__func__", None), "halfstep_policy", None)
    return policy if isinstance(policy, Policy) else None


def bind(module: nn.Module, policy: Policy, device: torch.device) -> Binding:
    """Make `module.forward` run under `policy`, in every thread, with its 16-bit outputs cast up to fp32 if the policy says so.

    Modules that `policy.fp32` names run with autocast off and their 16-bit inputs cast up; they leave fp32 outputs.
    Weights are not touched: no bytes are added per parameter. The bound method follows the module through deepcopy.
    Raises ConfigError for a pattern that matches no module, or one that torch never calls, and for a module that is bound.
    """
    already = bound_policy(module)
    if already is not None:
        raise ConfigError(f"this {type(module).__name__} is already bound to {already}", "Call remove() on that binding first, or bind a copy.")
    held = _called(module, select((name for name, _ in module.named_modules()), policy.fp32)) if policy.fp32 else ()
    for name in held:
        if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise ConfigError(
                f"fp32={name} has no effect: nn.MultiheadAttention reads its weights and never calls it", "Name the attention module itself."
            )
    before = tuple((name, module.get_submodule(name).__dict__.get("forward")) for name in (*held, ""))
    for name in held:
        part = module.get_submodule(name)
        part.forward = MethodType(_in_fp32(_function(part), device.type), part)
    under = _under(_function(module), policy, device)
    under.halfstep_policy = policy  # type: ignore[attr-defined]  # read by bound_policy
    module.forward = MethodType(under, module)
    return Binding(module, held, before)


def _function(module: nn.Module) -> Callable[..., Any]:
    """The forward method of a module as a function of (module, ...), so that it can be bound anew and survive a deepcopy."""
    forward: Any = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__

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
    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with forward_context(policy, device):
            outputs = forward(self, *args, **kwargs)
        return upcast(outputs) if policy.output == "fp32" else outputs

    return run


def _in_fp32(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast(device_type, enabled=False):
            return forward(self, *upcast(args), **upcast(kwargs))

    return run


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
