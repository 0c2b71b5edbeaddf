"""Memory for the fp32 copies that live inside one product and nowhere else, used again by the next one.

Made anew each time they would lie between the tensors that stay (16-bit gradients, activations) and leave holes when they go: on a model of 135 M
parameters those holes were 700 MB. Used again they also stay in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from halfstep.numerics.standins import FakeTensor

SMALLEST, LARGEST = 1 << 14, 1 << 22  # elements: smaller ones leave no holes, larger ones are mapped and given back to the system (16 MiB)
GRADIENT, LEFT, RIGHT, RESULT, SUM = range(5)  # what a place is for: no two copies that live at once share one


class _Places(threading.local):
    """The places of this thread. Whoever takes one is done with it before anything else of this module runs in the thread.

    kinds: what counts as a plain tensor. modes: how many dispatch modes only look on. Both are others while a step is walked through.
    """

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}
        self.kinds: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
        self.modes = 0


_places = _Places()


def plain(*tensors: Tensor) -> bool:
    """Whether these are just numbers in memory that nobody watches: no subclass, and no mode that would see, replace or keep what is made of them."""
    if torch._C._len_torch_dispatch_stack() > _places.modes or not straight(*tensors):
        return False
    return torch._C._len_torch_function_stack() == 0 or not torch._C._is_torch_function_mode_enabled() or all(map(_ours, _modes()))


def straight(*tensors: Tensor) -> bool:
    """Whether these are torch's own tensors and parameters, of no subclass, and not sparse."""
    kinds = _places.kinds
    return all(type(t) in kinds and t.layout == torch.strided for t in tensors)


class WalkedThrough:
    """The block in which this thread walks through a step on fake tensors, or counts a real one: fakes are plain, and places the block's own.

    To be entered inside the modes that look on.
    """

    def __enter__(self) -> None:
        self._before = (_places.of, _places.kinds, _places.modes)
        _places.of, _places.kinds, _places.modes = {}, (*_places.kinds, FakeTensor), torch._C._len_torch_dispatch_stack()

    def __exit__(self, *_: Any) -> None:
        _places.of, _places.kinds, _places.modes = self._before


_BATCH: Any = torch._C._parse_dispatch_key("Batched")


def is_batch(t: Tensor) -> bool:
    """Whether a tensor stands for many, by torch's older vmap (`torch.autograd.grad(is_grads_batched=True)`): nothing may be written then."""
    return bool(torch._C._dispatch_keys(t).has(_BATCH))


def _modes() -> list[object]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _ours(mode: object) -> bool:
    return type(mode).__module__.startswith("halfstep.")


def empty(place: int, shape: Sequence[int], turned: bool = False) -> Tensor:
    """An fp32 tensor in a place, or a new one where it is too small or too large for that; turned: the last two dimensions are in Fortran's order."""
    count = 1
    for n in shape:
        count *= n
    if not SMALLEST <= count <= LARGEST:
        sizes = (*shape[:-2], shape[-1], shape[-2]) if turned else tuple(shape)
        made = torch.empty(sizes, dtype=torch.float32, device="cpu")
        return made.mT if turned else made
    memory = _places.of.get(place)
    if memory is None or memory.numel() < count:
        with torch.inference_mode(False):  # also what is made inside an inference block is used outside
            memory = _places.of[place] = torch.empty(count, dtype=torch.float32, device="cpu")
    return memory[:count].view((*shape[:-2], shape[-1], shape[-2])).mT if turned else memory[:count].view(shape)


def wide(place: int, t: Tensor) -> Tensor:
    """The fp32 copy of a 16-bit tensor of two and more dimensions, its last two in the order that they have."""
    if t.numel() < SMALLEST:
        return t.float()
    return empty(place, t.shape, turned=0 < t.stride(-2) < t.stride(-1)).copy_(t)


def wide_if(usable: bool, place: int, t: Tensor) -> Tensor:
    """The same, or a new tensor where what is made of it may be kept or watched."""
    return wide(place, t) if usable else t.float()
