"""How far a tensor is from a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.numerics.formats import FORMATS, Format, ulp


@dataclass(frozen=True)
class Error:
    """The distance of a tensor from its reference. All are 0 where the two are equal, inf where only one of them is a finite number.

    largest_absolute: of |x - r|. largest_relative: of |x - r| / |r|, inf where r is zero and x is not. rms_relative: the norm of
    x - r over the norm of r. ulps: the largest |x - r| in distances of neighbouring numbers of a format at r.
    """

    largest_absolute: float
    largest_relative: float
    rms_relative: float
    ulps: float


def error(x: Tensor, reference: Tensor, fmt: Format | None = None) -> Error:
    """The distance of `x` from `reference` (one shape, any floating dtypes), computed in fp64. NaN stands for NaN, and inf for inf of the same sign.

    fmt: whose ulps are counted; by default the format of `x`'s dtype (fp32 for fp64). One read from the device. An empty tensor has no error.
    """
    if fmt is None:
        fmt = next((f for f in FORMATS.values() if f.dtype == x.dtype), FORMATS["fp32"])
    got, wanted = x.detach().double(), reference.detach().double().to(x.device)
    if not got.numel():
        return Error(0.0, 0.0, 0.0, 0.0)
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    off = torch.where(same, 0.0, (got - wanted).abs()).nan_to_num_(torch.inf, torch.inf)
    size = wanted.abs()
    relative = torch.where(same, 0.0, off / size).nan_to_num_(torch.inf, torch.inf)
    steps = torch.where(same, 0.0, off / ulp(wanted, fmt)).nan_to_num_(torch.inf, torch.inf)
    total = torch.linalg.vector_norm(torch.where(size.isfinite(), size, 0.0))
    rms = torch.linalg.vector_norm(off)
    rms = torch.where(rms == 0, rms, rms / total)
    absolute, largest, root, ulps = torch.stack((off.amax(), relative.amax(), rms, steps.amax())).tolist()
    return Error(absolute, largest, root, ulps)
