"""Integers, positions and tables in 16 bits (kind H)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import Library, Record, collector
from conformance.diagnosed import NAMED, identity, named, seen, whole
from conformance.tools import BF16, F16

RECORDS: list[Record] = []
record = collector(RECORDS, "H")


def _counted(
    name: str,
    title: str,
    today: str,
    function: Callable[[Tensor], Tensor],
    place: str,
    dtype: torch.dtype,
    refs: Sequence[str] = (),
    named: bool = True,
) -> None:
    """A record of integers that a block's values are joined with; the check is on every one of them. named: a diagnosis is an answer."""

    @record(
        name,
        title,
        today=today,
        right=f"every one as it was, {NAMED} (table, {place})" if named else "every one as it was",
        check=lambda v: v.right or (named and v.names(("table",), place)),
        refused=(place,) if named else None,
        doors=("loop", "accelerator"),
        refs=tuple(refs),
    )
    def counted(library: Library) -> Any:
        return seen(library, lambda h: function(h).float() + 0 * h.float().sum(), torch.zeros(1, 2), place, dtype=dtype, margin=0.0)


IDS = torch.tensor([257, 1001, 2049, 50256])
LONG = torch.ones(600, dtype=torch.long)


def _one_hot(h: Tensor) -> Tensor:
    """One row per label; every row should add up to 1."""
    labels, classes = torch.arange(2040, 2060), torch.arange(2100)
    return (labels.to(h.dtype)[:, None] == classes.to(h.dtype)[None, :]).float().sum(-1)


_counted(
    "positions-cast-to-the-layers-dtype",
    "positions 0 to 999 cast to the dtype of a bf16 block's values",
    "507 different values are left",
    lambda h: torch.arange(1000).to(h.dtype),
    "positions",
    BF16,
    refs=("case 45",),
)
_counted(
    "positions-made-in-the-layers-dtype",
    "torch.arange(1000, dtype=h.dtype) in a bf16 block: distances of an ALiBi bias",
    "507 different values are left",
    lambda h: torch.arange(1000, dtype=h.dtype),
    "distances",
    BF16,
    refs=("case 45",),
)
_counted(
    "pixels-counted-in-the-layers-dtype",
    "a grid of 4096 pixel centres, torch.arange(4096).to(h.dtype) + 0.5, in an fp16 block",
    "from 1024 on the half is lost, from 2048 on every second pixel",
    lambda h: torch.arange(4096).to(h.dtype) + 0.5,
    "grid",
    F16,
)
_counted(
    "ids-through-bf16",
    "token ids joined to bf16 features and taken out again: torch.cat([h, ids.to(h.dtype)])[2:].long()",
    "other ids: 257 comes back as 256, 50256 as 50176",
    lambda h: torch.cat([h.flatten(), IDS.to(h.dtype)])[2:].long(),
    "pack",
    BF16,
    refs=("case 46",),
)
_counted(
    "ids-through-fp16",
    "the same in fp16",
    "2049 comes back as 2048, 50256 as 50272",
    lambda h: torch.cat([h.flatten(), IDS.to(h.dtype)])[2:].long(),
    "pack",
    F16,
    refs=("case 46",),
)
_counted(
    "labels-compared-in-16-bits",
    "a one-hot of 2100 classes by comparing labels and classes in the dtype of an fp16 block's values",
    "from 2048 on two classes are hot, or the wrong one",
    _one_hot,
    "target",
    F16,
)
_counted(
    "positions-from-a-padding-mask",
    "mask.to(h.dtype).cumsum(-1) - 1 over 600 tokens in a bf16 block",
    "the positions of neighbours are equal from 256 on",
    lambda h: (LONG.to(h.dtype).cumsum(-1) - 1).long(),
    "positions",
    BF16,
    refs=("case 45",),
    named=False,
)


def _waves(positions: Tensor, frequencies: Tensor) -> Tensor:
    angles = positions[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


class Timesteps(nn.Module):
    """Sinusoidal embeddings. cast: of timesteps in the dtype of the weights, as in modules that were made to run in 16 bits."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.cast, self.head = cast, identity(8)

    def forward(self, t: Tensor) -> Tensor:
        t = t.to(self.head.weight.dtype) if self.cast else t
        waves = _waves(t, torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=t.dtype))
        return self.head(waves)  # type: ignore[no-any-return]


@record(
    "timesteps-cast-to-the-weights-dtype",
    "timesteps 0 to 999 cast to the dtype of bf16 weights before their sinusoidal embedding",
    today="507 different embeddings are left, and the fast waves are noise",
    right=f"the embedding of fp32, {NAMED} (table, time)",
    check=lambda v: v.right or v.names(("table",), "time"),
    refused=("time",),
    refs=("case 45",),
)
def timesteps_cast(library: Library) -> Any:
    return whole(library, lambda: named(Timesteps(cast=True), "time"), torch.arange(1000))


@record(
    "float-timesteps-into-a-16-bit-model",
    "timesteps 0 to 999 as floats, given to a model whose weights are all bf16",
    today="a dtype error without a module's name; cast by hand, as the message asks for, 507 different values are left",
    right=f"the embedding of fp32, {NAMED} (table, and the model or its part time)",
    check=lambda v: v.right or v.said.startswith("table"),
    refused=("time",),
    refs=("case 45",),
)
def float_timesteps(library: Library) -> Any:
    return whole(library, lambda: named(Timesteps(cast=False), "time"), torch.arange(1000.0))


class Rotary(nn.Module):
    """Rotary angles from a buffer of frequencies under a name of its own."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", 10000.0 ** (-torch.arange(0, 8, 2) / 8), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return _waves(positions.to(self.freqs.dtype), self.freqs)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.head = Rotary(), identity(8)

    def forward(self, positions: Tensor) -> Tensor:
        return self.head(self.rotary(positions).to(self.head.weight.dtype))  # type: ignore[no-any-return]


@record(
    "rotary-frequencies-under-another-name",
    "a hand-written rotary embedding with its frequencies in a buffer called freqs, in a model cast to bf16, over 1024 positions",
    today="angles are off by radians at the far end; nothing is said",
    right=f"the angles of fp32, {NAMED} (table, rotary)",
    check=lambda v: v.right or v.names(("table",), "rotary"),
    refused=("rotary",),
    refs=("case 47",),
)
def rotary_by_hand(library: Library) -> Any:
    return whole(library, Rotated, torch.arange(1024))


class LlamaAngles(nn.Module):
    """The rotary embedding of transformers' Llama, and a layer that can be cast."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=1024)
        self.rotary, self.head = LlamaRotaryEmbedding(config), identity(8)

    def forward(self, positions: Tensor) -> Tensor:
        narrow = torch.zeros(1, 1, 8, dtype=self.head.weight.dtype)
        return self.head(self.rotary(narrow, positions[None])[0])  # type: ignore[no-any-return]


@record(
    "rotary-tables-after-a-cast",
    "a model with transformers' rotary embedding cast to bf16, its cosines over 1024 positions",
    today="cosines differ by 0.39 from those of a model loaded with dtype=bfloat16",
    right="the cosines of fp32, to bf16's rounding",
    check=lambda v: v.right,
    refs=("case 47",),
)
def rotary_of_llama(library: Library) -> Any:
    return whole(library, LlamaAngles, torch.arange(1024))


class Noise(nn.Module):
    """The share of noise at each timestep of a diffusion, from a buffer."""

    alphas: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0))
        self.head = identity(1)

    def forward(self, t: Tensor) -> Tensor:
        share = (1 - self.alphas[t]).sqrt()
        return self.head(share[:, None].to(self.head.weight.dtype))  # type: ignore[no-any-return]


@record(
    "noise-schedule-in-16-bits",
    "a diffusion's table of alphas, a buffer of a model cast to bf16: sqrt(1 - alpha) of the first ten timesteps",
    today="0.9999 rounds to 1: the first timesteps have no noise at all",
    right=f"the shares of fp32, {NAMED} (table, schedule)",
    check=lambda v: v.right or v.names(("table",), "schedule"),
    refused=("schedule",),
    refs=("case 47",),
)
def noise_schedule(library: Library) -> Any:
    return whole(library, lambda: named(Noise(), "schedule"), torch.arange(10))


class Buckets(nn.Module):
    """Features looked up by bucket, with the edges of the buckets in a buffer."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.arange(0.0, 4000.0, 10.0))
        self.head = identity(1)

    def forward(self, value: Tensor) -> Tensor:
        found = torch.bucketize(value.to(self.edges.dtype), self.edges)
        hot = F.one_hot(found, len(self.edges) + 1).sum(0)  # how many values went to each
        return self.head(hot[:, None].to(self.head.weight.dtype))  # type: ignore[no-any-return]


@record(
    "bucket-edges-in-16-bits",
    "a table of bucket edges 0, 10, 20 ... 3990, a buffer of a model cast to bf16, and the values 5, 15, 25 ...",
    today="edges and values collide: buckets get no value, or several",
    right=f"one value in each bucket, {NAMED} (table, buckets)",
    check=lambda v: v.right or v.names(("table",), "buckets"),
    refused=("buckets",),
    refs=("case 47",),
)
def bucket_edges(library: Library) -> Any:
    return whole(library, lambda: named(Buckets(), "buckets"), torch.arange(5, 3990, 10))
