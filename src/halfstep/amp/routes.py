"""From an op policy to the tables of a mode: what runs in fp32, in the widest format of its operands, and in 16 bits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from halfstep.amp import dropout, embedding, large, loss, ops
from halfstep.amp.contraction import contracts
from halfstep.amp.emulation import FAMILIES, ROUTES, rounded
from halfstep.amp.mode import Route, Tables, without_autocast
from halfstep.amp.ops import HALF, every_form
from halfstep.amp.rounding import eligible
from halfstep.errors import ConfigError


def _cast(value: Any, device: str, to: torch.dtype, from_: tuple[torch.dtype, ...]) -> Any:
    """Tensors of `device` in one of the formats `from_`, cast; also inside a list or tuple. Anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(to) if value.dtype in from_ and value.device.type == device else value
    if type(value) in (list, tuple):
        return type(value)(_cast(v, device, to, from_) for v in value)
    return value


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> list[Tensor]:
    """The floating tensors among the arguments that autocast may cast: of `device`, and not fp64."""
    flat = [t for a in (*args, *kwargs.values()) for t in (a if type(a) in (list, tuple) else (a,))]
    return [t for t in flat if isinstance(t, Tensor) and t.dtype in (*HALF, torch.float32) and t.device.type == device]


def _called_as(device: str, to: torch.dtype, from_: tuple[torch.dtype, ...], func: Route, args: Any, kwargs: Any) -> Any:
    """The function on cast operands, with autocast off so that what it calls is not cast back."""
    given = [_cast(a, device, to, from_) for a in args]
    return without_autocast(device, func, *given, **{k: _cast(v, device, to, from_) for k, v in kwargs.items()})


def _wide(device: str) -> Route:
    """In fp32: 16-bit operands cast up. A result in another format, asked for with dtype=, is given."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return _called_as(device, torch.float32, HALF, func, args, kwargs)

    return route


def _wide_leaf(device: str) -> Route:
    """The same for a function that calls no product, so that autocast may stay on: 2 us less a call."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("out") is not None:
                return func(*args, **kwargs)
            kwargs = {k: _cast(v, device, torch.float32, HALF) for k, v in kwargs.items()}
        return func(*[_cast(a, device, torch.float32, HALF) for a in args], **kwargs)

    return route


def _low(device: str) -> Route:
    """In 16 bits: fp32 operands cast down. On a CPU, whose 16-bit kernels are few and slow, by rounding operands and results."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return _called_as(device, dtype, (*HALF, torch.float32), func, args, kwargs)

    return rounded if device == "cpu" else route


def _einsum(dtype: torch.dtype, func: Route, /, equation: Any, *operands: Any) -> Any:
    """CUDA's list has every einsum in 16 bits: one that multiplies matrices is emulated as a product is, any other rounded."""
    tensors = operands[0] if len(operands) == 1 and type(operands[0]) in (list, tuple) else operands
    if isinstance(equation, str) and eligible(*tensors) and contracts(equation, tensors):
        return ROUTES[torch.einsum](dtype, func, equation, *operands)
    return rounded(dtype, func, equation, *operands)


def _widest(device: str, products: bool) -> Route:
    """In the widest format of the operands. products: a sum of products, which takes fp32 sums and one rounding where all are 16-bit."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        formats = {t.dtype for t in _operands(args, kwargs, device)}
        if kwargs.get("out") is not None or not formats:
            return func(*args, **kwargs)
        if len(formats) > 1:
            return _called_as(device, torch.float32, HALF, func, args, kwargs)
        (one,) = formats
        if products and one in HALF:
            return rounded(one, func, *args, **kwargs)
        return without_autocast(device, func, *args, **kwargs)

    return route


def _summed(device: str) -> Route:
    """16-bit operands are summed in fp32 and the result rounded once; operands of two formats are left to torch."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        formats = {t.dtype for t in _operands(args, kwargs, device)}
        if len(formats) != 1 or not formats <= set(HALF) or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return rounded(formats.pop(), func, *args, **kwargs)

    return route


def _as_given(device: str) -> Route:
    """As the device runs it, with results in the format of the operands: what CUDA computes in 16 bits and torch's CPU list in fp32."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        formats = {t.dtype for t in _operands(args, kwargs, device)}
        result = func(*args, **kwargs)
        if len(formats) != 1 or formats == {torch.float32} or kwargs.get("out") is not None:
            return result
        return _cast(result, device, formats.pop(), (torch.float32,))

    return route


def _refused(device: str) -> Route:
    """Refuse probabilities in 16 bits: those next to 0 and 1 have become 0 and 1, and their logarithm is lost."""

    def route(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        found = [t.dtype for t in _operands(args, kwargs, device) if t.dtype in HALF]
        if found:
            raise ConfigError(
                f"binary_cross_entropy was given {found[0]} inside autocast, where a probability close to 1 has become 1 and its loss is lost",
                "Use F.binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) on the logits, without the sigmoid; "
                "or autocast(fp32_ops=('binary_cross_entropy',)), which computes the loss in fp32 from the rounded probabilities.",
            )
        return func(*args, **kwargs)

    return route


@functools.cache
def tables(device: str, op_list: str, fp32_ops: tuple[str, ...], half_ops: tuple[str, ...], emulated: tuple[str, ...]) -> Tables:
    """The tables of a block in which autocast is on.

    op_list: "cuda" gives torch's CUDA list on a CPU too, "device" leaves that of the device. fp32_ops, half_ops: names that the user moves.
    emulated: the families of products that are rounded to 16 bits and run in fp32, on a CPU. Raises ConfigError for a name that is no op.
    """
    ops.check_lists(fp32_ops, half_ops)
    on: dict[Any, Route] = {function: ROUTES[function] for family in emulated for function in FAMILIES[family]}
    on |= dropout.ROUTE if device == "cpu" else {}
    on |= large.ROUTE if device == "cpu" and "matmul" not in emulated else {}
    if op_list == "cuda" and device == "cpu":
        exact, sums = [name for name in ops.WIDEST if name not in ops.SUMS_OF_PRODUCTS], ops.SUMS_OF_PRODUCTS
        on |= dict.fromkeys(every_form(ops.LOW_ON_CUDA_ONLY), _low(device)) | ({torch.einsum: _einsum} if "matmul" in emulated else {})
        on |= dict.fromkeys(every_form(ops.FP32_ON_CPU_ONLY), _as_given(device))
        on |= dict.fromkeys(every_form(exact), _widest(device, False)) | dict.fromkeys(every_form(sums), _widest(device, True))
        on |= dict.fromkeys(every_form(ops.SUMS_BY_INDEX), _summed(device)) | embedding.ROUTE
        on |= dict.fromkeys(every_form(ops.UNSAFE), _refused(device)) | dict.fromkeys(every_form(ops.FP32), _wide(device))
        on |= dict.fromkeys(every_form(ops.LEAVES), _wide_leaf(device)) | dict.fromkeys(
            every_form(("cross_entropy",)), loss.by_rows(_wide_leaf(device))
        )
        on |= dict.fromkeys((Tensor.float, Tensor.to), loss.widened)
    on |= {func: _guarded(func, _wide(device)) for func in every_form(fp32_ops)} | {
        func: _guarded(func, _low(device)) for func in every_form(half_ops)
    }
    some = bool(emulated)
    return Tables(on=on, emulated=some, island=Tables(on=on, off=_in_fp32(device), emulated=some))


@functools.cache
def bare_island(device: str) -> Tables:
    """The tables of a block in which autocast was switched off inside one of torch's own."""
    return Tables(off=_in_fp32(device))


@functools.cache
def _in_fp32(device: str) -> Mapping[Any, Route]:
    """What rounds or can overflow, in fp32: an fp32 island."""
    return {func: _guarded(func, _wide_leaf(device)) for func in ops.inexact()}  # autocast is off there


def _guarded(func: Callable[..., Any], route: Route) -> Route:
    """`route`, but nothing that the function writes to is cast: it would write to the copy."""
    if func in every_form(ops.WITH_STATE):
        return _with_state(func, route)
    place = (
        list(inspect.signature(func).parameters).index("inplace") if "inplace" in getattr(getattr(func, "__code__", None), "co_varnames", ()) else -1
    )
    if place < 0:
        return route

    def guarded(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("inplace") or (len(args) > place and args[place]):
            return func(*args, **kwargs)
        return route(dtype, func, *args, **kwargs)

    return guarded


def _with_state(func: Callable[..., Any], route: Route) -> Route:
    """Running statistics go to the function as they are; 16-bit ones leave it to run in 16 bits."""
    state, affine = ("running_mean", "running_var"), ("weight", "bias")
    own = "training" if "batch" in func.__name__ else "use_input_stats"
    names = ("input", *(state + affine if isinstance(func, FunctionType) else affine + state), own, "momentum", "eps", "cudnn_enabled")

    def guarded(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        kept = {name: given.pop(name, None) for name in state}
        if any(isinstance(t, Tensor) and t.dtype in HALF for t in kept.values()):
            return func(*args, **kwargs)
        return route(dtype, lambda **others: func(**others, **kept), **given)

    return guarded
