"""Notices backward passes of scaled losses: which parameters they reach and which gradients they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Variable

from halfstep.step.graph import Reached, walk


class BackwardWatch:
    """Knows the parameters that losses reach, and calls `ended` after each backward pass of a loss it was shown."""

    def __init__(self) -> None:
        self._leaves: dict[int, ref[Tensor]] = {}

    def look(self, loss: Tensor) -> Reached:
        """What the graph of `loss` reaches. Every graph is walked: a parameter that joins late would have a gradient that nobody knows."""
        reached = walk(loss)
        new = {id(p): ref(p) for p in reached.leaves if id(p) not in self._leaves or self._leaves[id(p)]() is not p}
        if new:
            self._leaves = {i: r for i, r in self._leaves.items() if r() is not None} | new
        return reached

    def leaves(self) -> list[Tensor]:
        """The parameters that were reached and are still there."""
        return [p for r in self._leaves.values() if (p := r()) is not None]

    def everybody(self, known: Iterable[Tensor]) -> list[Tensor]:
        """`known` parameters and the leaves, each once."""
        return list({id(p): p for p in (*known, *self.leaves())}.values())


def when_backward_ends(loss: Tensor, begins: Callable[[Tensor], bool], ended: Callable[[], Any]) -> None:
    """Run `begins(gradient)` when a backward pass comes through `loss`, and, if it says so, `ended` when that pass ends.

    What `ended` raises, `backward()` raises.
    """

    def comes(gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            wanted = begins(gradient)
        if wanted:
            engine = Variable._execution_engine
            # after those of others: DDP writes reduced gradients in one; torch's own wrappers (DDP, FSDP) use it too
            engine.queue_callback(lambda: engine.queue_callback(lambda: _unseen(ended)))

    loss.register_hook(comes)  # type: ignore[no-untyped-call]


def _unseen(ended: Callable[[], Any]) -> None:
    """An op policy may be open around a backward pass, and would see every gradient and version that is asked for, 3 us each."""
    with torch._C.DisableTorchFunction():
        ended()


def value_of(loss: Tensor) -> Tensor | None:
    """The value of a loss, an fp32 scalar without a graph; None for one of several elements."""
    if loss.numel() != 1:
        return None
    value = loss.detach()
    value = value if value.dtype is torch.float32 else value.float()
    return value if value.dim() == 0 else value.reshape(())


def through(seen: Tensor | None, gradient: Tensor) -> Tensor | None:
    """What a loss of value `seen` adds to the backward pass that comes through it with `gradient`: 1, or what the user has divided it by."""
    if seen is None or gradient.numel() != 1:
        return None
    factor = gradient.detach() if gradient.requires_grad else gradient
    return seen * (factor if factor.dim() == 0 else factor.reshape(()))
