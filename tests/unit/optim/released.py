"""A small model, its batches, and the bits that a run leaves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.optim import master_of

Make = Callable[[nn.Module], Any]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)


def batch(step: int) -> Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(step))


def bits(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Weights, residuals and states."""
    found = []
    for p in model.parameters():
        master = master_of(p)
        found += [p.detach(), *([] if master is None or master.residual is None else [master.residual])]
        found += [t for _, t in sorted(optimizer.state[p].items()) if isinstance(t, Tensor)]
    return [t.clone() for t in found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(map(flat, a), map(flat, b), strict=True))


def flat(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1)
