"""Dropout on a CPU with torch's numbers, drawn several at once: `halfstep.kernels.bernoulli`. Result, gradient and generator have torch's bits."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.amp import scratch
from halfstep.amp.mode import Route
from halfstep.amp.rounding import transformed
from halfstep.kernels import bernoulli_kernels
from halfstep.numerics.standins import is_shape

SMALLEST = 2048  # elements from which on it is faster
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def drawable(x: Tensor, p: float, count: int | None = None) -> bool:
    """Whether `drop` takes this tensor, or one of `count` elements made of it, and this probability here: not where torch must draw itself."""
    if not 0 < p < 1 or x.dtype not in FORMATS or (x.numel() if count is None else count) < SMALLEST or x.device.type != "cpu" or transformed():
        return False
    return scratch.plain(x) and not is_shape(x) and _kernels() is not None


def drop(x: Tensor, p: float) -> Tensor:
    """`torch.dropout(x, p, True)`: x times 0 or 1 / (1 - p), in its format, drawn in the order of its memory from torch's default generator."""
    kernels = _kernels()
    if kernels is None:
        return torch.dropout(x, p, True)
    noise = torch.empty_like(x)
    kernels.fill(noise, 1 - p, _kept(x.dtype, 1 - p), torch.default_generator)
    return x * noise


def _kernels() -> ModuleType | None:
    kernels = bernoulli_kernels()
    return kernels if kernels is not None and kernels.is_torchs() else None


@functools.lru_cache(maxsize=64)
def _kept(dtype: torch.dtype, share: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(1, dtype=dtype).div_(share)


def dropout(dtype: torch.dtype, func: Route, /, *args: Any, **kwargs: Any) -> Any:
    """torch.nn.functional.dropout and torch.dropout."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    x, p, training = given.get("input"), given.get("p", 0.5), given.get("training", given.get("train", True))
    if not isinstance(x, Tensor) or type(p) is not float or not training or given.get("inplace"):
        return func(*args, **kwargs)
    return drop(x, p) if drawable(x, p) else func(*args, **kwargs)


ROUTE: dict[Any, Route] = dict.fromkeys((F.dropout, torch.dropout), dropout)
