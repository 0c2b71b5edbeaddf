"""torch.compile for the calls of a model in place: a graph of its own for each model, and calls that a bad step can be traced back to."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.amp.autocast import autocast, forward_context
from halfstep.amp.casting import PINS, bound_policy, cast_floating, settle_now, upcast
from halfstep.amp.lean import before_compiled
from halfstep.amp.mode import Applied, OpMode, Switched, Within
from halfstep.amp.ops import HALF
from halfstep.amp.settling import minded, settle
from halfstep.amp.whole import low_products

logger = logging.getLogger("halfstep")

NUMBERS = itertools.count()
NONE: dict[str, Any] = {}  # the pins of a model that has none
# what runs around and between the graphs of a model that is not one graph, and would be compiled for itself, to nothing
BETWEEN = (
    *(getattr(block, name) for block in (autocast, Applied, Switched, Within) for name in ("__init__", "__enter__", "__exit__")),
    *(OpMode.__init__, OpMode.__torch_function__, OpMode.__enter__, OpMode.__exit__),
    *(forward_context, low_products, minded, settle, upcast, cast_floating, before_compiled),
)


class CompiledCall:
    """What runs instead of the call of `model` where it stands as `model._compiled_call_impl`: its forward method, as torch.compile has compiled it.

    options: those of torch.compile. It is compiled at the first call, after a `*-lean` policy has decided on the weights, so that they do not change
    under a graph; and anew when a part of the model was pinned to fp32. A part with 16-bit weights cannot be traced while it is pinned: from then on
    the model runs as it is written, and a warning says so. Precision is part of the graph. The hooks of the model itself are not: they run before and
    after it, so that what watches the model sees its calls.

    torch counts compilations by the code that they are of, and runs what has more than a few (recompile_limit, 8) as it is written. So each of these
    has code of its own: models of one process do not count for each other.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model, self.options = model, options
        self._made_of: tuple[Any, Any] = (None, None)  # the pins and the forward method that were compiled
        self._call: Callable[..., Any] = model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the model."""
        model, own = self.model, self.model.__dict__
        if torch.compiler.is_compiling():  # inside of another graph
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        held, forward = own.get(PINS, NONE), own.get("forward")
        if held is not self._made_of[0] or forward is not self._made_of[1]:
            settle_now(model, args, kwargs)
            self._made_of, self._call = (held, forward), self._made(held)
        own["forward"] = self._call
        try:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            if forward is None:
                del own["forward"]
            else:
                own["forward"] = forward

    def _made(self, held: dict[str, Any]) -> Callable[..., Any]:
        narrow = [name for name in held if _is_narrow(self.model, name)]
        if narrow:
            logger.warning(
                "%s is held in fp32 from here on and has 16-bit weights, which torch.compile cannot trace: the model runs as it is written. "
                "fp32=%s in the precision of a new run (fp32_modules) keeps it compiled",
                *(", ".join(narrow), "|".join(narrow)),
            )
            return self.model.forward
        _leave_out_what_is_between()
        return torch.compile(_with_code_of_its_own(self.model.forward), **self.options)


@functools.cache
def _leave_out_what_is_between() -> None:
    """Tell torch not to compile halfstep's blocks by themselves. Inside of a graph they are followed all the same."""
    from torch._C._dynamo import eval_frame

    skipped = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in BETWEEN:
        eval_frame.set_code_exec_strategy(function.__code__, skipped)


def _is_narrow(model: nn.Module, name: str) -> bool:
    """Whether a pinned part of a model has weights in 16 bits, or inputs that are cast to them."""
    policy = bound_policy(model)
    with torch._C.DisableTorchFunction():  # a kept weight says that it is fp32
        return (policy is not None and policy.whole) or any(p.dtype in HALF for p in model.get_submodule(name).parameters())


def _with_code_of_its_own(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_of_model_{next(NUMBERS)}")
    return call
