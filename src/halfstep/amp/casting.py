"""Bind a policy to a module: its forward pass then runs under the policy wherever it is called from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.autocast import autocast, forward_context
from halfstep.policy import Policy, select

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Binding:
    """What `bind` did. `remove()` undoes it; `fp32` names the modules held in fp32."""

    module: nn.Module
    fp32: tuple[str, ...]

    def remove(self) -> None:
        """Give the module and its fp32 parts their own forward methods back."""
        for name in ("", *self.fp32):
            part = self.module.get_submodule(name)
            part.__dict__.pop("forward", None)
            part.__dict__.pop("_halfstep_policy", None)


def bound_policy(module: nn.Module) -> Policy | None:
    """The policy that `module` is bound to, or None."""
    policy = module.__dict__.get("_halfstep_policy")
    return policy if isinstance(policy, Policy) else None


def bind(module: nn.Module, policy: Policy, device: torch.device) -> Binding:
    """Make `module.forward` run under `policy`, in every thread, with its 16-bit outputs cast up to fp32 if the policy says so.

    Modules that `policy.fp32` names run with autocast off and their 16-bit inputs cast up; they leave fp32 outputs.
    Weights are not touched: no bytes are added per parameter. The bound method follows the module through deepcopy.
    Raises ConfigError for a pattern that matches no module.
    """
    held = select((name for name, _ in module.named_modules()), policy.fp32) if policy.fp32 else ()
    for name in held:
        part = module.get_submodule(name)
        part.forward = MethodType(_in_fp32(_function(part), device.type), part)
    if policy.is_mixed or device.type == "cuda":
        module.forward = MethodType(_under(_function(module), policy, device), module)
    module.__dict__["_halfstep_policy"] = policy
    return Binding(module, held)


def _function(module: nn.Module) -> Callable[..., Any]:
    """The forward method of a module as a function of (module, ...), so that it can be bound anew and survive a deepcopy."""
    forward: Any = module.forward
    return forward.__func__ if isinstance(forward, MethodType) else lambda _, *args, **kwargs: forward(*args, **kwargs)


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
    if isinstance(value, Mapping):
        return type(value)(**{k: upcast(v) for k, v in value.items()}) if _takes_keywords(value) else {k: upcast(v) for k, v in value.items()}
    return value


def _takes_keywords(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a record such as transformers' ModelOutput, which is made from keywords."""
    return type(value) is not dict and all(isinstance(k, str) for k in value)
