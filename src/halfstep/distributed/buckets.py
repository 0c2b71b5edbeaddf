"""Gradients that ranks send together, and who uses them up when they have come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Users(Protocol):
    """Who uses gradients up inside the backward pass at hand, as soon as they are the mean over ranks. The same parameters on all ranks."""

    def reaches(self, p: Tensor) -> bool:
        """Whether the backward pass may give `p` a gradient on this rank: only those are waited for."""

    def takes(self, p: Tensor) -> bool:
        """Whether the gradient of `p` is used up."""

    def use(self, p: Tensor) -> None:
        """Use the gradient of `p` and let go of it. Called in one order on all ranks."""


class Nobody:
    """Gradients stay."""

    def reaches(self, p: Tensor) -> bool:
        """Any may get one."""
        return True

    def takes(self, p: Tensor) -> bool:
        """None is."""
        return False

    def use(self, p: Tensor) -> None:
        """Nothing to do."""


@dataclass
class Bucket:
    """Gradients that are sent together. The last elements of `flat` say of how many ranks each gradient is."""

    parameters: list[Tensor]
    dtype: torch.dtype
    group: int  # number of the model they belong to
    waits: set[int] = field(default_factory=set)  # ids of parameters whose gradient is not there yet
    used: set[int] = field(default_factory=set)  # ids of those whose gradient somebody uses up
    lacks: list[Tensor] = field(default_factory=list)  # parameters that this rank had no gradient of when the bucket was sent
    sent: bool = False
    late: bool = False  # a gradient was added to after the bucket was sent
    flat: Tensor | None = None
    work: Any = None
    _dropped: dict[int, torch.dtype] = field(default_factory=dict)  # formats of gradients that are in `flat` alone

    def expect(self, users: Users) -> None:
        """A backward pass follows that sends it."""
        self.waits = {id(p) for p in self.parameters if users.reaches(p)}
        self.used = {id(p) for p in self.parameters if users.takes(p)}
        self.sent = self.late = False

    def forget(self) -> None:
        """Throw away what was sent."""
        self.flat, self.work, self.sent = None, None, False
        self.used.clear()
        self._dropped.clear()

    def views(self) -> tuple[list[Tensor], Tensor]:
        """The parts of `flat`, shaped as the parameters, and the counts."""
        assert self.flat is not None
        parts = torch.split(self.flat, [*(p.numel() for p in self.parameters), len(self.parameters)])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=False)], parts[-1]

    @torch.no_grad()
    def send(self, world: int) -> int:
        """Start the sum over ranks; returns its bytes. Gradients that will be used up are from now on in `flat` alone."""
        device = self.parameters[0].device
        self.flat = torch.empty(sum(p.numel() + 1 for p in self.parameters), dtype=self.dtype, device=device)
        parts, counts = self.views()
        held = [(part, p.grad) for part, p in zip(parts, self.parameters, strict=True) if p.grad is not None]
        self.lacks = [p for p in self.parameters if p.grad is None]
        if held:
            torch._foreach_copy_([part for part, _ in held], [g for _, g in held])
        if self.lacks:
            counts.copy_(torch.tensor([float(p.grad is not None) for p in self.parameters]))
            for part, p in zip(parts, self.parameters, strict=True):
                if p.grad is None:
                    part.zero_()
        else:
            counts.fill_(1.0)
        self.flat.div_(world)
        for p in self.parameters:
            if id(p) in self.used and p.grad is not None and p.grad.is_contiguous():
                self._dropped[id(p)], p.grad = p.grad.dtype, None
        self.sent, self.late, self.work = True, False, dist.all_reduce(self.flat, async_op=True)
        return self.flat.nbytes

    @torch.no_grad()
    def receive(self, users: Users) -> None:
        """Wait for the sum and make it the gradients. A parameter that no rank has a gradient of gets none."""
        self.work.wait()
        parts, counts = self.views()
        held = [(p.grad, part) for part, p in zip(parts, self.parameters, strict=True) if p.grad is not None]
        if held:
            torch._foreach_copy_([g for g, _ in held], [part for _, part in held])
        told = counts.tolist() if self.lacks else [1.0] * len(parts)  # only where one is lacking something is read from the device
        for p, part, count in zip(self.parameters, parts, told, strict=True):
            uses = id(p) in self.used
            if p.grad is None and count > 0:
                p.grad = part.to(self._dropped.get(id(p)) or gradient_dtype(p), copy=not uses)
            if uses and p.grad is not None:
                users.use(p)
        self.flat, self.work = None, None
        self._dropped.clear()


def gradient_dtype(p: Tensor) -> torch.dtype:
    """The dtype that gradients of a parameter have."""
    return getattr(p, "grad_dtype", None) or p.dtype
