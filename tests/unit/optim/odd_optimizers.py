"""Optimizers that do unusual things, and weights and gradients for them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from halfstep.optim import full_values


class Counting(optim.Optimizer):
    """SGD that counts in its group, in an attribute, in a tensor of its group and in a state of no parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0, "total": torch.zeros(()), "seen": []})
        self.calls = 0
        self.first = self.param_groups[0]["params"][0]
        self.state["loose"] = {"calls": 0}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls += 1
        self.state["loose"]["calls"] += 1  # type: ignore[index]
        for group in self.param_groups:
            group["steps"] += 1
            group["total"] += 2
            group["seen"] = [*group["seen"], group["steps"]]
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["steps"])


class NormOfAll(optim.Optimizer):
    """SGD with all gradients divided by the norm of all of them, where that is above a bound."""

    def __init__(self, params: Any, bound: float = 1.0, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "bound": bound})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in held]))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / max(1.0, float(norm) / group["bound"]) * group["lr"])


class Picky(NormOfAll):
    """Only takes tensors of more than 8 elements."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() <= 9 < p.grad.numel() + 1:
                    raise ValueError("too small to be cut in blocks")
                p.sub_(p.grad * group["lr"])


class ById(optim.Optimizer):
    """Finds what it keeps by the id of a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rates = {id(p): 0.1 for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * self.rates[id(p)])


class Views(optim.Optimizer):
    """Holds the memory of its parameters, which a stand-in does not share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.views = [p.detach().view(-1) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for p, view in zip([p for group in self.param_groups for p in group["params"]], self.views, strict=False):
            if p.grad is not None:
                view[: p.grad.numel()] -= p.grad.reshape(-1) * self.defaults["lr"]


class Noisy(optim.Optimizer):
    """Draws from every random state there is."""

    def __init__(self, params: Any, generator: torch.Generator | None = None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    drawn = torch.randn(p.shape) + torch.randn(p.shape, generator=self.generator) + random.random() + np.random.random()
                    p.sub_(drawn * group["lr"])


class Schedulefree(optim.Optimizer):
    """Keeps the weights at a mix of two points while training, and at one of them for evaluation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "training": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", p.detach().clone()).sub_(p.grad * group["lr"])
                    p.sub_(p.grad * group["lr"] * 0.5)

    def _mix(self, share: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.data.lerp_(self.state[p]["z"], share)
            group["training"] = share > 0

    def eval(self) -> None:
        self._mix(-0.5)

    def train(self) -> None:
        self._mix(1 / 3)


class Sam(optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Around(optim.SGD):
    """Holds another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.base = optim.SGD(self.param_groups[0]["params"], lr=0.1)


def tensors(dtype: torch.dtype = torch.float32, shapes: Any = ((4, 5), (6,), (2, 2, 3), (7, 8))) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=draws).bfloat16().to(dtype)) for s in shapes]


def feed(held: list[Any], step: int = 0) -> None:
    draws = torch.Generator().manual_seed(step)
    for p in held:
        p.grad = torch.randn(p.shape, generator=draws).bfloat16().to(p.dtype)


def close(p: Tensor, q: Tensor) -> bool:
    """Within what split masters lose: an fp32 ulp where a value lies halfway between two 16-bit ones."""
    return float((p - full_values(q)).detach().abs().max()) <= 2.0**-22 * max(1.0, float(p.detach().abs().max()))


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(p, q) and torch.equal(full_values(p), full_values(q)) for p, q in zip(a, b, strict=True))
