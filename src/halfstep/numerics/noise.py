"""Random bits by hashing: the same for the same parameter, step and element, on every device and in any order.

No generator is kept and none is read, so a resumed run rounds as the one that was never stopped, and neither the number of
threads nor the way tensors are cut has an effect. The finaliser is `lowbias32` (Chris Wellons, "Prospecting for Hash Functions",
2018).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.numerics.slices import ranges

WORD = 0xFFFFFFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B  # multipliers of lowbias32
GOLDEN = 0x9E3779B9
STATES = 0x2C1B3C6D


@dataclass(frozen=True)
class Noise:
    """The random bits of one parameter in one step. All three are taken modulo 2^32."""

    seed: int
    parameter: int
    step: int

    @property
    def keys(self) -> tuple[int, int]:
        """The two 32-bit keys that elements are hashed with."""
        first = mix(self.seed ^ mix(self.parameter ^ mix(self.step)))
        return first, mix(first ^ GOLDEN)

    def bits(self, numel: int, device: torch.device | str = "cpu", start: int = 0) -> Tensor:
        """32 random bits for each of the elements start .. start + numel - 1: int32 [numel] on `device`.

        From element 2^32 on they repeat.
        """
        found = torch.empty(numel, dtype=torch.int32, device=device)
        for part in ranges(numel, found.device):
            self._fill(found[part], start + part.start)
        return found

    def _fill(self, x: Tensor, start: int) -> None:
        """Make `x` the bits of the elements from `start` on."""
        first, second = (_signed(key) for key in self.keys)
        start &= WORD
        if start + x.numel() <= 2**31:
            torch.arange(start, start + x.numel(), out=x)
        else:
            x.copy_(torch.arange(start, start + x.numel(), device=x.device))  # int64 into int32 wraps
        hashed_(x.bitwise_xor_(first), second)


def state_noise(bits: Tensor) -> Tensor:
    """Other bits of the same elements, for their optimizer states: int32 in, int32 out, a one-to-one map.

    The weight takes the lowest bits of `bits`; the first moment takes the lower 16 bits of this, the second the upper 16.
    """
    return _shift_xor_(bits * STATES, 15)


def hashed_(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """lowbias32 of int32 words in place, with a key (int32) mixed in half way."""
    _shift_xor_(x, 16).mul_(FIRST).bitwise_xor_(key)
    return _shift_xor_(_shift_xor_(x, 15).mul_(_signed(SECOND)), 16)


def mix(x: int) -> int:
    """lowbias32 of an integer taken modulo 2^32."""
    x &= WORD
    x = (x ^ (x >> 16)) * FIRST & WORD
    x = (x ^ (x >> 15)) * SECOND & WORD
    return x ^ (x >> 16)


def _shift_xor_(x: Tensor, by: int) -> Tensor:
    """x ^= x >> by in place, zeros shifted in from the left: torch shifts the sign in, so it is masked off."""
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))


def _signed(word: int) -> int:
    """A 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >> 31 else word
