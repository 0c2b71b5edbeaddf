"""Notices backward passes of scaled losses: which parameters they reach and which gradients they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd import Variable

from halfstep.step.graph import Reached, walk

WALKS, QUIET = 16, 3  # the first losses whose graphs are walked; fewer when so many in a row show nothing new


class BackwardWatch:
    """Knows the parameters that losses reach, and calls `ended` after each backward pass of a loss it was shown."""

    def __init__(self) -> None:
        self._leaves: dict[int, ref[Tensor]] = {}
        self._walks, self._quiet = 0, 0

    def look(self, loss: Tensor) -> Reached | None:
        """What the graph of `loss` reaches, for the first losses; None later. Parameters made afterwards are known by their optimizers."""
        if self._walks >= WALKS or self._quiet >= QUIET:
            return None
        self._walks += 1
        reached = walk(loss)
        new = [p for p in reached.leaves if id(p) not in self._leaves or self._leaves[id(p)]() is not p]
        self._leaves |= {id(p): ref(p) for p in new}
        self._quiet = 0 if new else self._quiet + 1
        return reached

    def reach(self, loss: Tensor) -> Reached:
        """What the graph of `loss` reaches."""
        return walk(loss)

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
            Variable._execution_engine.queue_callback(ended)  # torch's own wrappers (DDP, FSDP) use it too

    loss.register_hook(comes)  # type: ignore[no-untyped-call]
