"""How a 16-bit weight keeps the bits that its format has no room for: six storages, one class each.

    name         beside the weight            bytes   what is kept of an fp32 master
    fp32         -                            0       everything: the weight is fp32
    split        int16 residual               2       all of it but one fp32 ulp in one of 65,537 values (bf16; fp16: of normal values)
    split24      int8 residual                1       24 bits, the last one rounded stochastically
    kahan        16-bit compensation          2       twice the significant bits of the weight's format
    stochastic   -                            0       the mean: each write rounds up or down by chance
    plain        -                            0       nothing: updates below half an ulp of the weight are lost

To add one: a class here and a row in `STORAGES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.numerics import Noise


class Storage(Protocol):
    """A way to hold an fp32 master in a 16-bit weight and what stands beside it. Stateless."""

    @property
    def name(self) -> str:
        """What it is called in a policy."""

    @property
    def draws(self) -> bool:
        """Whether writing draws noise."""

    def residual_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of what stands beside a weight of `dtype`; None for nothing."""

    def read(self, weight: Tensor, residual: Tensor | None) -> Tensor:
        """The fp32 master, a new tensor."""

    def parts(self, master: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight in `dtype` and the residual that hold `master`. bits: 32 random ones per element as int32; None rounds to nearest."""


@dataclass(frozen=True)
class Fp32:
    """The weight is fp32 itself."""

    name: str = "fp32"
    draws: bool = False

    def residual_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """See Storage."""
        return None

    def read(self, weight: Tensor, residual: Tensor | None) -> Tensor:
        """See Storage."""
        return weight.detach().float().clone()

    def parts(self, master: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See Storage."""
        return master, None


@dataclass(frozen=True)
class Split:
    """The weight is the nearest 16-bit value of the master, and an integer says how far the master is from it, in parts of the weight's ulp.

    16 bits: 2^-16 of an ulp, exact. 8 bits: 2^-8 of an ulp, rounded stochastically, so that updates below that are kept in the mean.
    Source: the split SGD of Intel's extension for PyTorch (16 bits); FlashOptim, arXiv:2602.23349 (8 bits).
    """

    name: str
    width: int
    draws: bool = False

    def residual_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """See Storage."""
        return torch.int16 if self.width == 16 else torch.int8

    def read(self, weight: Tensor, residual: Tensor | None) -> Tensor:
        """See Storage."""
        assert residual is not None
        return numerics.join(weight.detach(), residual)

    def parts(self, master: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See Storage."""
        return numerics.split(master, dtype, self.width, bits if self.draws else None)


@dataclass(frozen=True)
class Kahan:
    """The weight is the nearest 16-bit value of the master, and what it misses stands beside it in the same format.

    Updates below about 2^-9 (bf16) or 2^-12 (fp16) of an ulp of the weight round away. Source: Kahan, 1965; Zamirai et al., Revisiting
    BFloat16 Training, arXiv:2010.06192.
    """

    name: str = "kahan"
    draws: bool = False

    def residual_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """See Storage."""
        return dtype

    def read(self, weight: Tensor, residual: Tensor | None) -> Tensor:
        """See Storage."""
        assert residual is not None
        return numerics.kahan_join(weight.detach(), residual)

    def parts(self, master: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See Storage."""
        return numerics.kahan_split(master, dtype)


@dataclass(frozen=True)
class Stochastic:
    """The weight alone, rounded up or down with the probability that makes its mean the value. Source: Gupta et al., arXiv:1502.02551."""

    name: str = "stochastic"
    draws: bool = True

    def residual_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """See Storage."""
        return None

    def read(self, weight: Tensor, residual: Tensor | None) -> Tensor:
        """See Storage."""
        return weight.detach().float()

    def parts(self, master: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See Storage."""
        return (numerics.cast(master, dtype) if bits is None else numerics.stochastic(master, dtype, bits)), None


@dataclass(frozen=True)
class Plain:
    """The weight alone, rounded to nearest: what a 16-bit model under a stock optimizer has. For comparison, and by explicit request only."""

    name: str = "plain"
    draws: bool = False

    def residual_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """See Storage."""
        return None

    def read(self, weight: Tensor, residual: Tensor | None) -> Tensor:
        """See Storage."""
        return weight.detach().float()

    def parts(self, master: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See Storage."""
        return numerics.cast(master, dtype), None


STORAGES: dict[str, Storage] = {s.name: s for s in (Fp32(), Split("split", 16), Split("split24", 8, draws=True), Kahan(), Stochastic(), Plain())}


def draw(storage: Storage, noise: Noise | None, master: Tensor) -> Tensor | None:
    """The random bits for a write of `master`, in its shape; None where the storage draws none or `noise` is None."""
    if noise is None or not storage.draws:
        return None
    return noise.bits(master.numel(), master.device).view(master.shape)
