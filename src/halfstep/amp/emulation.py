"""16-bit products on a CPU that has no 16-bit instructions, with the right numbers and at fp32's speed.

Such a CPU runs torch's bf16 and fp16 matrix products 30 to 60 times slower than fp32's. Here the operands are rounded
to 16 bits, multiplied in fp32 and the result is rounded to 16 bits: what a 16-bit product with fp32 accumulation is. Only
the order of the fp32 sums may differ from another implementation's.

`Emulation` is a TorchFunctionMode: it acts inside one `with` block of one thread and nowhere else, and it follows
`torch.autocast` (nested blocks that switch autocast off, or to another dtype, are obeyed).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

Route = Callable[..., Any]


def _exact() -> torch.autocast:
    """The block in which a product of fp32 tensors stays in fp32 although autocast is on outside."""
    return torch.autocast("cpu", enabled=False)


class _Matmul(torch.autograd.Function):
    """y[..., n, m] = round(a[..., n, k] @ b[..., k, m]): 16-bit tensors in and out, fp32 inside, forward and backward.

    Saves the 16-bit operands: 2 bytes per element, as a native 16-bit product would.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with _exact():
            return torch.matmul(a.float(), b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wide = grad.float()
        with _exact():
            grad_a = _fit(torch.matmul(wide, b.float().mT), a) if ctx.needs_input_grad[0] else None
            grad_b = _weight_grad(wide, a, b) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


def _weight_grad(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Gradient of b in a @ b, in b's dtype; one flat product when a batch of `a` meets one matrix `b`."""
    if b.dim() == 2:
        return torch.matmul(a.reshape(-1, a.shape[-1]).float().mT, grad.reshape(-1, grad.shape[-1])).to(b.dtype)
    return _fit(torch.matmul(a.float().mT, grad), b)


def _fit(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over broadcast batch dimensions, in fp32, then round it."""
    return grad.sum_to_size(like.shape).to(like.dtype)


def _eligible(*tensors: Any) -> bool:
    """What autocast casts: floating CPU tensors that are not fp64. With anything else the original function runs."""
    return all(isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 and t.device.type == "cpu" for t in tensors)


def _product(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul's meaning for 1-D operands, then the rounded product."""
    a16, b16 = a.to(dtype), b.to(dtype)
    left, right = a16.dim() == 1, b16.dim() == 1
    y: Tensor = _Matmul.apply(a16[None] if left else a16, b16[:, None] if right else b16)  # type: ignore[no-untyped-call]
    y = y.squeeze(-2) if left else y
    return y.squeeze(-1) if right else y


def _matmul(dtype: torch.dtype, func: Route, a: Any, b: Any, **options: Any) -> Any:
    if options or not _eligible(a, b):
        return func(a, b, **options)
    return _product(dtype, a, b)


def _rmatmul(dtype: torch.dtype, func: Route, b: Any, a: Any) -> Any:
    return _matmul(dtype, lambda left, right: func(right, left), a, b)


def _linear(dtype: torch.dtype, func: Route, input: Any, weight: Any, bias: Any = None) -> Any:
    if not _eligible(input, weight, *([] if bias is None else [bias])):
        return func(input, weight, bias)
    a16, w16 = input.to(dtype), weight.to(dtype)
    if bias is None:
        return _product(dtype, a16, w16.mT)
    return _Linear.apply(a16, w16, bias.to(dtype))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """y = round(x @ w.T + bias), the bias added before the one rounding as in a native 16-bit linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with _exact():
            return F.linear(x.float(), weight.float(), bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        need_x, need_w, need_b = ctx.needs_input_grad
        flat = wide.reshape(-1, wide.shape[-1])
        with _exact():
            return (
                torch.matmul(wide, weight.float()).to(x.dtype) if need_x else None,
                torch.matmul(flat.mT, x.reshape(-1, x.shape[-1]).float()).to(weight.dtype) if need_w else None,
                flat.sum(0).to(weight.dtype) if need_b else None,
            )


def _rounded(dtype: torch.dtype, func: Route, *args: Any, **kwargs: Any) -> Any:
    """Any function of tensors: operands rounded, the function in fp32, results rounded. Saves fp32 operands for backward."""
    floats = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()]
    if not floats or not _eligible(*floats) or kwargs.get("out") is not None:
        return func(*args, **kwargs)

    def up(value: Any) -> Any:
        return value.to(dtype).float() if isinstance(value, Tensor) and value.is_floating_point() else value

    with _exact():
        result = func(*(up(a) for a in args), **{k: up(v) for k, v in kwargs.items()})
    return result.to(dtype) if isinstance(result, Tensor) else result


def _einsum(dtype: torch.dtype, func: Route, equation: Any, *operands: Any) -> Any:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or not _eligible(*tensors):
        return func(equation, *operands)
    with _exact():
        return func(equation, *(t.to(dtype).float() for t in tensors)).to(dtype)


@functools.cache
def _opened(func: types.FunctionType) -> Route:
    """A copy of a composite function of torch that does not hand itself back to the mode, so that its inner products are seen."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = func.__globals__ | {name: lambda *_: False for name in names if name in func.__globals__}
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


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
    **dict.fromkeys((torch.addmm, torch.baddbmm, torch.addbmm, Tensor.addmm, Tensor.baddbmm, Tensor.addbmm), _rounded),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _rounded),
    F.scaled_dot_product_attention: _rounded,
}


def is_active() -> bool:
    """Whether an `Emulation` block is open in this thread; a second one inside it would only repeat its work."""
    return any(isinstance(mode, Emulation) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


class Emulation(TorchFunctionMode):
    """Inside this block, products that autocast would run in 16 bits on the CPU are rounded to 16 bits and run in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _opened(func)(*args, **kwargs)
        route = ROUTES.get(func)
        if route is None or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        return route(torch.get_autocast_dtype("cpu"), func, *args, **kwargs)
