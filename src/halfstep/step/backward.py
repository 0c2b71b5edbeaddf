"""Notices backward passes of scaled losses: which parameters they reach and which gradients they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

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
        if begins(gradient):
            engine = Variable._execution_engine
            engine.queue_callback(
                lambda: engine.queue_callback(ended)
            )  # after those of others: DDP writes reduced gradients in one  # torch's own wrappers (DDP, FSDP) use it too

    loss.register_hook(comes)  # type: ignore[no-untyped-call]
