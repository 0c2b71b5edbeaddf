"""A small GPT over bytes, written to be read: the model that `halfstep train` trains when it is given nothing else.

Shapes: B batch, T positions, C width, H heads, V = 256 byte values.
Source of the architecture: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2), with
tied input and output embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import ConfigError

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Model: the shape of the GPT.

    Args:
        block_size: positions the model can look back on.
        layers: transformer blocks.
        heads: attention heads per block; they share the width equally.
        width: numbers per position.
        dropout: share of activations dropped while training.
    """

    block_size: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("block_size", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}", "Use 1 or more.")
        if self.block_size == 1:
            raise ConfigError("block_size=1 leaves no next byte to predict", "Use 2 or more.")
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} cannot be shared by heads={self.heads}", "Use a width that is a multiple of the heads.")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout={self.dropout}", "Use a share of 0 or more and below 1.")


class Attention(nn.Module):
    """Causal self-attention: every position looks at itself and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C) to (B, T, C)."""
        batch, positions, width = x.shape
        heads = self.query_key_value(x).view(batch, positions, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        mixed: Tensor = self.output(y.transpose(1, 2).reshape(batch, positions, width))
        return mixed


class Block(nn.Module):
    """Attention, then a two-layer network per position; each reads a normalised copy and adds its result."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_network = nn.LayerNorm(config.width)
        self.network = nn.Sequential(nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C) to (B, T, C)."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        change: Tensor = self.dropout(self.network(self.norm_network(x)))
        return x + change


class GPT(nn.Module):
    """Predicts the next byte from those before it. 4 bytes per parameter in fp32; `parameters_count` says how many."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.shape = config
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.bytes.weight  # tied

    def _initialise(self, module: nn.Module) -> None:
        """Normal weights of spread 0.02, smaller where 2 * layers results are added up, as in GPT-2."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for last in (module.attention.output, module.network[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * self.shape.layers))  # type: ignore[arg-type]

    @property
    def parameters_count(self) -> int:
        """Trainable numbers, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """input_ids: (B, T) bytes; labels: (B, T), the same bytes (they are shifted here; -100 leaves a place out).

        Returns logits (B, T, V) and, with labels, the mean loss in nats per byte, computed in fp32.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.bytes(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        predicted = logits[:, :-1].float().reshape(-1, VOCABULARY)
        return {"loss": F.cross_entropy(predicted, labels[:, 1:].reshape(-1), ignore_index=-100), "logits": logits}

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`prompt` and `length` more bytes, drawn from the model's predictions with a random generator of its own."""
        if not prompt:
            raise ConfigError("the prompt is empty, and the model continues a text", "Give it at least one byte.")
        was_training, device = self.training, self.head.weight.device
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(length):
            window = torch.tensor([text[1 - self.shape.block_size :]], device=device)  # the last position has no next byte in training
            logits = self(window)["logits"][0, -1].float().cpu()
            text.append(int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)))
        self.train(was_training)
        return bytes(text)
