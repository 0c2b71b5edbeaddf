"""Small models with one planted fault each, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEAR, FAR = 2.5e4, 5e3  # sizes of a weight: outputs within a factor of 4 of fp16's range, and well inside


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 8, generator=numbers), "labels": torch.randn(8, 4, generator=numbers)} for _ in range(count)]


class Apply(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Scores(nn.Module):
    """Attention by hand, its scores not scaled: they pass 65,504, and nothing that a part gives does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.q.weight.mul_(600)
            self.k.weight.mul_(600)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.matmul(self.q(x), self.k(x).transpose(-1, -2)), -1) @ x


class Sum(nn.Module):
    """Adds up what its parts give, in its own code."""

    def __init__(self, parts: int = 12, size: float = 3e3) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(parts))
        with torch.no_grad():
            for part in self.parts:
                part.weight.copy_(size * torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        total = self.parts[0](x)
        for part in self.parts[1:]:
            total = total + part(x)
        return total


class Net(nn.Module):
    """Something of the test between two layers, behind a norm that makes of any size the same."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.norm, self.last = nn.Linear(8, 16), nn.Sequential(*between), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.last(self.norm(self.between(self.first(x)))), labels)}


def net(*between: nn.Module) -> Net:
    torch.manual_seed(0)
    return Net(*between)


def large_fp32() -> nn.Module:
    """A sum in fp32 of some 1e6, which the layer behind it reads in 16 bits."""
    return nn.Sequential(nn.LayerNorm(16), Apply(lambda x: x.float() * 1e6), nn.Linear(16, 16))


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0.5, -1e9).softmax(-1)


def masked_as_transformers(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.float32).masked_fill(x > 3, torch.finfo(torch.float32).min)
    return (x + mask).softmax(-1)


def divided(x: Tensor) -> Tensor:
    return x / (x.abs() + 1e-8)


def amplified(x: Tensor) -> Tensor:
    """What is left of x after its whole tenths: an input that is off by little makes it another."""
    return (x * 100).frac()


def cancelled(x: Tensor) -> Tensor:
    return (x + 3000.0) - 3000.0


class Everything(nn.Module):
    """A tied table, a frozen layer, a batch norm, dropout and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.frozen, self.norm = nn.Embedding(16, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.head, self.calls = nn.Dropout(0.2), nn.Linear(8, 16, bias=False), 0
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.frozen(self.table(ids)).transpose(1, 2)).transpose(1, 2))
        return F.cross_entropy(self.head(h).float().flatten(0, 1), ids.flatten())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that a look at a model must leave as it was, as plain values."""
    found: dict[str, Any] = {"rng": torch.get_rng_state().tolist(), "modes": [part.training for part in model.modules()]}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        bits = t.detach().clone().reshape(-1).view(torch.uint8).tolist()
        gradient = None if t.grad is None else (id(t.grad), t.grad.tolist())
        found[name] = (t.data_ptr(), t.dtype, t.requires_grad, bits, gradient, sorted(t.__dict__))
    for name, part in model.named_modules():
        hooks = [len(v) for k, v in part.__dict__.items() if k.endswith("_hooks")]
        found[f"{name}:"] = (sorted(part.__dict__), hooks, part.__dict__.get("calls"))
    return found
