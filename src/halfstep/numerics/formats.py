"""Floating-point formats as numbers: how many bits, how large, how small, how far apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import ConfigError


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


def format_named(name: str) -> Format:
    """The format that a text names, in capitals or not: one of `FORMATS`, or "eXmY" by its bits of exponent and mantissa ("e5m10", "e6m9").

    Formats have inf, as IEEE's do, but for "e4m3", which is that of 8-bit hardware, and those with "fn" at the end ("e5m2fn"): they stop at the
    largest. Raises ConfigError for a text that is none, and for more bits than fp32 has: numbers are rounded in fp32.
    """
    text = name.strip().lower()
    if text in FORMATS:
        return FORMATS[text]
    found = re.fullmatch(r"e([0-9]+)m([0-9]+)(fn)?", text)
    if found is None:
        raise ConfigError(f"{name!r} names no number format", f"Use one of {', '.join(FORMATS)}, or eXmY such as e5m10 or e6m9.")
    exponent, mantissa, finite = int(found[1]), int(found[2]), found[3] is not None
    if not (2 <= exponent <= 8 and 1 <= mantissa <= 23):
        raise ConfigError(
            f"{name!r} has {exponent} bits of exponent and {mantissa} of mantissa", "Use 2 to 8 and 1 to 23: numbers are rounded in fp32."
        )
    known = next((f for f in FORMATS.values() if (f.exponent_bits, f.mantissa_bits, f.infinite) == (exponent, mantissa, not finite)), None)
    if known is not None:
        return Format(text, known.dtype, exponent, mantissa, infinite=not finite)
    if finite and exponent == 8:
        raise ConfigError(f"{name!r} has numbers beyond fp32's", "Use at most 7 bits of exponent for a format without inf.")
    return Format(text, None, exponent, mantissa, infinite=not finite)


def ulp(x: Tensor, fmt: Format) -> Tensor:
    """The distance of neighbouring numbers of `fmt` at |x|, in the shape and dtype (fp32 or fp64) of `x`.

    At a power of two it is the distance upwards. Below the smallest normal number it is the smallest subnormal one, above the
    largest the distance at the largest; inf and NaN have NaN.
    """
    near = x.abs().clamp(fmt.smallest_normal, fmt.largest)
    power = near / (2 * torch.frexp(near).mantissa)  # the power of two at or below it: an exact quotient
    found = power * fmt.epsilon
    return torch.where(x.isfinite(), found, torch.nan)
