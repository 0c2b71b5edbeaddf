"""Tensors without numbers: on the meta device, or torch's fake tensors, with which a step is walked through before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

STANDS_FOR = "halfstep_stands_for"  # the attribute of one that stands for a tensor with numbers


def is_shape(t: Tensor) -> bool:
    """Whether a tensor has a shape, a format and a device, and no numbers that could be read."""
    return type(t) is FakeTensor or t.is_meta


def walking() -> bool:
    """Whether this thread walks through something on fake tensors: what is made now is a shape."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def for_real() -> AbstractContextManager[Any]:
    """The block in which tensors are made and computed although the thread walks through something on fake tensors."""
    return _disable_current_modes() if walking() else nullcontext()


def asked(t: Tensor, question: Callable[[Tensor], bool], unknown: bool) -> bool:
    """The answer to a question about the numbers of `t`, or of the tensor that it stands for; `unknown` where nobody knows them."""
    if not is_shape(t):
        return question(t.detach())
    values = getattr(t, STANDS_FOR, None)
    if not isinstance(values, Tensor) or is_shape(values):
        return unknown
    with _disable_current_modes():
        return question(values.detach())
