"""Floating-point formats as numbers: how many bits, how large, how small, how far apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals.

    dtype: torch's, or None where torch has none. mantissa_bits: the stored ones, without the leading 1. infinite: has inf, and
    then numbers too large become inf; a format without it (e4m3fn) holds numbers of the highest exponent instead, and they stop
    at the largest.
    """

    name: str
    dtype: torch.dtype | None
    exponent_bits: int
    mantissa_bits: int
    infinite: bool = True

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top = 2 ** (self.exponent_bits - 1)
        if self.infinite:
            return float((2.0 - 2.0**-self.mantissa_bits) * 2.0 ** (top - 1))
        return float((2.0 - 2.0 ** (1 - self.mantissa_bits)) * 2.0**top)  # the highest mantissa of the highest exponent is NaN

    @property
    def smallest_normal(self) -> float:
        """The smallest number that has all its bits."""
        return float(2.0 ** (2 - 2 ** (self.exponent_bits - 1)))

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero, and the distance of all numbers below `smallest_normal`."""
        return float(self.smallest_normal * self.epsilon)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number."""
        return float(2.0**-self.mantissa_bits)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", torch.float32, 8, 23),
        Format("tf32", None, 8, 10),
        Format("bf16", torch.bfloat16, 8, 7),
        Format("fp16", torch.float16, 5, 10),
        Format("e4m3", torch.float8_e4m3fn, 4, 3, infinite=False),
        Format("e5m2", torch.float8_e5m2, 5, 2),
    )
}


def ulp(x: Tensor, fmt: Format) -> Tensor:
    """The distance of neighbouring numbers of `fmt` at |x|, in the shape and dtype (fp32 or fp64) of `x`.

    At a power of two it is the distance upwards. Below the smallest normal number it is the smallest subnormal one, above the
    largest the distance at the largest; inf and NaN have NaN.
    """
    near = x.abs().clamp(fmt.smallest_normal, fmt.largest)
    power = near / (2 * torch.frexp(near).mantissa)  # the power of two at or below it: an exact quotient
    found = power * fmt.epsilon
    return torch.where(x.isfinite(), found, torch.nan)
