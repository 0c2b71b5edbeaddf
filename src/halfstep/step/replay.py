"""Backward passes that can be run again: the graphs of a step's losses are kept until the step is taken.

Memory: everything the forward passes of one step have saved for the backward pass stays until the step, instead of being
freed as the backward pass proceeds; with accumulation that of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from halfstep.errors import StepOrderError


@dataclass
class _Run:
    """One backward pass that was run: of which loss, from which gradient, under which scale, and the parameters it reached."""

    loss: Tensor
    gradient: Tensor
    scale: float
    moved: set[int] = field(default_factory=set)


class _Kept(torch.autograd.Function):
    """The loss, detached; its backward pass runs that of the real one, keeps the graph and tells."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: tuple[Tensor, Callable[[Tensor, Tensor], None]]) -> Tensor:
        ctx.kept = kept  # inside a tuple autograd does not see the loss, and so does not free its graph
        return kept[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise StepOrderError(
                "a backward pass with create_graph=True was run under on_overflow='replay', which differentiates each loss by itself",
                "Use on_overflow='skip' for gradient penalties.",
            )
        loss, tell = ctx.kept
        tell(loss, grad)
        torch.autograd.backward(loss, grad, retain_graph=True)
        return None, None


class Replay:
    """Remembers the backward passes of a step, and runs them again under another scale."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._new: list[_Run] = []  # of the backward pass that is going on

    def keep(self, loss: Tensor, scale: Callable[[], float]) -> Tensor:
        """A stand-in for `loss` whose backward passes can be repeated; `scale()` is what its gradient is multiplied by."""
        mine = ref(self)

        def tell(kept: Tensor, gradient: Tensor) -> None:
            replay = mine()
            if replay is not None:
                replay._new.append(_Run(kept, gradient, scale()))

        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        stand_in: Tensor = _Kept.apply(anchor, (loss, tell))  # type: ignore[no-untyped-call]
        return stand_in

    def note(self, moved: set[int], added: set[int]) -> None:
        """A backward pass has ended that changed these gradients, and added to some of them; earlier ones that were cleared are forgotten."""
        self._runs = [run for run in self._runs if not run.moved & moved or run.moved & moved & added]
        for run in self._new:
            run.moved = moved
        self._runs += self._new
        self._new = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run again."""
        return not self._runs

    def clear(self) -> None:
        """Let the graphs go: the step was taken or given up."""
        self._runs, self._new = [], []

    def run(self, scale: float, known: Iterable[Tensor], holds: Callable[[Tensor], bool]) -> None:
        """Make the gradients again that these passes have made under `scale`, instead of those that parameters hold now."""
        held = {id(p): p for p in known if holds(p)}
        runs = [run for run in self._runs if run.moved & set(held)]
        for p in held.values():
            if any(id(p) in run.moved for run in runs):
                p.grad = None
        for run in runs:
            torch.autograd.backward(run.loss, run.gradient * (scale / run.scale), retain_graph=True)
