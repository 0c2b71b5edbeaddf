"""torch's optimizers without torch's compiler: constructing one imports `torch._dynamo`, a second and more, to tell it what not to look into.

While nobody has imported the compiler nothing is being compiled, and there is nobody to tell. The methods that do so ask a cached function for
what to call; here that function looks first whether the compiler is there, and does what torch does from then on. Nothing else changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

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
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
        return None


install()
