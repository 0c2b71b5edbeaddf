"""Norm, magnitude and finiteness of a list of tensors. Pure functions; nothing here reads a value to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

TOO_LARGE = 3.4028235677973366e38  # from here on a number rounds to inf in fp32
LARGEST_GRADIENT = 2.0**60  # a finite 1e21 makes AdamW's second moment inf, and the weight then never moves again
_MARGIN = float(np.float32(1e-6))


def stored(tensor: Tensor) -> Tensor:
    """The real numbers that a tensor holds: the values of a sparse one (summed per index), a complex one as pairs."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm of each of `tensors`: an fp32 vector on `device`, one pass. inf where squares overflow fp32."""
    found: dict[int, Tensor] = {}
    for places in _by_kind(tensors):
        group = [tensors[i] for i in places]
        sums = torch.float32 if group[0].dtype in (torch.float16, torch.bfloat16) else None  # fp32 and fp64 add up in themselves
        found |= zip(places, torch._foreach_norm(group, 2.0, sums), strict=True)
    if not found:
        return torch.zeros(0, device=device, dtype=torch.float32)
    return torch.stack([found[i].to(device, torch.float32) for i in range(len(tensors))])


def norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm of all `tensors` together: an fp32 scalar on `device`, one pass.

    inf or NaN when an element is, and also when the squares overflow fp32 (elements from about 1e19 up):
    `wide_norm` tells the two apart. 0 for an empty list.
    """
    total: Tensor = torch.linalg.vector_norm(norms(tensors, device))
    return total


def wide_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm with fp64 sums, an fp64 scalar: no square of an fp32 number overflows. Slower than `norm`."""
    parts = [torch.linalg.vector_norm(t, dtype=torch.float64).to(device) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=device, dtype=torch.float64)


def largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Largest magnitude in all `tensors`: an fp32 scalar; NaN when there is a NaN, 0 for an empty list."""
    parts = []
    for t in tensors:
        if t.numel():
            low, high = torch.aminmax(t)  # one pass and no copy, where abs().amax() takes eight times as long on a CPU
            parts.append(torch.maximum(-low, high).to(device, torch.float32))
    return torch.stack(parts).amax() if parts else torch.zeros((), device=device, dtype=torch.float32)


def largest_of_each(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude in each of `tensors`: fp32 [n] on `device`. NaN where there is one, 0 for an empty tensor.

    On a CPU by torch.aminmax, whose one pass takes an eighth of the time of a maximum norm; elsewhere in one launch for all of a kind.
    """
    parts: dict[int, Tensor] = {}
    elsewhere: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if not t.numel():
            parts[i] = torch.zeros((), device=device, dtype=torch.float32)
        elif t.device.type == "cpu":
            low, high = torch.aminmax(t)
            parts[i] = torch.maximum(-low, high)
        else:
            elsewhere.setdefault((t.device, t.dtype), []).append(i)
    for places in elsewhere.values():
        parts |= zip(places, torch._foreach_norm([tensors[i] for i in places], math.inf), strict=True)
    return torch.stack([parts[i].to(device, torch.float32) for i in range(len(tensors))])


SAMPLED = 4096  # elements looked at per tensor


def subnormal_share(tensors: Sequence[Tensor], smallest_normal: float, device: torch.device) -> Tensor:
    """Share of the non-zero elements whose magnitude is below `smallest_normal`: an fp32 scalar, 0 when all are zero.

    Estimated from at most 4096 elements of each tensor, evenly spaced, so that it costs little and is the same each time.
    """
    small, present = subnormal_counts(tensors, smallest_normal, device)
    return small / present.clamp(min=1)


def subnormal_counts(tensors: Sequence[Tensor], smallest_normal: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(elements below `smallest_normal`, all that are not zero) of the same sample: two fp32 scalars, which add up over several calls."""
    small, present = (torch.zeros((), device=device, dtype=torch.float32) for _ in range(2))
    for places in _by_kind(tensors):
        flat = [tensors[i].detach().reshape(-1) for i in places]
        sample = torch.cat([t[:: max(1, t.numel() // SAMPLED)] for t in flat]).abs()
        small += ((sample < smallest_normal) & (sample > 0)).sum().to(device)
        present += (sample > 0).sum().to(device)
    return small, present


def multiply_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply all `tensors`, sparse ones too, in place by `factor` (a scalar tensor is not read to the host); nothing is done for 1."""
    if not isinstance(factor, Tensor) and factor == 1.0:
        return
    values = [t._values() if t.is_sparse else t for t in tensors]
    for places in _by_kind(values):
        torch._foreach_mul_([values[i] for i in places], factor)


def clip_factor(total: float, max_norm: float) -> float:
    """What to multiply gradients of norm `total` by so that it becomes `max_norm`; 1 when it is below already.

    The fp32 arithmetic of torch.nn.utils.clip_grad_norm_, its 1e-6 included, so that results agree bit for bit.
    """
    if not math.isfinite(total):
        return 1.0
    if total >= TOO_LARGE:
        return 0.0
    divisor = float(np.float32(float(np.float32(total)) + _MARGIN))
    inverse = float(np.float32(1.0 / divisor))  # torch divides by way of the reciprocal
    return 1.0 if inverse * max_norm >= 1.0 else float(np.float32(inverse * float(np.float32(max_norm))))


def _by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Places of tensors that torch's foreach functions take in one launch: the same device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault((t.device, t.dtype), []).append(i)
    return list(groups.values())
