"""One pass over all weights by the compiled kernel, for an optimizer whose plain definition gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.kernels import cpu_kernels
from halfstep.optim.codec import SCALE
from halfstep.optim.masters import HALF, Master
from halfstep.optim.repeat import Repeat, step_of

if TYPE_CHECKING:
    from halfstep.optim.base import MasteredOptimizer

KERNEL_DTYPES = (torch.float32, *HALF)


@dataclass(slots=True, eq=False)
class Work:
    """One weight to update: its place in the optimizer, its gradient, its master if it is 16-bit, its states, and its group's settings."""

    number: int
    p: Tensor
    gradient: Tensor
    master: Master | None
    state: dict[str, Any]
    group: dict[str, Any]

    def moment(self, key: str) -> Tensor | tuple[Tensor, Tensor]:
        """A state as the kernel takes it: a tensor, or codes and scales."""
        return (self.state[key], self.state[key + SCALE]) if key + SCALE in self.state else self.state[key]

    def is_plain(self) -> bool:
        """Whether the kernel takes it: on the CPU, in the usual order in memory, of a dtype that it knows."""
        p = self.p
        if p.device.type != "cpu" or p.layout != torch.strided or not (p.dtype == torch.float32 or (p.dtype in HALF and self.master is not None)):
            return False
        return p.is_contiguous() and all(self.state[key].is_contiguous() for key in ("exp_avg", "exp_avg_sq"))

    def places(self) -> tuple[Any, ...]:
        """What the kernel's tables are made of, as addresses: a tensor may get other memory and stay the same object."""
        s, master = self.state, self.master
        found = [self.p.data_ptr(), s["exp_avg"].data_ptr(), s["exp_avg_sq"].data_ptr()]
        if "exp_avg_scale" in s:
            found += (s["exp_avg_scale"].data_ptr(), s["exp_avg_sq_scale"].data_ptr())
        if master is None:
            return (None, None, *found)
        residual = master.residual
        return (master.storage.name, None if residual is None else residual.data_ptr(), *found)

    def formats(self) -> tuple[Any, ...]:
        """The rest of what they are made of."""
        first, second = self.state["exp_avg"], self.state["exp_avg_sq"]
        return self.p.dtype, self.p.shape, self.p.stride(), first.dtype, first.stride(), second.dtype, second.stride()


class CompiledAdamW:
    """Keeps the kernel's tables from step to step; they are made anew when a tensor has moved."""

    def __init__(self) -> None:
        self._plan: Any = None
        self._seed = 0  # that the plan was made with
        self._repeat: Repeat | None = None
        self._made_of: dict[int, tuple[Any, ...]] = {}  # by number of the parameter; the plan's own references keep addresses from being used again

    def __deepcopy__(self, memo: Any) -> CompiledAdamW:
        return CompiledAdamW()

    def __reduce__(self) -> tuple[type[CompiledAdamW], tuple[()]]:
        return CompiledAdamW, ()

    def repeated(self, optimizer: MasteredOptimizer, factor: float) -> bool:
        """Take the step as the one before, where nothing else is different; False, with nothing done, where anything is."""
        if self._repeat is None:
            return False
        kernels = cpu_kernels()
        if kernels is not None and self._repeat.run(kernels, optimizer, factor):
            return True
        self._repeat = None
        return False

    def run(self, kernels: ModuleType, work: Sequence[Work], factor: float, optimizer: MasteredOptimizer) -> list[Work]:
        """One AdamW step of all that the kernel takes; returns the others. The steps in their states, and the optimizer's, are counted already."""
        seed, step = optimizer.seed, optimizer.steps
        left: list[Work] = []
        taken: list[Work] = []
        made_of: dict[int, tuple[Any, ...]] = {}
        same = True
        for w in work:
            if w.master is not None:
                w.master.follow()
            places = (*w.places(), *w.formats())
            known = self._made_of.get(w.number) == places
            if w.gradient.dtype not in KERNEL_DTYPES or not (known or w.is_plain()):
                left.append(w)
                continue
            same = same and known
            made_of[w.number] = places
            taken.append(w)
        if not taken:
            return left
        same = same and made_of.keys() == self._made_of.keys() and self._plan is not None and seed == self._seed
        if not same:
            self._seed, self._made_of = seed, made_of
            self._plan = kernels.Plan([_item(kernels, w) for w in taken], seed)
        gradients = [g if g.is_contiguous() else g.contiguous() for g in (w.gradient.resolve_neg() for w in taken)]
        self._plan.run(gradients, _settings(kernels, taken), factor, step)
        increment_version([w.p for w in taken])
        for w in taken:
            if w.master is not None:
                w.master.wrote(counted=True)
        params = [w.p for w in taken]
        if same and not left and Repeat.takes(params, [w.state for w in taken]):  # the second step of these: a third is likely
            self._repeat = Repeat(kernels, optimizer, self._plan, params, [w.master for w in taken])
        return left


def _item(kernels: ModuleType, w: Work) -> Any:
    return kernels.Item(
        weight=w.p.detach(),
        storage="fp32" if w.master is None else w.master.storage.name,
        residual=None if w.master is None else w.master.residual,
        first=w.moment("exp_avg"),
        second=w.moment("exp_avg_sq"),
        parameter=w.number,
    )


def _settings(kernels: ModuleType, work: Sequence[Work]) -> list[Any]:
    """The settings of each weight's step; those of a group that have taken as many steps share one record."""
    counts = torch.stack([w.state["step"] for w in work]).tolist()
    made: dict[tuple[int, float], Any] = {}
    for w, count in zip(work, counts, strict=True):
        if (id(w.group), count) not in made:
            made[id(w.group), count] = step_of(kernels, w.group, int(count))
    return [made[id(w.group), count] for w, count in zip(work, counts, strict=True)]
