"""16-bit products on a CPU that has no 16-bit instructions, with the right numbers and at fp32's speed.

Such a CPU runs torch's bf16 and fp16 matrix products 30 to 60 times slower than fp32's. Here the operands are rounded
to 16 bits, multiplied in fp32 and the result is rounded to 16 bits: what a 16-bit product with fp32 accumulation is. Only
the order of the fp32 sums may differ from another implementation's.

`ROUTES` says which functions are rounded so; `Emulation` is a mode with these and nothing else. It acts inside one `with` block of one thread
and nowhere else, and it follows `torch.autocast` (nested blocks that switch autocast off, or to another dtype, are obeyed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from halfstep.amp.mode import OpMode, Route, Tables, current, without_autocast
from halfstep.amp.ops import forms


def _narrow_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dtype = inputs[0].dtype


# `x.to(dtype)` as one op that a compiler does not look into
_LIBRARY = torch.library.Library("halfstep", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("narrow(Tensor x, ScalarType dtype) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("narrow", lambda x, dtype: x.to(dtype, copy=True), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("narrow", lambda x, dtype: torch.empty_like(x, dtype=dtype), "Meta")  # type: ignore[no-untyped-call]
torch.library.register_autograd("halfstep::narrow", lambda ctx, grad: (grad.to(ctx.dtype), None), setup_context=_narrow_context, lib=_LIBRARY)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to a 16-bit format.

    torch.compile's inductor drops a rounding whose result is used in fp32 in the same kernel, which is what emulation consists of; it keeps ops that
    it does not know.
    """
    if torch.compiler.is_compiling() and x.dtype != dtype:
        return torch.ops.halfstep.narrow(x, dtype)  # type: ignore[no-any-return]
    return x.to(dtype)


def _exactly(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A product of fp32 tensors that stays in fp32 although autocast is on outside."""
    return without_autocast("cpu", function, *args, **kwargs)


class _Matmul(torch.autograd.Function):
    """y[..., n, m] = round(a[..., n, k] @ b[..., k, m]): 16-bit tensors in and out, fp32 inside, forward and backward.

    Saves the 16-bit operands: 2 bytes per element, as a native 16-bit product would.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return narrow(_exactly(torch.matmul, a.float(), b.float()), a.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wide = grad.float()
        grad_a = _fit(_exactly(torch.matmul, wide, b.float().mT), a) if ctx.needs_input_grad[0] else None
        grad_b = _fit(_exactly(torch.matmul, a.float().mT, wide), b) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


class _Linear(torch.autograd.Function):
    """y[n, m] = round(x[n, k] @ w[k, m] + bias[m]): the bias is added before the one rounding, as in a native 16-bit linear layer.

    Saves what torch's own 16-bit linear layer saves (2 bytes per element), so that either may stand in for the other when a
    forward pass is computed again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return narrow(_exactly(torch.addmm, bias.float(), x.float(), weight.float()), x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        need_x, need_w, need_b = ctx.needs_input_grad
        return (
            narrow(_exactly(torch.mm, wide, weight.float().mT), x.dtype) if need_x else None,
            narrow(_exactly(torch.mm, x.float().mT, wide), weight.dtype) if need_w else None,
            narrow(wide.sum(0), weight.dtype) if need_b else None,
        )


def _flat(t: Tensor) -> Tensor:
    """All rows along the last dimension: (..., k) to (n, k); a vector is one row."""
    return t[None] if t.dim() == 1 else t.flatten(0, -2)


def _fit(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over broadcast batch dimensions, in fp32, then round it."""
    return narrow(grad.sum_to_size(like.shape), like.dtype)


def _eligible(*tensors: Any) -> bool:
    """What autocast casts: floating CPU tensors that are not fp64. With anything else the original function runs."""
    return all(
        isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 and t.device.type == "cpu" and not t.is_nested for t in tensors
    )


def _forward_mode() -> bool:
    """Whether derivatives are taken in forward mode (torch.func.jvp, dual tensors), which the Functions here do not give: `rounded` does."""
    return bool(forward_ad._current_level >= 0)


def _product(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul's meaning for 1-D operands, then the rounded product."""
    a16, b16 = narrow(a, dtype), narrow(b, dtype)
    left, right = a16.dim() == 1, b16.dim() == 1
    if left or b16.dim() > 2 or right:
        y: Tensor = _Matmul.apply(a16[None] if left else a16, b16[:, None] if right else b16)  # type: ignore[no-untyped-call]
    else:  # a batch of `a` meets one matrix: one flat product
        y = _Matmul.apply(_flat(a16), b16).view(*a16.shape[:-1], b16.shape[-1])  # type: ignore[no-untyped-call]
    y = y.squeeze(-2) if left else y
    return y.squeeze(-1) if right else y


def _matmul(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
    named = [kwargs[k] for k in ("self", "input", "tensor", "mat2", "other") if k in kwargs]
    operands = [*args, *named]
    if len(operands) != 2 or len(named) != len(kwargs) or not _eligible(*operands):
        return func(*args, **kwargs)
    return rounded(dtype, func, *args, **kwargs) if _forward_mode() else _product(dtype, *operands)


def _rmatmul(dtype: torch.dtype, func: Route, /, right: Any, left: Any) -> Any:
    if not _eligible(left, right):
        return func(right, left)
    return rounded(dtype, func, right, left) if _forward_mode() else _product(dtype, left, right)


def _linear(dtype: torch.dtype, func: Route, /, input: Any, weight: Any, bias: Any = None) -> Any:
    if not _eligible(input, weight, *([] if bias is None else [bias])):
        return func(input, weight, bias)
    if weight.dim() != 2 or _forward_mode():
        return rounded(dtype, func, input, weight, bias)
    x, w = narrow(input, dtype), narrow(weight, dtype).mT
    if bias is None:
        return _product(dtype, x, w)
    y: Tensor = _Linear.apply(_flat(x), w, narrow(bias, dtype))  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


def rounded(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
    """Any function of tensors, also in lists (an LSTM's weights): operands rounded, the function in fp32, results rounded.

    Saves fp32 operands for backward. A recurrent network computes all its steps in fp32.
    """
    floats = [
        t for a in (*args, *kwargs.values()) for t in (a if type(a) in (list, tuple) else (a,)) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    if not floats or not _eligible(*floats) or kwargs.get("out") is not None:
        return func(*args, **kwargs)

    def up(value: Any) -> Any:
        if isinstance(value, Tensor):
            return narrow(value, dtype).float() if value.is_floating_point() else value
        return type(value)(up(v) for v in value) if type(value) in (list, tuple) else value

    result = _exactly(func, *(up(a) for a in args), **{k: up(v) for k, v in kwargs.items()})
    return narrow(result, dtype) if isinstance(result, Tensor) else tree_map(lambda t: _down(t, dtype), result)


def _down(value: Any, dtype: torch.dtype) -> Any:
    return narrow(value, dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _einsum(dtype: torch.dtype, func: Route, /, equation: Any, *operands: Any) -> Any:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or not _eligible(*tensors) or not _contracts(equation, tensors):
        return func(equation, *operands)
    return narrow(_exactly(func, equation, *(narrow(t, dtype).float() for t in tensors)), dtype)


def _contracts(equation: str, tensors: Sequence[Tensor]) -> bool:
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


ROUTES: Mapping[Any, Route] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.bmm: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.einsum: _einsum,
    **dict.fromkeys((torch.addmm, torch.baddbmm, torch.addbmm, Tensor.addmm, Tensor.baddbmm, Tensor.addbmm), rounded),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), rounded),
    F.scaled_dot_product_attention: rounded,
    **dict.fromkeys(forms("multi_dot") + forms("vecdot"), rounded),
    torch.lstm: rounded,  # torch's autocast casts LSTMs on the CPU, and neither GRUs nor plain RNNs
}


def is_active() -> bool:
    """Whether products are emulated in this thread; a second emulation inside would only repeat the work."""
    mode = current("cpu")
    return mode is not None and mode.tables.emulated


class Emulation(OpMode):
    """Inside this block, products that autocast would run in 16 bits on the CPU are rounded to 16 bits and run in fp32."""

    def __init__(self) -> None:
        super().__init__("cpu", Tables(on=ROUTES, emulated=True))
