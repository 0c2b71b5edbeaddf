"""torch's optimizers without torch's compiler: constructing one imports `torch._dynamo`, a second and more, to tell it what not to look into.

While nobody has imported the compiler nothing is being compiled, and there is nobody to tell. The methods that do so ask a cached function for
what to call; here that function looks first whether the compiler is there, and does what torch does from then on. Nothing else changes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

METHODS = ("add_param_group", "zero_grad", "load_state_dict", "state_dict")
CACHED = "__dynamo_disable"  # where torch._disable_dynamo keeps what it has made of a function


def _asked(function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        import torch._dynamo

        disabled = torch._dynamo.disable(function, True, wrapping=False)  # type: ignore[no-untyped-call]
        setattr(function, CACHED, disabled)
        return disabled(*args, **kwargs)

    return call


def install() -> None:
    """Let the methods of torch's optimizers ask. Where this version of torch is made otherwise, or was asked before, nothing is done."""
    for name in METHODS:
        inner = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if inner is not None and not hasattr(inner, CACHED):
            setattr(inner, CACHED, _asked(inner))


class QuickToClear(Optimizer):
    """An optimizer whose `zero_grad` does that and nothing else, where nobody is profiling."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters; set_to_none=False fills them with zeros instead."""
        if not set_to_none or torch._C._autograd._profiler_enabled():
            return super().zero_grad(set_to_none)
        return let_go(self)


def let_go(optimizer: Optimizer) -> None:
    """Clear the gradients of all parameters."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


def clear(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """`optimizer.zero_grad(set_to_none)`; where that is torch's own and nobody is profiling, without what is for profiles."""
    own = type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
    if own or not set_to_none or torch._C._autograd._profiler_enabled():
        optimizer.zero_grad(set_to_none)
    else:
        let_go(optimizer)


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of an optimizer with hooks around it, as torch makes one of every optimizer's; where nobody profiles, without what is for profiles.

    In a subclass that has a step of its own torch puts the hooks around that one.
    """

    @functools.wraps(step)
    def run(self: Any, *given: Any, **named: Any) -> Any:
        if getattr(type(self).step, "__wrapped__", None) is not step:
            return step(self, *given, **named)
        if torch._C._autograd._profiler_enabled():
            with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
                return between_hooks(step, (self, *given), named)
        return between_hooks(step, (self, *given), named)

    run.hooked = True  # type: ignore[attr-defined]  # torch's sign that it need not wrap it
    return run


HOOKED = hooked(print).__code__


def between_hooks(step: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """`step(*given, **named)`, of which the optimizer is the first, with its hooks and those of all optimizers."""
    optimizer = given[0]
    for hook in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
        changed = hook(optimizer, given, named)
        if changed is not None:
            given, named = changed
    result = step(*given, **named)
    for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
        hook(optimizer, given, named)
    return result


install()
