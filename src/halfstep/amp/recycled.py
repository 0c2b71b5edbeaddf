"""Memory of large gradients, and of 16-bit copies of large weights, used again by the next step.

The C library maps a block of more than 32 MiB anew each time, and the first write to each of its pages costs more than the number that is written:
12,000 page faults for the gradient of an embedding of 12 million elements. What is kept here is the memory that the step before
has let go (4 bytes per element of a weight of LEAST elements and more for the gradient, 2 for the copy); while anybody holds it a new block is made.
"""

from __future__ import annotations

import sys
import threading
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from halfstep import optim
from halfstep.amp import scratch
from halfstep.amp.rounding import narrow
from halfstep.optim import RELEASES

LEAST = 1 << 22  # elements of a weight, from which on this is done
LOW, GRADIENT = range(2)


class _Spare(threading.local):
    """The blocks of this thread, by weight and by what they are for; and the gradient that is under way for a weight."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], tuple[ref[Tensor], torch.UntypedStorage]] = {}
        self.under_way: dict[int, tuple[int, ref[Tensor]]] = {}  # by weight: the backward pass, and its gradient so far


_spare = _Spare()


def like(weight: Tensor, use: int, dtype: torch.dtype) -> Tensor:
    """A tensor in the shape and strides of a dense `weight`, with any values in it: in the memory of the last one, if nobody holds that."""
    released = use == GRADIENT and RELEASES and optim.handle_of(weight) is not None  # it is to be freed
    if weight.numel() < LEAST or not scratch.plain(weight) or released:
        return torch.empty_like(weight, dtype=dtype)
    key, size = (id(weight), use), weight.numel() * dtype.itemsize
    known = _spare.blocks.get(key)
    if known is None or known[0]() is not weight or known[1].nbytes() != size or _is_held(known[1]):
        made = torch.empty_like(weight, dtype=dtype)
        if made.untyped_storage().nbytes() == size:
            blocks = _spare.blocks
            blocks[key] = ref(weight, lambda _: blocks.pop(key, None)), made.untyped_storage()
        return made
    return torch.empty(0, dtype=dtype).set_(known[1], 0, weight.shape, weight.stride())


def _is_held(storage: torch.UntypedStorage) -> bool:
    """Whether anybody else has it, in this process or, by shared memory, in another one."""
    return bool(torch._C._storage_Use_Count(storage._cdata) != 1 or storage.is_shared())


def low(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The 16-bit copy of a weight for one product and its backward pass; the weight itself where it is in that format."""
    if weight.dtype == dtype or weight.numel() < LEAST or not scratch.plain(weight):
        return narrow(weight, dtype)
    return like(weight, LOW, dtype).copy_(weight)


def gradient(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Where a gradient of `weight`, a leaf, may be made, with any values in it; in `dtype`, by default in that which the weight takes."""
    return like(weight, GRADIENT, dtype or takes(weight))


def takes(weight: Tensor) -> torch.dtype:
    """The dtype in which autograd gives a leaf its gradient: fp32 for a 16-bit one that several sums go to."""
    found: torch.dtype | None = weight.grad_dtype
    return found or weight.dtype


def begin(weight: Tensor, gradient: Tensor) -> None:
    """`gradient` is what the backward pass at hand has found for `weight` so far, and autograd will be given it."""
    if weight.numel() >= LEAST:
        known = {i: entry for i, entry in _spare.under_way.items() if entry[1]() is not None}
        _spare.under_way = known | {id(weight): (torch._C._current_graph_task_id(), ref(gradient))}


def so_far(weight: Tensor) -> Tensor | None:
    """The gradient of `weight` that this backward pass has begun and that autograd alone holds: what else it finds may be added there.

    None where there is none, or where somebody else has a hand on it: it may then not be what autograd goes on with.
    """
    task, found = _spare.under_way.get(id(weight), (-1, None))
    gradient = found() if found is not None and task == torch._C._current_graph_task_id() else None
    if gradient is None or gradient.shape != weight.shape or gradient.dtype != takes(weight):
        return None
    # one reference of autograd's own beside Python's; in Python this function's two (name and argument), and the object itself
    alone = gradient._use_count() == 2 and sys.getrefcount(gradient) == 3  # type: ignore[attr-defined]
    return gradient if alone else None


class WalkedThrough:
    """The block in which a step is walked through on fake tensors: what is kept for weights is the block's own."""

    def __enter__(self) -> None:
        self._before = (_spare.blocks, _spare.under_way)
        _spare.blocks, _spare.under_way = {}, {}

    def __exit__(self, *_: Any) -> None:
        _spare.blocks, _spare.under_way = self._before


def clear() -> None:
    """Let go of all blocks of this thread."""
    _spare.blocks.clear()
