"""Weights, gradients and comparisons for the tests of FusedAdamW against torch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (7,), (33, 3), (0,), (), (2, 3, 4))


def torchs(params: Any, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **settings)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def fill(params: list[nn.Parameter], seed: int, left_out: tuple[int, ...] = (), size: float = 1.0) -> None:
    made = torch.Generator().manual_seed(1000 + seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=made, dtype=torch.float64).to(p.dtype) * size
        p.grad = None if i in left_out else grad


def equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def counts(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[float | None]:
    return [float(optimizer.state[p]["step"]) if "step" in optimizer.state.get(p, {}) else None for p in params]


def same(ours: torch.optim.Optimizer, a: list[nn.Parameter], theirs: torch.optim.Optimizer, b: list[nn.Parameter]) -> None:
    """Weights, both moments and the number of steps are the same bits."""
    assert equal(a, b)
    assert counts(ours, a) == counts(theirs, b)
    for p, q in zip(a, b, strict=True):
        for key in ("exp_avg", "exp_avg_sq") if "step" in theirs.state.get(q, {}) else ():
            assert torch.equal(ours.state[p][key], theirs.state[q][key]), key


GROUPS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "one": lambda p: p,
    "other settings": lambda p: [
        {"params": p[:2], "lr": 0.3},
        {"params": p[2:4], "weight_decay": 0.0, "betas": (0.5, 0.7)},
        {"params": p[4:], "eps": 1e-3, "maximize": True},
    ],
    "equal settings": lambda p: [{"params": p[:1]}, {"params": p[1:5], "lr": 0.05}, {"params": p[5:]}],
    "named": lambda p: [(f"w{i}", x) for i, x in enumerate(p)],
    "a group of none": lambda p: [{"params": p[:3]}, {"params": [], "lr": 0.9}, {"params": p[3:], "lr": 0.2}],
}
