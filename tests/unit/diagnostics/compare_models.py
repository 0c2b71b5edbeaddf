"""A small model with faults that can be planted in it, each by name; planted in nothing it is healthy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS, LENGTH = 16, 13, 8


class InBf16(torch.autograd.Function):
    """The same number, and a gradient that goes through bf16."""

    repeatable = True  # to halfstep's calibration of the loss scale

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(torch.bfloat16).to(grad.dtype)


class Attention(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        if self.fault == "mask":  # -inf in fp16, and a row of nothing else is NaN
            scores = scores + (1 - mask.to(scores.dtype)) * torch.tensor(-1e5).to(scores.dtype)
        else:
            scores = scores.masked_fill(mask == 0, -1e4)
        if self.fault == "softmax":
            narrow = scores.half()
            weights = narrow.exp() / narrow.exp().sum(-1, keepdim=True)
            return self.out(weights.float() @ v.float())
        return self.out(scores.softmax(-1).to(v.dtype) @ v)


class Norm(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "norm":  # the middle of the row is 0 in every format, and so is 1e-9 in fp16
            centred = x - x.mean(-1, keepdim=True)
            flat = centred * (torch.arange(x.shape[-2], device=x.device) > 0).to(x.dtype)[:, None]
            return flat / (flat.square().mean(-1, keepdim=True).to(x.dtype) + 1e-9).sqrt() * self.weight
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.before, self.between = Norm(fault), Norm("")
        self.attention = Attention(fault)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if fault == "overflow":
            self.up.weight.data *= 1e6

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), mask)
        if self.fault == "residual":
            x = x.half().float()
        if self.fault == "backward":
            x = InBf16.apply(x)
        if self.fault == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x + self.down(F.gelu(self.up(self.between(x)))).float()
        hidden = F.gelu(self.up(self.between(x)))
        return x + self.down(hidden)


class Positions(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.register_buffer("speeds", 10.0 ** -torch.linspace(0, 3, WIDTH // 2), persistent=False)
        self.table = nn.Embedding(1024, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(900, 900 + ids.shape[1])
        if self.fault == "positions":
            at = at.to(torch.bfloat16).long()
        if self.fault == "rotary":  # a product, which autocast runs in 16 bits
            angles = at[:, None].float() @ self.speeds[None]
            return torch.cat((angles.float().sin(), angles.float().cos()), -1)
        return self.table(at)


class Net(nn.Module):
    """Embeddings, two blocks of attention and two products each, a head; gives {"loss", "logits"}, or the logits alone without labels.

    fault: "" for none; those of blocks are in the second.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = Positions(fault)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(fault if i else "") for i in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor | None = None):
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril(-1)  # the first row sees nothing
        x = self.drop(self.words(ids) + self.positions(ids))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return logits if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Convolutions(nn.Module):
    """Convolutions with batch norms, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU()
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.net(x).mean((2, 3))), labels)}


class Recurrent(nn.Module):
    """torch's own encoder layer and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        states, _ = self.lstm(self.encoder(self.words(ids)))
        return {"loss": F.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())}


def texts(count: int = 2) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(5)
    return [{key: torch.randint(0, WORDS, (3, LENGTH), generator=made) for key in ("ids", "labels")} for _ in range(count)]


def images(count: int = 2) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(6)
    return [{"x": torch.randn(6, 3, 8, 8, generator=made), "labels": torch.randint(0, 5, (6,), generator=made)} for _ in range(count)]


class Router(nn.Module):
    """Chooses two of eight rows for each vector, by products of its own, and counts places; planted: in the vectors' format."""

    def __init__(self, planted: bool) -> None:
        super().__init__()
        self.planted, self.weight = planted, nn.Parameter(torch.randn(8, 16) * 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share, chosen = F.linear(x, self.weight).softmax(-1).topk(2, -1)
        return share, chosen, torch.arange(1000, dtype=x.dtype if self.planted else torch.float32).long()


class Experts(nn.Module):
    """Rows that a router chooses. The loss."""

    def __init__(self, planted: bool = False) -> None:
        super().__init__()
        self.enter, self.router, self.rows = nn.Linear(16, 16), Router(planted), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        share, chosen, _ = self.router(h)
        return ((self.rows[chosen] * share.unsqueeze(-1)).sum(-2) * h).square().mean()


class Spectrum(nn.Module):
    """The frequencies of vectors: complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x.float())


class Waves(nn.Module):
    """Complex numbers and weights between two layers. The loss."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.spectrum, self.leave = nn.Linear(16, 16), Spectrum(), nn.Linear(9, 4)
        self.factors = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave((self.spectrum(self.enter(x)) * self.factors).abs()).square().mean()
