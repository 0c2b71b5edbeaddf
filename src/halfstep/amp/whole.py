"""Products of a model that is in 16 bits as a whole (`*-true`), on a CPU: emulated where that was measured to be faster, as those under autocast are.

There is no autocast in such a model, so nothing is cast here. A product is emulated where all its floating operands are in the format of the policy;
with any others torch's own function runs, and its errors are torch's. What is no product stays torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from halfstep.amp import dropout, ops
from halfstep.amp.emulation import FAMILIES, ROUTES
from halfstep.amp.mode import Applied, Route, Tables, current, numbered
from halfstep.amp.rounding import rounded
from halfstep.hardware import emulated_families
from halfstep.policy import families_of

# sums of products that torch's autocast leaves alone on a CPU, and that a 16-bit kernel is as slow for as for a matrix product
_OTHERS = ops.names("mv addmv chain_matmul tensordot inner dot vdot bilinear gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")


def low_products(form: str, text: str) -> AbstractContextManager[Any]:
    """The block in which a model that is in `form` ("bf16", "fp16") as a whole runs on a CPU; text: how its products do.

    Where autocast is on, around it or inside it, that holds.
    """
    mode = current("cpu")
    find = _traced if torch.compiler.is_compiling() else _wanted
    return Applied("cpu", find(mode.tables.number if mode is not None else -1, form, text))


def _wanted(number: int, form: str, text: str) -> Tables:
    asked = families_of(text)
    return _beside(number, form, emulated_families(form) if asked is None else asked)


@functools.cache
def _beside(number: int, form: str, emulated: tuple[str, ...]) -> Tables:
    """The tables of that number (-1 for none), with the products of such a model instead of those of another around it."""
    around = numbered(number) if number >= 0 else Tables()
    return Tables(around.on, around.off, around.emulated, around.island, routes(form, emulated))


def _traced(number: int, form: str, text: str) -> Tables:
    """Those of a graph, made anew for each, as in autocast."""
    found = _wanted(number, form, text)
    return Tables(found.on, found.off, found.emulated, found.island, found.low)


_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in autocast


@functools.cache
def routes(form: str, emulated: tuple[str, ...]) -> Mapping[Any, Route]:
    """What products of `form` become where these families are emulated."""
    found: dict[Any, Route] = {function: ROUTES[function] for family in emulated for function in FAMILIES[family]}
    if "matmul" in emulated:
        found |= {torch.einsum: _einsum} | dict.fromkeys(ops.every_form(_OTHERS), rounded)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[form]
    return {function: _of_one_format(dtype, route) for function, route in found.items()} | dropout.ROUTE


@functools.cache
def _of_one_format(low: torch.dtype, route: Route) -> Route:
    """`route` for calls whose floating operands, also those in lists, are all in the format `low`; any other call is torch's own."""

    def run(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
        if not _is_all(low, args) or not _is_all(low, kwargs.values()):
            return func(*args, **kwargs)
        return route(low, func, *args, **kwargs)

    return run


def _is_all(low: torch.dtype, given: Any) -> bool:
    for value in given:
        if isinstance(value, Tensor):
            if value.dtype != low and value.is_floating_point():
                return False
        elif type(value) in (list, tuple) and not _is_all(low, value):
            return False
    return True


def _einsum(dtype: torch.dtype, func: Route, /, equation: Any, *operands: Any) -> Any:
    """torch.einsum: of three and more operands every one is taken for a product, of two those that multiply matrices."""
    tensors: Sequence[Any] = operands[0] if len(operands) == 1 and type(operands[0]) in (list, tuple) else operands
    route = rounded if isinstance(equation, str) and len(tensors) > 2 else ROUTES[torch.einsum]
    return route(dtype, func, equation, *operands)
