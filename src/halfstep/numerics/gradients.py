"""Norm, magnitude and finiteness of a list of tensors. Pure functions; nothing here reads a value to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def stored(tensor: Tensor) -> Tensor:
    """The real numbers that a tensor holds: the values of a sparse one (summed per index), a complex one as pairs."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm of all `tensors` together: an fp32 scalar on `device`, one pass.

    inf or NaN when an element is, and also when the squares overflow fp32 (elements from about 1e19 up):
    `wide_norm` tells the two apart. 0 for an empty list.
    """
    parts: list[Tensor] = []
    for group in _by_kind(tensors):
        sums = torch.float32 if group[0].dtype in (torch.float16, torch.bfloat16) else None  # fp32 and fp64 add up in themselves
        parts += [n.to(device, torch.float32) for n in torch._foreach_norm(group, 2.0, sums)]
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=device)


def wide_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm with fp64 sums, an fp64 scalar: no square of an fp32 number overflows. Slower than `norm`."""
    parts = [torch.linalg.vector_norm(t, dtype=torch.float64).to(device) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=device, dtype=torch.float64)


def largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Largest magnitude in all `tensors`: an fp32 scalar; NaN when there is a NaN, 0 for an empty list."""
    parts = [t.abs().amax().to(device, torch.float32) for t in tensors if t.numel()]
    return torch.stack(parts).amax() if parts else torch.zeros((), device=device)


def multiply_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all `tensors`, sparse ones too, in place by `factor`; nothing is done for 1."""
    if factor == 1.0:
        return
    for group in _by_kind([t._values() if t.is_sparse else t for t in tensors]):
        torch._foreach_mul_(group, factor)


def clip_factor(total: float, max_norm: float) -> float:
    """What to multiply gradients of norm `total` by so that it becomes `max_norm`; 1 when it is below already.

    The fp32 arithmetic of torch.nn.utils.clip_grad_norm_, its 1e-6 included, so that results agree bit for bit.
    """
    if not math.isfinite(total):
        return 1.0
    return min(1.0, float(max_norm / (torch.tensor(total, dtype=torch.float32) + 1e-6)))


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists that torch's foreach functions take in one launch: the same device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    return list(groups.values())
