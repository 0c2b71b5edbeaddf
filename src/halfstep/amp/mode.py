"""The function mode that carries an op policy through one block of one thread.

A mode sees every function of torch that is called from Python inside its block, looks it up in a table and runs it as the table says. It acts
nowhere else: not in other threads, and not on other people's `torch.autocast`.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

Route = Callable[..., Any]  # route(dtype, function, *args, **kwargs): runs the function in the format that it stands for
OPENED = frozenset((F.multi_head_attention_forward, F.interpolate, Tensor.backward, torch.autograd.backward, torch.autograd.grad))


class Tables:
    """What a mode does to each function: `on` while autocast is on, `off` while it is off.

    emulated: products are rounded and run in fp32. island: the tables of a block inside in which autocast is switched off.
    low: inside a model that is in 16 bits as a whole, its products, while autocast is off and for what `off` leaves alone; None outside of one.
    It makes no island of a block: what a nested block means goes by `on`, `off` and `island`.
    """

    def __init__(
        self,
        on: Mapping[Any, Route] | None = None,
        off: Mapping[Any, Route] | None = None,
        emulated: bool = False,
        island: Tables | None = None,
        low: Mapping[Any, Route] | None = None,
    ) -> None:
        self.on, self.off, self.low = dict(on or {}), dict(off or {}), low
        self.without = {**(low or {}), **self.off}  # what is looked up while autocast is off
        self.acted = frozenset((*self.on, *self.without, *OPENED))  # the functions that something is done to
        self.emulated, self.island = emulated, island
        self.acts_on, self.acts_off, self.acts_without = bool(self.on), bool(self.off), bool(self.without)
        self.number = _reach.add(self)


class _Reach:
    """Tables and routes by number. torch.compile cannot follow tables of 500 functions: while it traces, a function is looked up by `_look_up`."""

    def __init__(self) -> None:
        self.tables: list[Tables] = []
        self.numbers: dict[Route, int] = {}
        self._lock = threading.Lock()

    def add(self, tables: Tables) -> int:
        with self._lock:
            for route in (*tables.on.values(), *tables.without.values()):
                number = self.numbers.setdefault(route, len(self.numbers) + 1)
                setattr(self, f"route_{number}", route)
            self.tables.append(tables)
            return len(self.tables) - 1


_reach = _Reach()


def numbered(number: int) -> Tables:
    """The tables whose `number` this is."""
    return _reach.tables[number]


def _look_up(number: int, on: bool, func: Any) -> int:
    tables = _reach.tables[number]
    return _reach.numbers.get((tables.on if on else tables.without).get(func, _look_up), 0)


_look_up._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without a second of imports


class Joins(Protocol):
    """What a mode does when a function of torch is given a weight that is kept in 16 bits: `halfstep.amp.joined`."""

    def touches(self, device: str, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether this call is given such a weight and is no 16-bit product of it."""

    def settled(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any, Any, Any]:
        """Either (True, result, -, -), or (False, -, args, kwargs) with the fp32 values in the place of the weights."""


class Inside(threading.local):
    """Where this thread is. policy: of the bound module whose forward pass it is in, or None; joins: what is done there to weights kept in 16 bits.

    backward: number of the backward pass in which that forward pass is computed again, -1 for none. around: policy and joins around it.
    begun_under: the hooks on saved tensors that were there when it began: an activation checkpoint around it.
    unread: nobody reads the outputs of the bound module that is called next, but for its loss; loss_alone: so it is for the one that is running.
    """

    def __init__(self) -> None:
        # attributes of the instance, set once for each thread: torch.compile guards on which of them are there
        self.policy: Any = None
        self.joins: Joins | None = None
        self.backward = -1
        self.around: tuple[Any, Joins | None] = (None, None)
        self.begun_under: Any = None
        self.unread = self.loss_alone = False


inside = Inside()


class OpMode(TorchFunctionMode):
    """Inside this block the functions of torch run as `tables` says, on tensors of one type of device."""

    def __init__(self, device: str, tables: Tables) -> None:
        super().__init__()
        self.device = device
        self.tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            number = _look_up(self.tables.number, torch.is_autocast_enabled(self.device), func)
            return self._run(getattr(_reach, f"route_{number}") if number else None, func, args, kwargs or {})
        joins = inside.joins
        if joins is None and func not in self.tables.acted and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            return func(*args, **kwargs) if kwargs else func(*args)  # the common case, which this method shall cost little
        if joins is not None and joins.touches(self.device, func, args, kwargs):
            done, result, args, kwargs = joins.settled(func, args, kwargs or {})
            if done:
                return result
        tables = self.tables
        route = tables.on.get(func)
        if (route is not None or tables.acts_without) and not torch.is_autocast_enabled(self.device):
            route = tables.without.get(func)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or getattr(hooks[1], "__module__", None) != "torch.utils.checkpoint":
            if route is None and func not in OPENED:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._run(route, func, args, kwargs or {})
        # activation checkpointing: a tensor saved now is made again when it is unpacked, which is in the backward pass and may be outside this block
        policy, joined = inside.around if hooks[0] is inside.begun_under else (inside.policy, joins)  # what the checkpointed function began with
        again = functools.partial(_unpack, hooks[1], self.device, tables, policy, joined)
        torch._C._autograd._push_saved_tensors_default_hooks(hooks[0], again)
        try:
            return self._run(route, func, args, kwargs or {})
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _run(self, route: Route | None, func: Any, args: Any, kwargs: Any) -> Any:
        if route is not None:
            return route(torch.get_autocast_dtype(self.device), func, *args, **kwargs)
        if func in OPENED:
            with self:
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _unpack(unpack: Callable[[Any], Any], device: str, tables: Tables, policy: Any, joins: Joins | None, packed: Any) -> Any:
    with Applied(device, tables), Within(policy, joins):
        return unpack(packed)


class Switched:
    """The block in which torch's autocast has this state: what `torch.autocast` does, in a fifth of the time and so that torch.compile can follow."""

    def __init__(self, device: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
        self.device = device
        self.state = (enabled, dtype, cache_enabled)
        self._before: tuple[bool, torch.dtype, bool] | None = None

    def __enter__(self) -> Switched:
        self._before = (torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device), torch.is_autocast_cache_enabled())
        self._set(*self.state)
        torch.autocast_increment_nesting()
        return self

    def __exit__(self, *_: Any) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        if self._before is not None:
            self._set(*self._before)

    def _set(self, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache_enabled)


def without_autocast(device: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The function as it runs while autocast is off."""
    if torch.compiler.is_compiling():  # which knows this block everywhere, and the switch not inside an autograd function
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        return function(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, before)


def current(device: str) -> OpMode | None:
    """The mode for `device` that is open in this thread, or None."""
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, OpMode) and mode.device == device:
            return mode
    return None


class Applied:
    """The block in which `tables` hold: a mode of its own, or the tables of the one that is open, which would act on the same functions again."""

    def __init__(self, device: str, tables: Tables) -> None:
        self.device = device
        self.tables = tables
        self._mode: OpMode | None = None
        self._before: Tables | None = None

    def __enter__(self) -> Applied:
        self._mode = current(self.device)
        if self._mode is None:
            self._mode = OpMode(self.device, self.tables)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        else:
            self._before, self._mode.tables = self._mode.tables, self.tables
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        mode, self._mode = self._mode, None
        if mode is not None and self._before is not None:
            mode.tables = self._before
        elif mode is not None:
            mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


class Within:
    """The block in which this thread counts as inside the forward pass of a module bound to `policy`; joins: for one with weights kept in 16 bits.

    loss_alone: nobody will read its outputs but for the loss.
    """

    def __init__(self, policy: Any, joins: Joins | None = None, loss_alone: bool = False) -> None:
        self.policy, self.joins, self.loss_alone = policy, joins, loss_alone
        self._before: tuple[Any, Joins | None, int, Any, Any, bool] = (None, None, -1, (None, None), None, False)

    def __enter__(self) -> Within:
        self._before = (inside.policy, inside.joins, inside.backward, inside.around, inside.begun_under, inside.loss_alone)
        inside.around = self._before[:2]
        inside.policy, inside.joins, inside.loss_alone = self.policy, self.joins, self.loss_alone
        if not torch.compiler.is_compiling():
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
            inside.begun_under = hooks[0] if hooks is not None else None
            if self.joins is not None:
                inside.backward = torch._C._current_graph_task_id()
        return self

    def __exit__(self, *_: Any) -> None:
        inside.policy, inside.joins, inside.backward, inside.around, inside.begun_under, inside.loss_alone = self._before


class Unread:
    """The block in which nobody reads the outputs of the bound module that is called first, but for its loss: they are left in the format they have.

    Casting them up takes the memory of the outputs twice over, which of a language model are the logits.
    """

    def __enter__(self) -> None:
        inside.unread = True

    def __exit__(self, *_: Any) -> None:
        inside.unread = False


@functools.cache
def opened(func: types.FunctionType) -> Route:
    """A copy of a composite function of torch that does not hand itself back to the mode, so that its inner functions are seen."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = func.__globals__ | {name: lambda *_: False for name in names if name in func.__globals__}
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
