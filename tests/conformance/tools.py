"""What the records share: small models, planted faults, and measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from conformance.adapter import Library, Refusal

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class _Spoil(torch.autograd.Function):
    """Nothing in the forward pass; the gradient times a factor in the backward pass."""

    repeatable = True  # saves nothing that a backward pass uses up; a library may ask

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


def overflowing(value: Tensor, factor: float = math.inf) -> Tensor:
    """`value`, whose gradient overflows at any loss scale."""
    return _Spoil.apply(value, factor)  # type: ignore[no-any-return,no-untyped-call]


def above(limit: float) -> Callable[[Tensor], Tensor]:
    """An fp16-like range for gradients: what is beyond `limit` in the backward pass is inf."""

    class Range(torch.autograd.Function):
        repeatable = True

        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            g = grads[0]
            return torch.where(g.abs() > limit, g * math.inf, g)

    return Range.apply


def weight(value: float = 1.0, size: int = 4) -> nn.Parameter:
    """A parameter of equal elements."""
    return nn.Parameter(torch.full((size,), value))


def pair(value: float = 1.0, lr: float | Tensor = 0.5, make: Callable[..., Optimizer] = SGD, **options: Any) -> tuple[nn.Parameter, Optimizer]:
    """A parameter and its optimizer."""
    w = weight(value)
    return w, make([w], lr=lr, **options)


def read(*values: Tensor) -> list[float]:
    """The first element of each, as numbers."""
    return [float(v.detach().flatten()[0]) for v in values]


def near(values: Any, wanted: Any, relative: float = 1e-5) -> bool:
    """Whether numbers agree to a relative error."""
    pairs = list(zip(values, wanted, strict=True)) if isinstance(values, list | tuple) else [(values, wanted)]
    return all(math.isclose(a, b, rel_tol=relative, abs_tol=1e-12) for a, b in pairs)


def copies(things: Iterable[Tensor]) -> list[Tensor]:
    """Values as they are now."""
    return [t.detach().clone() for t in things]


def same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether tensors are equal bit for bit (NaN is equal to nothing)."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def finite(things: Iterable[Tensor]) -> bool:
    """Whether every element of every tensor is finite."""
    return all(bool(t.isfinite().all()) for t in things)


def moved(before: Iterable[Tensor], now: Iterable[Tensor]) -> bool:
    """Whether any element changed."""
    return not same(before, now)


def dtype_here() -> torch.dtype:
    """What a product of fp32 tensors gives at this point."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


class Said:
    """Calls functions and keeps what the library refused; other errors go through."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.refusals: list[Refusal] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            refusal = self.library.refusal(error)
            if refusal is None:
                raise
            self.refusals.append(refusal)
            return None

    def names(self, word: str) -> bool:
        """Whether some refusal has the word in its cause, and a remedy."""
        return any(word in r.cause and bool(r.remedy) for r in self.refusals)
