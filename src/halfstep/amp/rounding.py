"""Rounding to 16 bits, and running any function of tensors on rounded operands in fp32: what the 16-bit products on a CPU are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from halfstep.amp.mode import Route, without_autocast


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


def exactly(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A product of fp32 tensors that stays in fp32 although autocast is on outside."""
    return without_autocast("cpu", function, *args, **kwargs)


def unseen(function: Callable[..., Any], /, *args: Any) -> Any:
    """The same in a backward pass: the modes that are open there do not look at the ops inside, which saves their 3 us for each."""
    if torch.compiler.is_compiling():
        return exactly(function, *args)
    with torch._C.DisableTorchFunction():
        return without_autocast("cpu", function, *args)


def eligible(*tensors: Any) -> bool:
    """What autocast casts: floating CPU tensors that are not fp64. With anything else the original function runs."""
    return all(
        isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 and t.device.type == "cpu" and not t.is_nested for t in tensors
    )


def forward_mode() -> bool:
    """Whether derivatives are taken in forward mode (torch.func.jvp, dual tensors), which the Functions here do not give: `rounded` does."""
    return bool(forward_ad._current_level >= 0)


def transformed() -> bool:
    """Whether a compiler traces or torch.func transforms what runs now: tensors may then stand for others, and only out-of-place ops will do."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def recorded(*tensors: Tensor | None) -> bool:
    """Whether what becomes of these will be differentiated."""
    return transformed() or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))


def applied(function: type[torch.autograd.Function], /, *args: Any) -> Any:
    """`function.apply(*args)`, without the look at its signature, which takes 15 us, where no transform is active."""
    if transformed():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def rounded(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
    """Any function of tensors, also in lists (an LSTM's weights): operands rounded, the function in fp32, results rounded.

    Saves fp32 operands for backward. A recurrent network computes all its steps in fp32.
    """
    floats = [
        t for a in (*args, *kwargs.values()) for t in (a if type(a) in (list, tuple) else (a,)) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    if not floats or not eligible(*floats) or kwargs.get("out") is not None:
        return func(*args, **kwargs)

    def up(value: Any) -> Any:
        if isinstance(value, Tensor):
            return narrow(value, dtype).float() if value.is_floating_point() else value
        return type(value)(up(v) for v in value) if type(value) in (list, tuple) else value

    result = exactly(func, *(up(a) for a in args), **{k: up(v) for k, v in kwargs.items()})
    return narrow(result, dtype) if isinstance(result, Tensor) else tree_map(lambda t: _down(t, dtype), result)


def _down(value: Any, dtype: torch.dtype) -> Any:
    return narrow(value, dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _up(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t


class _Again(torch.autograd.Function):
    """round(call(*tensors)) in fp32. Saves the 16-bit tensors that it is given, and computes `call` a second time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return narrow(exactly(call, *map(_up, tensors)), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *unseen(gradients_again, ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:], grad))


def gradients_again(call: Callable[..., Tensor], tensors: tuple[Tensor, ...], needs: tuple[bool, ...], grad: Tensor) -> list[Tensor | None]:
    """Gradients of 16-bit tensors, rounded once, from an fp32 `call` that is computed here once more; those of them too where asked for."""
    twice = torch.is_grad_enabled()  # the gradients will be differentiated in their turn
    with torch.enable_grad():
        wide = [t.float() if twice and need else _up(t).detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        wanted = [t for t, need in zip(wide, needs, strict=True) if need]
        found = iter(torch.autograd.grad(call(*wide), wanted, grad.float(), create_graph=twice, allow_unused=True, materialize_grads=True))
    return [narrow(next(found), t.dtype) if need else None for t, need in zip(tensors, needs, strict=True)]


def again(dtype: torch.dtype, call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """round(call(*tensors)): floating tensors are rounded to `dtype`, the function is computed in fp32, and its one result is rounded.

    call: no random numbers in it. Only the 16-bit tensors are kept for the backward pass, at the price of a second forward pass there.
    """
    if forward_mode() or transformed():
        return rounded(dtype, call, *tensors)  # type: ignore[no-any-return]
    given = [narrow(t, dtype) if t.is_floating_point() else t for t in tensors]
    if not recorded(*given):
        return narrow(exactly(call, *map(_up, given)), dtype)
    return applied(_Again, dtype, call, *given)  # type: ignore[no-any-return]
