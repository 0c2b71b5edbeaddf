"""Modules of other libraries that are written out in many small operations, in fewer passes over memory with the same bits, on a CPU.

Each is recognised by its function and proven at its first use, for each op policy and format: the module's own code runs on every number of the
format, and where a bit of its result or gradient is another, it goes on running.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import scratch
from halfstep.amp.mode import current
from halfstep.amp.rounding import applied, exactly, forward_mode, transformed, unseen
from halfstep.kernels import gelu_kernels
from halfstep.numerics.standins import is_shape

KNOWN = (("transformers.activations", "NewGELUActivation.forward"),)
SMALLEST = 1 << 14  # elements from which on it is faster
FORMATS = (torch.bfloat16, torch.float16)


class _Gelu(torch.autograd.Function):
    """Keeps its operand and the tanh, 6 bytes an element: torch's operations keep 14."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: ModuleType) -> Tensor:
        y, t = exactly(kernels.forward, x)
        ctx.save_for_backward(x, t)
        ctx.kernels = kernels
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return unseen(_gradient, grad, *ctx.saved_tensors, ctx.kernels), None


def _gradient(grad: Tensor, x: Tensor, t: Tensor, kernels: ModuleType) -> Tensor:
    twice = torch.is_grad_enabled()  # it will be differentiated in its turn
    if not twice and not scratch.is_batch(grad):
        return kernels.backward(x, t, grad.resolve_neg().contiguous())  # type: ignore[no-any-return]
    with torch.enable_grad():
        leaf = x if twice else x.detach().requires_grad_()
        y = 0.5 * leaf * (1.0 + torch.tanh(kernels.ROOT * (leaf + kernels.CUBE * torch.pow(leaf.float(), 3.0))))
    return torch.autograd.grad(y, leaf, grad, create_graph=twice)[0]


def in_fewer_passes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward method of a submodule, as a function of (module, input), in fewer passes if it is one of KNOWN; else itself."""
    if (getattr(forward, "__module__", None), getattr(forward, "__qualname__", None)) not in KNOWN:
        return forward

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and _takes(args[0]) and (kernels := gelu_kernels()) is not None and _is_proven(forward, self, args[0]):
            return applied(_Gelu, args[0], kernels)
        return forward(self, *args, **kwargs)

    return run


def _takes(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.dtype not in FORMATS or x.device.type != "cpu" or x.numel() < SMALLEST:
        return False
    if transformed() or forward_mode() or torch._C._len_torch_function_stack() != 1 or not torch.is_autocast_enabled("cpu"):
        return False  # somebody looks on, operation by operation
    kept = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # tensors that are kept are packed, or made again under conditions
    return not kept and scratch.plain(x) and x.is_contiguous() and not x.is_neg() and not is_shape(x) and x.requires_grad and torch.is_grad_enabled()


_proven: dict[tuple[Any, ...], bool] = {}


def _is_proven(forward: Callable[..., Any], module: nn.Module, x: Tensor) -> bool:
    """Whether, for this op policy and format, result and gradient have the bits of the module's own code."""
    mode = current("cpu")
    key = (forward, mode.tables.number if mode is not None else -1, x.dtype)
    if key not in _proven:
        _proven[key] = _prove(forward, module, x.dtype)
    return _proven[key]


def _prove(forward: Callable[..., Any], module: nn.Module, dtype: torch.dtype) -> bool:
    kernels = gelu_kernels()
    if kernels is None:
        return False
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)  # every number there is
    above = torch.linspace(-3, 3, 1 << 16, dtype=torch.float32) ** 3
    found = []
    with torch.inference_mode(False), torch.enable_grad():
        for ours in (False, True):
            leaf = codes.clone().requires_grad_()
            y: Tensor = applied(_Gelu, leaf, kernels) if ours else forward(module, leaf)
            found.append((y.detach(), torch.autograd.grad(y, leaf, above.to(y.dtype))[0]))
    return all(a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(*found, strict=True))
