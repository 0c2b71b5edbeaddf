"""The models and the data. Everything is random and made on the spot: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

Batch = Mapping[str, Tensor]
VOCABULARY = 32_000


@dataclass(frozen=True)
class Job:
    """What is trained on what. make: f() to a model, the same weights every time; samples: a map-style dataset of mappings."""

    make: Any
    samples: Dataset[Batch]
    batch: int

    def one_batch(self) -> dict[str, Tensor]:
        """The first batch."""
        rows = [self.samples[i] for i in range(self.batch)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def seeded(self) -> nn.Module:
        """The model, in training mode."""
        torch.manual_seed(0)
        return self.make().train()

    def parameters(self) -> int:
        """Of the model."""
        return sum(p.numel() for p in self.seeded().parameters())

    def operations(self) -> int:
        """Floating point operations of forward and backward of a batch, products and convolutions alone; counted in fp32."""
        model = self.seeded()
        with FlopCounterMode(display=False) as counter:
            model(**self.one_batch())["loss"].backward()
        return counter.get_total_flops()


class Samples(Dataset[Batch]):
    """A list of samples that repeats itself."""

    def __init__(self, rows: list[Batch], length: int = 4096) -> None:
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index % len(self.rows)]


def tokens(length: int, vocabulary: int) -> Samples:
    """Sequences of random tokens, each its own label."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocabulary, (64, length), generator=generator)
    return Samples([{"input_ids": row, "labels": row} for row in drawn])


def gpt2(batch: int, length: int, *, layers: int = 6, width: int = 384, vocabulary: int = VOCABULARY) -> Job:
    """GPT-2's blocks; by default 6 of width 384 and a vocabulary of 32,000, which makes 23 M parameters."""

    def make() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "vocab_size": vocabulary}
        return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=max(128, length), bos_token_id=0, eos_token_id=0))

    return Job(make, tokens(length, vocabulary), batch)


class ConvNet(nn.Module):
    """A plain residual net: a stem, then stages of blocks of two 3x3 convolutions with BatchNorm; 10 classes."""

    def __init__(self, width: int, stages: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        parts: list[nn.Module] = []
        for stage in range(stages):
            now = width * 2**stage
            if stage:
                parts += [nn.Conv2d(now // 2, now, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(now), nn.ReLU()]
            parts += [ConvBlock(now) for _ in range(blocks)]
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(width * 2 ** (stages - 1), 10)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits, and the loss with labels."""
        logits = self.head(self.body(self.stem(pixels)).mean((2, 3)))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


class ConvBlock(nn.Module):
    """x + two convolutions with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return F.relu(x + self.norm_two(self.two(F.relu(self.norm_one(self.one(x))))))


def convnet(batch: int, pixels: int, *, width: int = 32, stages: int = 3, blocks: int = 2) -> Job:
    """The residual net on random images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, pixels, pixels, generator=generator)
    classes = torch.randint(0, 10, (64,), generator=generator)
    return Job(lambda: ConvNet(width, stages, blocks), Samples([{"pixels": i, "labels": c} for i, c in zip(images, classes, strict=True)]), batch)


class Perceptron(nn.Module):
    """Three linear layers with GELU between them, a plain module; 120 k parameters by default."""

    def __init__(self, inputs: int = 64, width: int = 304, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits, and the loss with labels."""
        logits = self.layers(features)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def perceptron(batch: int) -> Job:
    """The small net on random features."""
    generator = torch.Generator().manual_seed(0)
    features, classes = torch.randn(64, 64, generator=generator), torch.randint(0, 10, (64,), generator=generator)
    return Job(Perceptron, Samples([{"features": f, "labels": c} for f, c in zip(features, classes, strict=True)]), batch)
