"""A step that is like the one before it: everything that the last step looked at is seen to be the same, by lists, and the kernel is called.

Looking at each of hundreds of tensors takes longer than updating small ones. Which tensors belong together, how they lie in memory and who
keeps their masters was all found out by the step before; here it is only compared: the same objects, at the same addresses, of the same
versions. Whatever is different makes `Repeat.run` return False, with nothing done, and the step is taken the long way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import is_
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.optim.masters import Master
from halfstep.optim.rule import Rule

NOTHING: dict[str, Any] = {}  # the state of a weight whose rule keeps none

if TYPE_CHECKING:
    from halfstep.optim.onepass import OnePass


class Repeat:
    """What the step before has found.

    plan: the kernel's tables for `params`, in their order. Keeps no gradient. Cost of a step: about 2 us per tensor beside the kernel.
    """

    def __init__(self, kernels: ModuleType, optimizer: OnePass, plan: Any, params: Sequence[Tensor], masters: Sequence[Master | None]) -> None:
        self._settings, self._plan, self._formats, self._rule = _settings(optimizer), plan, kernels.FORMATS, optimizer.rule
        self.device = params[0].device
        self._groups = list(optimizer.param_groups)
        self._sizes = [len(group["params"]) for group in self._groups]
        self._kept = [optimizer.rule.kept(group) for group in self._groups]
        self._everybody = optimizer.everybody()
        self._params = list(params)
        chosen = {id(p) for p in params}
        self._chosen = [id(p) in chosen for p in self._everybody]
        group_of = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        chosen_of = [g for g, here in zip(group_of, self._chosen, strict=True) if here]
        self._members = [(g, slice(bisect_left(chosen_of, g), bisect_right(chosen_of, g))) for g in sorted(set(chosen_of))]
        self._dtypes, self._numels = [p.dtype for p in params], [p.numel() for p in params]
        held = [(p, m) for p, m in zip(params, masters, strict=True) if m is not None]
        self._narrow, self._masters = [p for p, _ in held], [m for _, m in held]
        self._residuals = [m.residual for m in self._masters]
        self._states = [optimizer.state.get(p, NOTHING) for p in params]
        self._keys = [tuple(key for key, value in state.items() if isinstance(value, Tensor)) for state in self._states]
        self._moments = [state[key] for state, keys in zip(self._states, self._keys, strict=True) for key in keys]
        self._tensors = [*self._params, *(r for r in self._residuals if r is not None), *self._moments]
        self._addresses = [t.data_ptr() for t in self._tensors]
        counted = self._states if self._rule.counts else ()
        self._steps = np.array([state["step"].data_ptr() for state in counted], dtype=np.int64)

    @staticmethod
    def takes(rule: Rule, params: Sequence[Tensor], states: Iterable[dict[str, Any]]) -> bool:
        """Whether a step of these can be repeated: all are on one device, and their steps, if the rule counts any, are counted in fp32 on the CPU."""
        steps = [state.get("step") for state in states] if rule.counts else []
        counted = all(isinstance(s, Tensor) and s.dtype == torch.float32 and s.is_cpu and s.numel() == 1 for s in steps)
        return counted and len({p.device for p in params}) == 1 and all(p.is_contiguous() for p in params)

    def run(self, kernels: ModuleType, optimizer: OnePass, factor: float) -> bool:
        """Take the step, if everything is as it was; the step is counted then. False with nothing done otherwise."""
        try:
            gradients = self._gradients(optimizer)
        except (AttributeError, KeyError, RuntimeError, TypeError):  # something is not there any more, or is another kind of tensor
            return False
        if gradients is None:
            return False
        forms = [self._formats.get(g.dtype) for g in gradients]
        if None in forms:
            return False
        optimizer.steps += 1
        counts = kernels.count_steps(self._steps) if self._rule.counts else np.zeros(len(self._params), dtype=np.float32)
        scalars = self._scalars(kernels, counts, factor)
        addresses = np.array([g.data_ptr() for g in gradients], dtype=np.int64)
        self._plan.launch(addresses, np.array(forms, dtype=np.int32), scalars, optimizer.steps)
        increment_version(self._params)
        for master in self._masters:
            master.wrote(counted=True)
        return True

    def _gradients(self, optimizer: OnePass) -> list[Tensor] | None:
        """The gradients of `params`, each as the kernel takes it; None where anything is different."""
        groups, state = optimizer.param_groups, optimizer.state
        held = [p for group in groups for p in group["params"]]
        found = [p.grad for p in held]
        if (
            _settings(optimizer) != self._settings
            or not _same(groups, self._groups)
            or [len(group["params"]) for group in groups] != self._sizes
            or [self._rule.kept(group) for group in groups] != self._kept
            or not _same(held, self._everybody)
            or [g is not None for g in found] != self._chosen
            or [p.dtype for p in self._params] != self._dtypes
            or [m._version for m in self._masters] != [p._version for p in self._narrow]
            or not _same([m._parameter() for m in self._masters], self._narrow)
            or not _same([p.halfstep_master for p in self._narrow], self._masters)  # type: ignore[attr-defined]
            or not _same([m.residual for m in self._masters], self._residuals)
            or not _same([state.get(p, NOTHING) for p in self._params], self._states)
            or not _same([s[key] for s, keys in zip(self._states, self._keys, strict=True) for key in keys], self._moments)
            or [t.data_ptr() for t in self._tensors] != self._addresses
            or False in [p.is_contiguous() for p in self._params]
            or [p.numel() for p in self._params] != self._numels
        ):
            return None
        gradients = [g if g.is_contiguous() else g.contiguous() for g in (f.resolve_neg() for f in found if f is not None)]
        strided = [g.layout for g in gradients].count(torch.strided) == len(gradients)
        return gradients if strided and [g.numel() for g in gradients] == self._numels else None

    def _scalars(self, kernels: ModuleType, counts: Any, factor: float) -> Any:
        """The row of each weight: one for all of a group that have taken as many steps."""
        rows = np.empty((len(counts), kernels.ROW), dtype=np.float32)
        for number, here in self._members:
            group, taken = self._groups[number], counts[here].tolist()
            if taken.count(taken[0]) == len(taken):
                rows[here] = kernels.row(self._rule.settings(group, int(taken[0]), False), factor)
                continue
            for count in set(taken):
                rows[here][counts[here] == count] = kernels.row(self._rule.settings(group, int(count), False), factor)
        return rows


def _settings(optimizer: OnePass) -> tuple[Any, ...]:
    return optimizer.weights, optimizer.codec, optimizer.seed, bool(optimizer._pending)


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether these are the same objects."""
    return len(these) == len(those) and all(map(is_, these, those))
