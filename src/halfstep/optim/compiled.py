"""One pass over all weights by the compiled kernel, for an optimizer whose plain definition gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.kernels import kernels_for
from halfstep.numerics import Settings
from halfstep.optim.codec import SCALE
from halfstep.optim.masters import HALF, Master
from halfstep.optim.repeat import Repeat
from halfstep.optim.rule import Rule

if TYPE_CHECKING:
    from halfstep.optim.onepass import OnePass

KERNEL_DTYPES = (torch.float32, *HALF)


@dataclass(slots=True, eq=False)
class Work:
    """One weight to update: its place in the optimizer, its gradient, its master if it is 16-bit, its states, and its group's settings.

    keys: of the states that its step reads and writes. first: these are new, and zeros.
    """

    number: int
    p: Tensor
    gradient: Tensor
    master: Master | None
    state: dict[str, Any]
    group: dict[str, Any]
    keys: tuple[str, ...]
    first: bool

    def count(self) -> int:
        """How many steps it has taken, this one among them; 0 where none are counted."""
        return int(self.state["step"]) if "step" in self.state else 0

    def moments(self) -> list[Tensor | tuple[Tensor, Tensor]]:
        """The states as the kernel takes them: a tensor, or codes and scales."""
        return [(self.state[key], self.state[key + SCALE]) if key + SCALE in self.state else self.state[key] for key in self.keys]

    def is_plain(self, device: torch.device) -> bool:
        """Whether the kernel of this device takes it: there, in the usual order in memory, of a dtype that it knows."""
        p = self.p
        if p.device != device or p.layout != torch.strided or not (p.dtype == torch.float32 or (p.dtype in HALF and self.master is not None)):
            return False
        return p.is_contiguous() and all(self.state[key].is_contiguous() for key in self.keys)

    def places(self) -> tuple[Any, ...]:
        """What the kernel's tables are made of, as addresses: a tensor may get other memory and stay the same object."""
        s, master = self.state, self.master
        found = [self.p.data_ptr(), *[s[key].data_ptr() for key in self.keys]]
        found += [s[key + SCALE].data_ptr() for key in self.keys if key + SCALE in s]
        if master is None:
            return (None, None, *found)
        residual = master.residual
        return (master.storage.name, None if residual is None else residual.data_ptr(), *found)

    def formats(self) -> tuple[Any, ...]:
        """The rest of what they are made of."""
        states = [t for key in self.keys for t in (self.state[key].dtype, self.state[key].stride())]
        return self.p.dtype, self.p.shape, self.p.stride(), *states


class Compiled:
    """Keeps the kernel's tables from step to step; they are made anew when a tensor has moved."""

    def __init__(self) -> None:
        self._plan: Any = None
        self._seed = 0  # that the plan was made with
        self._repeat: Repeat | None = None
        self._made_of: dict[int, tuple[Any, ...]] = {}  # by number of the parameter; the plan's own references keep addresses from being used again

    def __deepcopy__(self, memo: Any) -> Compiled:
        return Compiled()

    def __reduce__(self) -> tuple[type[Compiled], tuple[()]]:
        return Compiled, ()

    def repeated(self, optimizer: OnePass, factor: float) -> bool:
        """Take the step as the one before, where nothing else is different; False, with nothing done, where anything is."""
        if self._repeat is None:
            return False
        kernels = kernels_for(self._repeat.device)
        if kernels is not None and self._repeat.run(kernels, optimizer, factor):
            return True
        self._repeat = None
        return False

    def run(self, kernels: ModuleType, work: Sequence[Work], factor: float, optimizer: OnePass) -> list[Work]:
        """One step of all that the kernel takes; returns the others, those on other devices than the first too. The steps are counted already."""
        seed, step, device = optimizer.seed, optimizer.steps, work[0].p.device
        left: list[Work] = []
        taken: list[Work] = []
        made_of: dict[int, tuple[Any, ...]] = {}
        same = True
        for w in work:
            if w.master is not None:
                w.master.follow()
            places = (*w.places(), *w.formats())
            known = self._made_of.get(w.number) == places
            if w.gradient.dtype not in KERNEL_DTYPES or not (known or w.is_plain(device)):
                left.append(w)
                continue
            same = same and known
            made_of[w.number] = places
            taken.append(w)
        if not taken:
            return left
        same = same and made_of.keys() == self._made_of.keys() and self._plan is not None and seed == self._seed
        settings = _settings(optimizer.rule, taken)
        if not same:
            self._seed, self._made_of = seed, made_of
            self._plan = kernels.Plan([_item(kernels, w) for w in taken], seed, settings[0].rule)
        gradients = [g if g.is_contiguous() else g.contiguous() for g in (w.gradient.resolve_neg() for w in taken)]
        self._plan.run(gradients, settings, factor, step)
        increment_version([w.p for w in taken])
        for w in taken:
            if w.master is not None:
                w.master.wrote(counted=True)
        params = [w.p for w in taken]
        if same and not left and Repeat.takes(optimizer.rule, params, [w.state for w in taken]):  # the second step of these: a third is likely
            self._repeat = Repeat(kernels, optimizer, self._plan, params, [w.master for w in taken])
        return left


def _item(kernels: ModuleType, w: Work) -> Any:
    return kernels.Item(
        w.p.detach(),
        "fp32" if w.master is None else w.master.storage.name,
        None if w.master is None else w.master.residual,
        *[*w.moments(), None, None][:2],
        parameter=w.number,
    )


def _settings(rule: Rule, work: Sequence[Work]) -> list[Settings]:
    """The settings of each weight's step; those of a group that have taken as many steps share one record."""
    counts = torch.stack([w.state["step"] for w in work]).tolist() if rule.counts else [0] * len(work)
    made: dict[tuple[int, float, bool], Settings] = {}
    for w, count in zip(work, counts, strict=True):
        if (id(w.group), count, w.first) not in made:
            made[id(w.group), count, w.first] = rule.settings(w.group, int(count), w.first)
    return [made[id(w.group), count, w.first] for w, count in zip(work, counts, strict=True)]
