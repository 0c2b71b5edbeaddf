"""A small model whose table is the head's weight too, and what tests of kept tables ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.policy import parse

CPU = torch.device("cpu")
WORDS, WIDTH = 40, 16
SPLIT, SPLIT24 = "bf16-lean", "bf16-lean,weights=split24"


class Tied(nn.Module):
    """A table that is the head's weight too. `extra` is what else the forward pass does."""

    def __init__(
        self, kind: type[nn.Embedding] = nn.Embedding, tied: bool = True, extra: Callable[[Any], Any] | None = None, **settings: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = kind(WORDS, WIDTH, **settings)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.extra = extra

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(self.head(self.body(self.table(ids)).tanh()).flatten(0, 1).float(), ids.flatten())
        return loss if self.extra is None else loss + self.extra(self)


def bound(precision: str, model: nn.Module | None = None) -> Any:
    model = model or Tied()
    amp.bind(model, parse(precision), CPU)
    return model


def settled(precision: str = SPLIT, model: nn.Module | None = None) -> Any:
    made = bound(precision, model)
    made(ids())
    return made


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS // 2, (3, 7), generator=torch.Generator().manual_seed(seed))


def gradients(model: Any, passes: int = 1) -> dict[str, Tensor]:
    model.zero_grad()
    for i in range(passes):
        model(ids(i)).backward()
    return {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(0.3337).to(self.weight.dtype)


def frozen(tied: bool, exact: bool = True) -> Tied:
    model = Tied(tied=tied)
    model.table.weight.requires_grad_(False)
    with torch.no_grad():
        model.table.weight.copy_(model.table.weight.bfloat16() if exact else model.table.weight)
    return model
