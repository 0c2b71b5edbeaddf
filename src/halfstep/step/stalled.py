"""How many updates of a step were rounded away: measured on request, by comparing what is stored before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep import numerics
from halfstep.optim import MasteredOptimizer, master_of
from halfstep.step.marks import parameters


def stored_parts(p: Tensor) -> list[Tensor]:
    """The tensors that hold a weight: itself, and the residual of its master."""
    master = master_of(p)
    if master is None:
        return [p.detach()]
    master.follow()
    return [p.detach()] if master.residual is None else [p.detach(), master.residual]


class Before:
    """Copies of all weights that have a gradient, with their residuals. Memory: as much as these take."""

    def __init__(self, optimizer: Optimizer | Any) -> None:
        if isinstance(optimizer, MasteredOptimizer):
            optimizer.settle_masters()  # those that its first step would make
        self._kept = []
        for p in parameters(optimizer):
            if p.grad is not None and p.grad.layout == torch.strided:
                self._kept.append((p, numerics.stored(p.grad.detach()) != 0, [part.clone() for part in stored_parts(p)]))

    def share(self) -> float | None:
        """Of the elements with a gradient that is not 0, the share whose stored value, residual included, has not changed. None without any."""
        wanted = stalled = 0
        for p, pulled, before in self._kept:
            same = torch.ones_like(pulled)
            now = stored_parts(p)
            for old, new in zip(before, now, strict=len(now) == len(before)):
                same &= numerics.stored(old) == numerics.stored(new)
            wanted += int(pulled.sum())
            stalled += int((same & pulled).sum())
        return stalled / wanted if wanted else None
