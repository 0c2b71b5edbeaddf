"""A small training run whose state can be saved and loaded, for tests of both."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.optim import AdamW, full_values, master_of

STORAGES = ["split", "split24", "kahan", "stochastic", "plain"]
SHAPES = ((20, 13), (300,), (), (2, 3, 2, 2))


class Net(nn.Module):
    """Weights of several shapes, in 16 bits or fp32, and one that stays fp32."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"w{i}", nn.Parameter((torch.randn(shape, generator=g) * 0.1).to(dtype)))
        self.norm = nn.Parameter(torch.randn(5, generator=g))


class Run:
    """A model and its optimizer. kind: the dtype of its weights; storage: None for fp32 ones, or for masters of a loaded state."""

    def __init__(self, storage: str | None, states: str | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        self.net = Net(dtype, seed)
        params = list(self.net.parameters())
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.2}]
        self.optimizer = AdamW(groups, lr=3e-4, weights=storage, states=states)

    def steps(self, first: int, last: int) -> "Run":
        for step in range(first, last):
            g = torch.Generator().manual_seed(step)
            for i, p in enumerate(self.net.parameters()):
                drawn = torch.randn(p.shape, generator=g).bfloat16() * 0.1  # numbers that fp16 and fp32 hold too
                p.grad = None if (i + step) % 4 == 0 else drawn.to(p.dtype)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def save(self) -> dict[str, Any]:
        """Through a file, as torch loads what it does not trust."""
        buffer = io.BytesIO()
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        found: dict[str, Any] = torch.load(buffer, weights_only=True)
        return found

    def load(self, saved: Mapping[str, Any], order: str = "model first") -> "Run":
        if order == "model first":
            self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if order != "model first":
            self.net.load_state_dict(saved["model"])
        return self

    def bits(self) -> list[Tensor]:
        found: list[Tensor] = []
        for p in self.net.parameters():
            master = master_of(p)
            found += [p.detach(), *([] if master is None or master.residual is None else [master.residual])]
            found += [t for _, t in sorted(self.optimizer.state[p].items())] if p in self.optimizer.state else []
        return [t.clone() for t in found]

    def values(self) -> list[Tensor]:
        return [full_values(p) for p in self.net.parameters()]


def raw(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))
