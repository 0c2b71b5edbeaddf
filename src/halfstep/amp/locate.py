"""Which module of a model gives the first non-finite value, and whether it would not in fp32."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.casting import bound_policy
from halfstep.amp.ops import HALF
from halfstep.amp.pins import pinned_call

LIMITS = {dtype: torch.finfo(dtype).max for dtype in (*HALF, torch.float32)}


@dataclass(frozen=True)
class Blamed:
    """A module whose inputs were finite and whose outputs were not.

    module: its path in the model, "" for the model's own forward method outside of its submodules. heals: in fp32 its outputs are finite.
    dtype: that of the non-finite output. given: the largest magnitude of its inputs. reach: that of its outputs in fp32, as far as they are finite.
    cause: "overflow" (finite in fp32), "nonfinite" (not there either), "weights" (it has non-finite ones), "data" (the model was given such inputs,
        and fp32 does not help).
    value: NaN if an output is that, else inf. argument: for "data", the name of the input.
    """

    module: str
    kind: str
    cause: str
    heals: bool
    dtype: torch.dtype
    given: float = math.nan
    reach: float = math.nan
    value: float = math.nan
    argument: str = ""

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float", "fp")
        who = f"{self.module} ({self.kind})" if self.module else f"the forward method of {self.kind}"
        if self.cause == "data":
            return f"the input {self.argument} of the model ({self.kind}) has values that are not finite"
        if self.cause == "weights":
            return f"the weights of {who} are not finite"
        if self.cause == "nonfinite":
            return f"{who} gives inf or NaN in fp32 too, from inputs up to {self.given:.4g}"
        limit = LIMITS.get(self.dtype, math.inf)
        over = f", and {name} ends at {limit:.5g}" if self.reach > limit else ""
        return f"{who} gives inf or NaN in {name} from inputs up to {self.given:.4g}; in fp32 its outputs reach {self.reach:.4g}{over}"


class Locating:
    """Inside this block each module of `model` that gives NaN or inf from finite inputs is run again in fp32, and that is what comes out of it.

    So one forward pass finds every module that 16 bits cannot hold. `found` has them in the order in which they were met; it ends with the first
    that fp32 does not help either. A -inf that is there in fp32 too (a mask) is none. Dropout draws other numbers in a module that is run again.
    Cost: one look at every output; a second run of the modules found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: list[Blamed] = []
        self._stack = ExitStack()
        self._busy = False
        self._given: tuple[Any, Any] = ((), {})  # the inputs of the model

    def __enter__(self) -> Locating:
        self._stack.callback(self.model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        for name, part in self.model.named_modules():
            handle = part.register_forward_hook(self._hook(name), with_kwargs=True)
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._given = (args, kwargs)

    @property
    def hopeless(self) -> bool:
        """Whether something was met that fp32 does not help."""
        return any(not blamed.heals for blamed in self.found)

    def _hook(self, name: str) -> Any:
        def look(part: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if self._busy or self.hopeless or all(map(_finite, floats(output))):
                return None
            self._busy = True
            try:
                return self._blame(name, part, args, kwargs, output)
            finally:
                self._busy = False

        return look

    def _computed_in(self, part: nn.Module, output: Tensor) -> torch.dtype:
        """The format of an output, for the model's own before its policy casts it up."""
        policy = bound_policy(self.model)
        return policy.dtype if part is self.model and policy is not None and output.dtype == torch.float32 else output.dtype

    def _blame(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given, gave = [*floats(args), *floats(kwargs)], list(floats(output))
        bad = next(t for t in gave if not _finite(t))
        value = math.inf if all(map(_no_nan, gave)) else math.nan
        blame = functools.partial(Blamed, module=name, kind=type(part).__name__, dtype=self._computed_in(part, bad), value=value)
        argument = _argument(self.model, *self._given)
        if not all(map(_usable, given)):
            if part is self.model:
                self.found.append(blame(cause="data", heals=False, module="", argument=argument))
            return None  # it was handed on, from outside of any module
        if not (all(map(_finite, floats([*part.parameters()]))) and all(map(_usable, floats([*part.buffers()])))):
            self.found.append(blame(cause="weights", heals=False))
            return None
        with torch.random.fork_rng(devices={t.device for t in gave if t.is_cuda}):
            wide = pinned_call(self.model, name, args, kwargs)
        new = list(floats(wide))
        if all(map(_usable, gave)) and all(map(_usable, new)) and _same_masks(gave, new):
            return None  # a mask: the same -inf in fp32
        heals = all(map(_usable, new))
        if not heals and argument:
            self.found.append(blame(cause="data", heals=False, module="", kind=type(self.model).__name__, argument=argument))
            return None
        known, reach = (max(map(_reach, some), default=0.0) for some in (given, new))
        self.found.append(blame(cause="overflow" if heals else "nonfinite", heals=heals, given=known, reach=reach))
        return wide if heals else None


def _argument(model: nn.Module, args: Any, kwargs: Any) -> str:
    """The name of the first argument that holds NaN or inf and is no mask; "" when there is none."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    named = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(args)]
    return next((name for name, value in (*named, *kwargs.items()) if not all(map(_is_data, floats(value)))), "")


def _is_data(t: Tensor) -> bool:
    """Whether a tensor is finite, or a mask: -inf beside at most one other value."""
    with torch._C.DisableTorchFunction():
        values = t.detach()
        finite = values[torch.isfinite(values)]
        return finite.numel() == values.numel() or (_usable(values) and bool((finite == finite[:1]).all()))


def _same_masks(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether -inf stands in the same places."""
    return len(some) == len(others) and all(torch.equal(a == -math.inf, b == -math.inf) for a, b in zip(some, others, strict=True))


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: in lists, tuples, mappings and records."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        yield from tensors(vars(value))


def floats(value: Any) -> Iterator[Tensor]:
    """Those of them that are floating, and not empty."""
    return (t for t in tensors(value) if t.is_floating_point() and t.numel())


def _finite(t: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # a mode that is open would take this for a use of the weights
        return bool(torch.isfinite(t.detach()).all())


def _usable(t: Tensor) -> bool:
    """Whether a tensor has no NaN and no inf; -inf is what masks are made of."""
    with torch._C.DisableTorchFunction():
        return bool((t.detach() < math.inf).all())


def _no_nan(t: Tensor) -> bool:
    return not bool(torch.isnan(t.detach()).any())


def _reach(t: Tensor) -> float:
    """The largest finite magnitude."""
    with torch._C.DisableTorchFunction():
        values = t.detach().abs()
        return float(torch.where(values < math.inf, values, 0).max())
