"""How many updates of a step were rounded away: measured by comparing what is stored before and after."""

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
    """Copies of the weights that have a gradient, with their residuals. Memory: as much as these take.

    most: look at so many elements of each at most, evenly spaced and the same each time, so that it costs little; the share is then an estimate.
    """

    def __init__(self, optimizer: Optimizer | Any, most: int | None = None) -> None:
        if isinstance(optimizer, MasteredOptimizer):
            optimizer.settle_masters()  # those that its first step would make
        self._most = most
        self.whole = most is None
        self._kept = []
        for p in parameters(optimizer):
            if p.grad is not None and p.grad.layout == torch.strided:
                self._kept.append((p, self._some(p.grad.detach()) != 0, [self._some(part).clone() for part in stored_parts(p)]))

    def _some(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor that are looked at."""
        values = numerics.stored(tensor)
        return values if self._most is None else values.reshape(-1)[:: -(-values.numel() // self._most) | 1]  # odd: not one column of a matrix only

    def counts(self) -> Tensor | None:
        """[those of them that have not changed, elements with a gradient that is not 0], int64 on the device; None without weights."""
        found = []
        for p, pulled, before in self._kept:
            same = torch.ones_like(pulled)
            now = stored_parts(p)
            for old, new in zip(before, now, strict=len(now) == len(before)):
                same &= old == self._some(new)
            found.append(torch.stack(((same & pulled).sum(), pulled.sum())))
        return torch.stack([f.to(found[0].device) for f in found]).sum(0) if found else None


def share_of(counts: Tensor | None) -> float | None:
    """Of the elements with a gradient that is not 0, the share whose stored value, residual included, has not changed. None without any."""
    stalled, wanted = counts.tolist() if counts is not None else (0, 0)
    return stalled / wanted if wanted else None
