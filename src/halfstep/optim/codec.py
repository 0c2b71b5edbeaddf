"""How optimizer states are kept between steps: fp32, bf16 or int8, by the role that an optimizer declares for each.

    role     what it is                                          int8
    first    a mean of gradients, of either sign                 int8 codes after a square root, one fp32 scale per block of 128
    second   a mean of squared gradients, never negative         uint8 codes after a fourth root, one fp32 scale per block of 128
    None     anything else: counters, sums, products             stays as it is

bf16 and int8 round stochastically: a second moment changes by a thousandth a step, and rounded to nearest it would not change at all.
Blockwise companded states are those of FlashOptim, arXiv:2602.23349, and Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv:2110.02861; the roots and the stochastic rounding are ours (docs/log.md has the comparison).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from halfstep import numerics

Role = Literal["first", "second"]
SCALE = "_scale"  # key of the scales beside the key of their codes


class Codec(Protocol):
    """A format of states. Stateless."""

    @property
    def name(self) -> str:
        """What it is called in a policy."""

    def encode(self, values: Tensor, role: Role, bits: Tensor | None) -> dict[str, Tensor]:
        """fp32 `values` as tensors by the end of their key ("" for the state's own).

        bits: int32 noise of 0..65535 per element; None rounds to nearest.
        """

    def decode(self, parts: Mapping[str, Tensor], role: Role, shape: torch.Size) -> Tensor:
        """The fp32 values in `shape`, a new tensor."""

    def zeros(self, p: Tensor, role: Role) -> dict[str, Tensor]:
        """What `encode` makes of zeros in the shape and strides of `p`, on its device, without making these."""

    def is_encoded(self, state: Mapping[str, Any], key: str) -> bool:
        """Whether `state[key]` is in this format."""


@dataclass(frozen=True)
class Fp32States:
    """States as they are: 4 bytes each."""

    name: str = "fp32"

    def encode(self, values: Tensor, role: Role, bits: Tensor | None) -> dict[str, Tensor]:
        """See Codec."""
        return {"": values}

    def decode(self, parts: Mapping[str, Tensor], role: Role, shape: torch.Size) -> Tensor:
        """See Codec."""
        return parts[""].float().clone()

    def zeros(self, p: Tensor, role: Role) -> dict[str, Tensor]:
        """See Codec."""
        return {"": torch.zeros_like(p, dtype=torch.float32, memory_format=torch.preserve_format)}

    def is_encoded(self, state: Mapping[str, Any], key: str) -> bool:
        """See Codec."""
        return bool(state[key].dtype == torch.float32)


@dataclass(frozen=True)
class Bf16States:
    """States in bf16, rounded stochastically: 2 bytes each."""

    name: str = "bf16"

    def encode(self, values: Tensor, role: Role, bits: Tensor | None) -> dict[str, Tensor]:
        """See Codec."""
        return {"": numerics.cast(values, torch.bfloat16) if bits is None else numerics.stochastic(values, torch.bfloat16, bits)}

    def decode(self, parts: Mapping[str, Tensor], role: Role, shape: torch.Size) -> Tensor:
        """See Codec."""
        return parts[""].float()

    def zeros(self, p: Tensor, role: Role) -> dict[str, Tensor]:
        """See Codec."""
        return {"": torch.zeros_like(p, dtype=torch.bfloat16, memory_format=torch.preserve_format)}

    def is_encoded(self, state: Mapping[str, Any], key: str) -> bool:
        """See Codec."""
        return bool(state[key].dtype == torch.bfloat16)


@dataclass(frozen=True)
class Int8States:
    """States in 8 bits with one fp32 scale per block of 128: 1.03 bytes each."""

    name: str = "int8"

    def encode(self, values: Tensor, role: Role, bits: Tensor | None) -> dict[str, Tensor]:
        """See Codec."""
        codes, scales = numerics.encode(values, role == "first", bits)
        return {"": codes, SCALE: scales}

    def decode(self, parts: Mapping[str, Tensor], role: Role, shape: torch.Size) -> Tensor:
        """See Codec."""
        return numerics.decode(parts[""], parts[SCALE], role == "first", shape)

    def zeros(self, p: Tensor, role: Role) -> dict[str, Tensor]:
        """See Codec."""
        codes = torch.zeros(p.numel(), dtype=torch.int8 if role == "first" else torch.uint8, device=p.device)
        return {"": codes, SCALE: torch.zeros(-(-p.numel() // numerics.BLOCK), dtype=torch.float32, device=p.device)}

    def is_encoded(self, state: Mapping[str, Any], key: str) -> bool:
        """See Codec."""
        return key + SCALE in state


CODECS: dict[str, Codec] = {c.name: c for c in (Fp32States(), Bf16States(), Int8States())}


def codec_of(state: Mapping[str, Any], key: str) -> Codec | None:
    """The format that `state[key]` is in; None for a tensor in none of them."""
    return next((c for c in (CODECS["int8"], CODECS["bf16"], CODECS["fp32"]) if c.is_encoded(state, key)), None)


def parts_of(state: Mapping[str, Any], key: str) -> dict[str, Tensor]:
    """What `decode` takes, from an optimizer's state of one parameter."""
    return {"": state[key]} | ({SCALE: state[key + SCALE]} if key + SCALE in state else {})


def put(state: dict[str, Any], key: str, parts: Mapping[str, Tensor]) -> None:
    """Put encoded parts into an optimizer's state of one parameter, in place of what stood there."""
    state.pop(key + SCALE, None)
    for end, tensor in parts.items():
        state[key + end] = tensor


def noise_of(bits: Tensor, role: Role) -> Tensor:
    """The 16 of an element's random bits that belong to a role, as int32 from 0 to 65535."""
    mixed = numerics.state_noise(bits)
    return (mixed if role == "first" else mixed >> 16) & 0xFFFF
