"""A small model as T5 is, whose feed-forward blocks leave fp16's range, and rows for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BEYOND = 2e5  # the size of a weight: outputs come to some 1e5, beyond fp16's range
CULPRIT = "blocks.1.wo"  # of t5_like(1.0, BEYOND)


class FeedForward(nn.Module):
    """T5's: a norm, a wide layer, and a way round it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wi, self.drop, self.wo = nn.LayerNorm(16), nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(self.drop(F.relu(self.wi(self.norm(x)))))


class T5Like(nn.Module):
    """Blocks whose last layers give values as large as their weights are told to be; the norm behind them does not mind."""

    def __init__(self, *sizes: float, hide: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 16), nn.ModuleList(FeedForward() for _ in sizes)
        self.norm, self.head, self.hide = nn.LayerNorm(16), nn.Linear(16, 4), hide
        with torch.no_grad():
            for block, size in zip(self.blocks, sizes, strict=True):
                block.wo.weight.mul_(size)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            h = h.nan_to_num(0.0, 0.0, 0.0) if self.hide else h  # what has overflowed is not seen any more
        return {"loss": F.mse_loss(self.head(self.norm(h)).float(), labels)}


def t5_like(*sizes: float, hide: bool = False) -> T5Like:
    torch.manual_seed(0)
    return T5Like(*sizes, hide=hide)


def rows(count: int) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [{"x": x, "labels": x[:4]} for x in torch.randn(count, 8, generator=numbers)]


def batch_of(some: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {k: torch.stack([row[k] for row in some]) for k in ("x", "labels")}
