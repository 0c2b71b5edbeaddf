"""Fixed tables (frequencies, positions, schedules, sines), and what 16 bits leave of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfstep.numerics.formats import FORMATS

HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}
COUNTS = {torch.float16: 2048, torch.bfloat16: 256}  # every integer up to here is a number of the format
_FEWEST = 16  # distinct values of a table; less is a mask or a flag


@dataclass(frozen=True)
class TableLoss:
    """What a table has lost in the 16-bit format `form`.

    kind: "frequencies" (off by up to `off` radians at a position of 1000), "rounded" (fp32 frequencies whose values all are numbers of `form`),
    "steps" (of `size` neighbours `same` equal the one before), "rows" (the same of the rows of a table of sines).
    """

    kind: Literal["frequencies", "rounded", "steps", "rows"]
    form: str
    size: int
    same: int = 0
    off: float = 0.0


def table_loss(name: str, t: Tensor) -> TableLoss | None:
    """What a fixed tensor `t` (fp32, fp16, bf16; of any shape) whose own name is `name` has lost; None when it is no table, or nothing shows.

    Frequencies (by name, or a geometric sequence) are lost in any 16-bit format, and fp32 ones are when all their values are 16-bit numbers.
    Positions and schedules are when neighbours have become one, tables of sines when rows next to each other have. Cost: some passes over `t`.
    """
    if t.dtype not in (*HALF, torch.float32) or t.is_meta or t.layout != torch.strided or t.numel() < 4:
        return None
    flat = t.detach().reshape(-1).float() if t.dim() == 1 or t.numel() == max(t.shape) else None
    if flat is not None and bool(flat.isfinite().all()) and _is_frequencies(name, flat) and not bool(_is_power(flat).all()):
        if t.dtype in HALF:
            off = 1000 * float(flat[~_is_power(flat)].max()) * FORMATS[HALF[t.dtype]].epsilon / 2
            return TableLoss("frequencies", HALF[t.dtype], flat.numel(), off=off)
        rounded = [form for dtype, form in reversed(HALF.items()) if bool((flat.to(dtype).float() == flat).all())]
        return TableLoss("rounded", rounded[0], flat.numel()) if rounded else None
    if t.dtype not in HALF:
        return None
    if flat is not None:
        steps = flat.diff()
        same = int((steps == 0).sum())
        if flat.numel() >= 64 and bool(((steps >= 0).all()) | ((steps <= 0).all())) and different(flat) >= _FEWEST and same * 20 >= flat.numel():
            return TableLoss("steps", HALF[t.dtype], flat.numel(), same)
    elif t.shape[-1] >= 4 and t.numel() // t.shape[-1] > COUNTS[torch.bfloat16] and bool((t.abs() <= 1).all()):
        rows = t.detach().reshape(-1, t.shape[-1])
        same = int((rows[1:] == rows[:-1]).all(-1).sum())
        if same * 8 >= rows.shape[0] and different(rows[: 4 * COUNTS[torch.bfloat16]]) >= _FEWEST:
            return TableLoss("rows", HALF[t.dtype], rows.shape[0], same)
    return None


def different(t: Tensor) -> int:
    """How many different values a tensor has."""
    return int(torch.unique(t).numel())


def _is_frequencies(name: str, flat: Tensor) -> bool:
    """Whether positive values fall (or rise) as frequencies do: by name, or in equal ratios over at least two decades."""
    if not bool((flat > 0).all()) or flat.numel() < 4:
        return False
    logs = flat.log()
    span = float(logs[-1] - logs[0])
    if "freq" in name.lower() and abs(span) > 1:
        return True
    line = logs[0] + (logs[-1] - logs[0]) * torch.linspace(0, 1, flat.numel(), dtype=logs.dtype, device=flat.device)
    return abs(span) >= math.log(100) and float((logs - line).abs().amax()) <= 0.02


def _is_power(flat: Tensor) -> Tensor:
    """Which values are powers of two, that every format has."""
    return torch.frexp(flat).mantissa.abs() == 0.5
