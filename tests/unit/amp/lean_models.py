"""A small model for the tests of 16-bit weights, and what they compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.optim import AdamW, master_of
from halfstep.policy import parse

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Net(nn.Module):
    """Two linear layers and a norm. `extra` is what else its forward pass does."""

    def __init__(self, extra: Callable[[Net], Any] | None = None) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.full((4,), 0.1))
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.norm(F.gelu(self.one(x)))) + self.shift
        return y if self.extra is None else y + self.extra(self)


def net(precision: str | None, extra: Callable[[Net], Any] | None = None, loaded: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net(extra).to(loaded)
    if precision is not None:
        amp.bind(model, parse(precision), CPU)
    return model


def gradients(model: nn.Module, *inputs: Any) -> list[Tensor]:
    model.zero_grad()
    model(*inputs).square().sum().backward()
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: master.read() for name, p in model.named_parameters() if (master := master_of(p)) is not None}


def trained(precision: str = "bf16-lean", steps: int = 3) -> Net:
    """After a few steps, so that residuals are not those of the first cast."""
    model = net(precision)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        gradients(model, X)
        optimizer.step()
    return model


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


KEPT = ["one.weight", "one.bias", "two.weight", "two.bias"]
