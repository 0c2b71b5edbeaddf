"""What a forward pass keeps for the backward pass, in 8 bits: the formats and the objects that stand in the graph instead of tensors.

Formats: `halfstep.numerics.activations`. Which tensors: `halfstep.amp.saving`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import activation_kernels
from halfstep.numerics import activations

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SEED = 0  # of the rounding noise, which is hashed from what is rounded


class Packed:
    """A tensor in 8 bits. Unpacked as often as asked for, each time to a new tensor with the same bits."""

    __slots__ = ("codes", "kind", "scales")

    def __init__(self, flat: Tensor, kind: str) -> None:
        kernels = activation_kernels(flat)
        self.kind = kind
        self.codes, self.scales = (kernels if kernels is not None else activations).pack(flat, kind, SEED)

    def values(self) -> Tensor:
        """All numbers, flat, in the format that they had."""
        kernels = activation_kernels(self.codes)
        found: Tensor = (kernels if kernels is not None else activations).unpack(self.codes, self.scales, self.kind)
        return found


class View:
    """A tensor of some shape whose numbers are packed: several of them share one `Packed`."""

    __slots__ = ("packed", "shape", "stride")

    def __init__(self, packed: Packed, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.packed, self.shape, self.stride = packed, shape, stride

    def tensor(self) -> Tensor:
        """The tensor again, within the error of the format."""
        return self.packed.values().as_strided(self.shape, self.stride)


class Kept:
    """A tensor as it is: somebody holds it anyway, or it must be exact. Refused, as by torch, when it was written to in between."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, x: Tensor) -> None:
        self._tensor, self._version = x.detach(), x._version  # detached: an output would hold the graph that holds it

    def tensor(self) -> Tensor:
        """The tensor."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
                f"{tuple(self._tensor.shape)} is at version {self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class Cast:
    """The 16-bit copy of a parameter that autocast has made for a product: made again when it is needed."""

    __slots__ = ("_dtype", "_kept", "_turned")

    def __init__(self, parameter: Tensor, dtype: torch.dtype, turned: bool) -> None:
        self._kept, self._dtype, self._turned = Kept(parameter), dtype, turned

    def tensor(self) -> Tensor:
        """The copy, or its transpose."""
        made = self._kept.tensor().to(self._dtype)
        return made.mT if self._turned else made


class Places:
    """int64 places of the maxima of a pooling in a plane of at most 2^31 elements: exactly, in 2 or 4 bytes each."""

    __slots__ = ("_places",)

    def __init__(self, x: Tensor, plane: int) -> None:
        self._places = x.to(torch.int16 if plane <= 1 << 16 else torch.int32)

    def tensor(self) -> Tensor:
        """The places as int64."""
        wide = self._places.long()
        return wide.bitwise_and_(0xFFFF) if self._places.dtype == torch.int16 else wide


def unpack(stored: Any) -> Tensor:
    """The hook of the backward pass."""
    found: Tensor = stored.tensor()
    return found


def in_memory_order(x: Tensor) -> Tensor | None:
    """All elements of a tensor that fills a stretch of memory once, flat and in the order in which they lie there; None for any other."""
    if not x.is_contiguous():
        expected = 1
        for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
            if stride != expected:
                return None
            expected *= size
    return x.as_strided((x.numel(),), (1,), x.storage_offset())
