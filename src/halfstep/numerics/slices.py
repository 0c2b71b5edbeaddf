"""Elementwise functions of large tensors, a stretch at a time: temporaries stay in the cache and their memory does not grow with the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CPU_SLICE = 1 << 18  # elements: 1 MB of fp32. In one go, functions of ten operations take four times as long
DEVICE_SLICE = 1 << 24  # one launch per operation and 64 MB of fp32 each


def ranges(numel: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `numel` elements in order, of whole blocks of 128 but the last."""
    size = CPU_SLICE if device.type == "cpu" else DEVICE_SLICE
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


def by_slices(function: Callable[..., tuple[Tensor, ...]], dtypes: tuple[torch.dtype, ...], x: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """The results of an elementwise `function(x, *others)` in `dtypes`, new contiguous tensors in the shape of `x`.

    others: tensors with as many elements as `x` (or None), taken flat as `x` is.
    """
    x = x.detach()
    flat = [None if t is None else t.reshape(-1) for t in (x, *others)]
    made = tuple(torch.empty(x.numel(), dtype=dtype, device=x.device) for dtype in dtypes)
    for part in ranges(x.numel(), x.device):
        for whole, result in zip(made, function(*(None if t is None else t[part] for t in flat)), strict=True):
            whole[part] = result
    return tuple(whole.view(x.shape) for whole in made)
