"""How the numbers of tensors spread over the range of a format: counted on the device, in one row of numbers per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.numerics import FORMATS, Format

LOOKED_AT = 4096  # elements of a tensor that are counted, at most
ROW = 6  # numbers in a row: zeros, not finite, small, near the limit; largest magnitude, Euclidean norm
PIECE = 1 << 20  # elements of a 16-bit tensor that are cast up at once on a CPU: 4 MB in fp32
TOGETHER = 64  # tensors that are counted at once, which bounds the temporary memory
NEAR = 0.5  # share of a format's limit from which on a number is near it
MEASURED = {f.dtype: f for f in (FORMATS["fp32"], FORMATS["bf16"], FORMATS["fp16"])}  # tensors of other dtypes are not measured


class Spread(NamedTuple):  # made in a third of a dataclass's time, which counts when halfstep is imported
    """What was counted on some tensors in one step, still on the device.

    values: fp64 [n, 6] (see `rows`). sizes: elements of each. formats: the names of those that the counts are about.
    scale: what the tensors were multiplied by. step: the number of the step.
    """

    names: tuple[str, ...]
    formats: tuple[str, ...]
    sizes: tuple[int, ...]
    values: Tensor
    scale: float = 1.0
    step: int = 0


def looked_at(size: int) -> int:
    """How many of so many elements are counted."""
    return len(range(0, size, _stride(size))) if size else 0


def _stride(size: int) -> int:
    return -(-size // LOOKED_AT) | 1  # odd: not one column of a matrix only


def rows(tensors: Sequence[Tensor], formats: Sequence[Format], device: torch.device) -> Tensor:
    """For each of `tensors`, of dtypes in `MEASURED`: how its numbers lie in the format beside it. fp64 [n, 6] on `device`.

    Of at most 4096 elements, evenly spaced: how many are 0; inf or NaN; not 0 and below the format's smallest number with all its bits; at half of
    its largest number or beyond. Of all elements: the largest magnitude, and the Euclidean norm (inf where squares overflow fp32). Nothing is read
    to the host. Two passes; temporary memory: up to 12 MB.
    """
    found = torch.zeros(len(tensors), ROW, device=device, dtype=torch.float64)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (t, form) in enumerate(zip(tensors, formats, strict=True)):
        if t.numel():
            groups.setdefault((t.device, t.dtype, form.name), []).append(i)
    for places in groups.values():
        some = [tensors[i].detach() for i in places]
        parts = (
            torch.cat([_counts(some[i : i + TOGETHER], formats[places[0]]) for i in range(0, len(some), TOGETHER)]),
            numerics.largest_of_each(some, some[0].device)[:, None],
            _lengths(some)[:, None],
        )
        found[places] = torch.cat([part.double() for part in parts], 1).to(device)
    return found


def _lengths(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of each, in fp32. On a CPU 16-bit ones by pieces, in one buffer.

    torch casts each of them up as a whole, into another hole of the heap every time, until all holes are resident.
    """
    if tensors[0].device.type != "cpu" or tensors[0].dtype == torch.float32:
        return numerics.norms(tensors, tensors[0].device)
    buffer = torch.empty(min(PIECE, max(t.numel() for t in tensors)), dtype=torch.float32, device="cpu")
    found = []
    for t in tensors:
        pieces = [torch.linalg.vector_norm(buffer[: piece.numel()].copy_(piece)) for piece in torch.split(t.reshape(-1), PIECE)]
        found.append(pieces[0] if len(pieces) == 1 else torch.linalg.vector_norm(torch.stack(pieces)))
    return torch.stack(found)


def _counts(tensors: list[Tensor], form: Format) -> Tensor:
    """[n, 4] counts on tensors of one dtype and device, by one row of operations for all of them."""
    samples = [t.reshape(-1)[:: _stride(t.numel())] for t in tensors]
    flat = torch.cat(samples).abs()
    finite = flat.isfinite()
    small, near = (flat < form.smallest_normal) & (flat > 0), (flat >= form.largest * NEAR) & finite
    marks = torch.stack((flat == 0, ~finite, small, near))
    ends, total = [], 0
    for s in samples:
        total += s.numel()
        ends.append(total - 1)
    sums = marks.cumsum(1, dtype=torch.int32)[:, ends]
    return torch.diff(sums, dim=1, prepend=torch.zeros_like(sums[:, :1])).T


def of_gradients(names: Sequence[str], held: Sequence[Tensor], limits: Sequence[float], scale: float = 1.0, step: int = 0) -> Spread | None:
    """How gradients lie in fp16 where its limit is theirs, else in the format they have. None where none can be measured. Nothing is read."""
    values = [numerics.stored(g.detach()) for g in held]
    known = [
        (name, v, FORMATS["fp16"] if limit == FORMATS["fp16"].largest else MEASURED[v.dtype])
        for name, v, limit in zip(names, values, limits, strict=True)
        if v.dtype in MEASURED
    ]
    if not known:
        return None
    called, found, formats = zip(*known, strict=True)
    return Spread(called, tuple(f.name for f in formats), tuple(v.numel() for v in found), rows(found, formats, found[0].device), scale, step)


def joined(found: Sequence[Sequence[float]], sizes: Sequence[int]) -> tuple[float, ...]:
    """Rows of several tensors as one layer's: (elements, zeros, not finite, underflow, overflow, log2 of the largest, log2 of the root mean square).

    The four between are shares of the elements that were counted; underflow of those that are neither 0 nor inf or NaN. A largest number that is
    inf or NaN is so in the result; of all zeros log2 is -inf. Where only squares overflow fp32, the root mean square is its upper bound, the largest.
    """
    size, counted = sum(sizes), sum(map(looked_at, sizes))
    zeros, bad, small, near = (sum(row[k] for row in found) for k in range(4))
    largest = max((row[4] for row in found), key=lambda v: (math.isnan(v), v), default=0.0)
    square = sum(row[5] ** 2 for row in found) / max(size, 1)
    if math.isinf(square) and math.isfinite(largest):
        square = largest**2
    if math.isinf(largest):
        bad, square = max(bad, 1), math.inf  # an inf that the sample has missed
    elif math.isnan(largest):
        bad, square = max(bad, 1), math.nan
    wholes = max(counted, 1)
    other = max(counted - zeros - bad, 1)
    return size, zeros / wholes, min(bad / wholes, 1.0), small / other, min(near / wholes, 1.0), _log2(largest), _log2(square) / 2


def _log2(value: float) -> float:
    return math.log2(value) if 0 < value < math.inf else -math.inf if value == 0 else value
