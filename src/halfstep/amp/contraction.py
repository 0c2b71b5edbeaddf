"""einsum of 16-bit tensors on a CPU: computed in fp32 with one rounding, forward and backward. Only the 16-bit operands are saved."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.amp.mode import Route
from halfstep.amp.rounding import again, applied, eligible, exactly, forward_mode, gradients_again, narrow, recorded, transformed, unseen
from halfstep.amp.scratch import is_batch


def _contracted(left: str, right: str, out: str, a: Tensor, b: Tensor) -> Tensor:
    return narrow(torch.einsum(f"{left},{right}->{out}", a.float(), b.float()), a.dtype)


def _gradients(left: str, right: str, out: str, grad: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    wide = grad.float()
    return (
        narrow(torch.einsum(f"{out},{right}->{left}", wide, b.float()), a.dtype) if needs[0] else None,
        narrow(torch.einsum(f"{out},{left}->{right}", wide, a.float()), b.dtype) if needs[1] else None,
    )


class _Contraction(torch.autograd.Function):
    """round(einsum("left,right->out", a, b)) where every index stands in two of the three: then the gradients are einsums of the same kind."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, left: str, right: str, out: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.indices = (left, right, out)
        return exactly(_contracted, left, right, out, a, b)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_batch(grad):
            call = functools.partial(_contracted, *ctx.indices)
            return (*unseen(gradients_again, call, ctx.saved_tensors, ctx.needs_input_grad[:2], grad), None, None, None)
        return (*unseen(_gradients, *ctx.indices, grad, *ctx.saved_tensors, ctx.needs_input_grad[:2]), None, None, None)


def _indices(equation: str, tensors: Sequence[Tensor]) -> tuple[str, str, str] | None:
    """The indices of two operands and of the result, with letters for `...`; None where one stands in a single place, or twice in one."""
    left, arrow, out = equation.replace(" ", "").replace("...", ".").partition("->")
    terms = left.split(",")
    free = "".join(i for i in string.ascii_letters if i not in equation)
    hidden = [t.dim() - len(term) + 1 if "." in term else 0 for term, t in zip(terms, tensors, strict=True)]
    if max(hidden) > len(free) or min(hidden) < 0 or any(t.dim() != len(term) for term, t in zip(terms, tensors, strict=True) if "." not in term):
        return None
    if not arrow:
        shown = "".join(terms)
        out = ("." if "." in shown else "") + "".join(sorted(i for i in set(shown) - {"."} if shown.count(i) == 1))
    one, two = (term.replace(".", free[:n][::-1]) for term, n in zip(terms, hidden, strict=True))  # from the right: broadcasting adds on the left
    result = out.replace(".", free[: max(hidden)][::-1])
    sizes: dict[str, int] = {}
    for term, t in zip((one, two), tensors, strict=True):
        for i, size in zip(term, t.shape, strict=True):
            if sizes.setdefault(i, size) != size:
                return None
    every = [set(one), set(two), set(result)]
    if [len(s) for s in every] != [len(one), len(two), len(result)] or any(sum(i in s for s in every) < 2 for i in set().union(*every)):
        return None
    return one, two, result


def contracts(equation: str, tensors: Sequence[Tensor]) -> bool:
    """Whether an einsum of two tensors sums over an index of both: torch then multiplies matrices, which autocast casts.

    Without such an index it multiplies elements, in the dtype of the operands (rotary tables stay exact). Einsums of
    three and more tensors are left to torch.
    """
    left, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or len(tensors) != 2:
        return False
    summed = {i for i in set(terms[0]) & set(terms[1]) - {"."} if not arrow or i not in output}
    places = [{i: t.index(i) if "." not in t[: t.index(i)] else t.index(i) - len(t) for i in summed} for t in terms]
    return any(all(x.shape[place[i]] != 1 for x, place in zip(tensors, places, strict=True)) for i in summed)


def einsum(dtype: torch.dtype, func: Route, /, equation: Any, *operands: Any) -> Any:
    """torch.einsum."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or not eligible(*tensors) or not contracts(equation, tensors):
        return func(equation, *operands)
    if forward_mode() or transformed():
        return narrow(exactly(func, equation, *(narrow(t, dtype).float() for t in tensors)), dtype)
    indices = _indices(equation, tensors)
    if indices is None:
        return again(dtype, functools.partial(func, equation), *tensors)
    a, b = (narrow(t, dtype) for t in tensors)
    if recorded(a, b):
        return applied(_Contraction, a, b, *indices)
    return exactly(_contracted, *indices, a, b)
