"""Where the elements of a tensor would stand in a narrower format: how many of them are lost, and in which way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.numerics.formats import Format
from halfstep.numerics.rounding import bits_of, nearest


@dataclass(frozen=True)
class Occupancy:
    """Shares of the elements of a tensor once rounded to a format, from 0 to 1; the six add up to 1 (all are 0 for an empty tensor).

    zeros: zero before. flushed: not zero before, and zero now. subnormals: below the smallest normal number, so with fewer bits.
    normals: with all their bits. saturated: finite, and above the largest number. nonfinite: inf or NaN.
    """

    zeros: float
    flushed: float
    subnormals: float
    normals: float
    saturated: float
    nonfinite: float

    @property
    def finite(self) -> float:
        """The share of the elements that are within the range of the format."""
        return self.zeros + self.flushed + self.subnormals + self.normals


def occupancy(x: Tensor, fmt: Format) -> Occupancy:
    """The shares of the elements of fp32 `x` once in `fmt`. One read from the device. Temporary memory: about 16 bytes per element."""
    if not x.numel():
        return Occupancy(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    bits_of(x)
    before = x.detach().abs()
    after = nearest(before, fmt)
    finite = before.isfinite()
    zeros, gone = before == 0, after == 0
    saturated = finite & (before > fmt.largest)
    small = (after < fmt.smallest_normal) & ~gone
    counts = [zeros.sum(), gone.sum(), small.sum(), saturated.sum(), finite.sum()]
    zero, all_gone, subnormal, over, whole = torch.stack(counts).tolist()
    n = x.numel()
    return Occupancy(zero / n, (all_gone - zero) / n, subnormal / n, (whole - all_gone - subnormal - over) / n, over / n, (n - whole) / n)
