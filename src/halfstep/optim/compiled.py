"""One pass over all weights by the compiled kernel, for an optimizer whose plain definition gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.optim.codec import SCALE
from halfstep.optim.masters import HALF, Master


@dataclass(frozen=True, eq=False)
class Work:
    """One weight to update: its place in the optimizer, its master if it is 16-bit, its states (the step counted) and its group's settings."""

    number: int
    p: Tensor
    master: Master | None
    state: dict[str, Any]
    group: dict[str, Any]

    @property
    def gradient(self) -> Tensor:
        """The gradient, which there is."""
        assert self.p.grad is not None
        return self.p.grad.resolve_conj()

    def moment(self, key: str) -> Tensor | tuple[Tensor, Tensor]:
        """A state as the kernel takes it: a tensor, or codes and scales."""
        return (self.state[key], self.state[key + SCALE]) if key + SCALE in self.state else self.state[key]

    def is_plain(self) -> bool:
        """Whether the kernel takes it: on the CPU, in the usual order in memory, of a dtype that it knows."""
        p = self.p
        known = p.dtype == torch.float32 or (p.dtype in HALF and self.master is not None)
        if p.device.type != "cpu" or p.layout != torch.strided or not known or self.gradient.dtype not in (torch.float32, *HALF):
            return False
        return p.is_contiguous() and all(self.state[key].is_contiguous() for key in ("exp_avg", "exp_avg_sq"))


class CompiledAdamW:
    """Keeps the kernel's tables from step to step; they are made anew when a tensor has moved."""

    def __init__(self) -> None:
        self._plan: Any = None
        self._made_of: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: Any) -> CompiledAdamW:
        return CompiledAdamW()

    def __reduce__(self) -> tuple[type[CompiledAdamW], tuple[()]]:
        return CompiledAdamW, ()

    def run(self, kernels: ModuleType, work: Sequence[Work], factor: float, seed: int, step: int) -> None:
        """One AdamW step of all of `work`, which must be plain."""
        for w in work:
            if w.master is not None:
                w.master.follow()
        made_of = (seed, *(place for w in work for place in _places(w)))
        if made_of != self._made_of:
            items = [
                kernels.Item(
                    weight=w.p.detach(),
                    storage="fp32" if w.master is None else w.master.storage.name,
                    residual=None if w.master is None else w.master.residual,
                    first=w.moment("exp_avg"),
                    second=w.moment("exp_avg_sq"),
                    parameter=w.number,
                )
                for w in work
            ]
            self._plan, self._made_of = kernels.Plan(items, seed), made_of
        gradients = [g if (g := w.gradient.detach()).is_contiguous() else g.contiguous() for w in work]
        self._plan.run(gradients, [_settings(kernels, w) for w in work], factor, step)
        for w in work:
            if w.master is not None:
                w.master.wrote()
            else:
                increment_version(w.p)


def _places(w: Work) -> tuple[Any, ...]:
    tensors = (w.p, w.state["exp_avg"], w.state["exp_avg_sq"], w.state.get("exp_avg" + SCALE), w.state.get("exp_avg_sq" + SCALE))
    residual = None if w.master is None else w.master.residual
    storage = "" if w.master is None else w.master.storage.name
    return (w.number, w.p.shape, w.p.dtype, storage, *(None if t is None else (t.data_ptr(), t.dtype) for t in (*tensors, residual)))


def _settings(kernels: ModuleType, w: Work) -> Any:
    group = w.group
    return kernels.Step(
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=int(w.state["step"]),
        maximize=bool(group["maximize"]),
    )
