"""Optimizers whose step is one pass over weights, gradients and states: what AdamW, SGD and Lion share beside their rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.kernels import kernels_for
from halfstep.optim.base import MasteredOptimizer, evaluated, refuse_factor
from halfstep.optim.codec import put
from halfstep.optim.compiled import Compiled, Work
from halfstep.optim.foreign import groups_of, refuse_states, refuse_torchs
from halfstep.optim.masters import master_of
from halfstep.optim.quiet import hooked
from halfstep.optim.rule import Rule, refuse_misspelt
from halfstep.policy import Policy


class OnePass(MasteredOptimizer):
    """An optimizer that steps by a `Rule`: compiled where there is a kernel for the weight, else by the plain definition, with equal bits.

    To add one: its settings and plain definition in `halfstep.numerics.updates`, a `Rule`, a class with `rule`, `roles`, `needed` and its settings,
    its states in `policy.memory.ROLES`, and its place in the kernels: a number in `kernels.codes`, its loops in `kernels.rules` and `kernels.cuda`.
    """

    rule: ClassVar[Rule]
    lacks: ClassVar[tuple[str, ...]] = ()  # settings of torch's optimizer of the same name that must be off, in a group too

    def __init__(
        self, params: Any, defaults: dict[str, Any], weights: str | None, states: str | None, policy: str | Policy | None, seed: int
    ) -> None:
        self.set_formats(policy, weights, states, seed)
        self._compiled = Compiled()
        super().__init__(params, _paired(defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ConfigError for settings that no step can be taken with, and for a key that is nearly a setting's name."""
        if isinstance(param_group, dict):
            refuse_torchs(self.rule.name, **{key: param_group[key] for key in self.lacks if key in param_group})
            refuse_misspelt(param_group, self.defaults)
            param_group.update(_paired({key: param_group[key] for key in self.defaults if key in param_group}))
            self.rule.check(self.defaults | param_group)
        super().add_param_group(param_group)

    def groups_to_load(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See MasteredOptimizer."""
        refuse_states(state_dict["state"], self.roles, self.rule.name)
        return groups_of(state_dict["param_groups"], self.param_groups, self.defaults, self.rule.name, self.rule.check)

    @hooked
    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss, if there is one."""
        if factor != 1.0:
            refuse_factor(factor)
        loss = evaluated(closure)
        with torch.no_grad():
            if not self._compiled.repeated(self, factor):
                self._step(factor)
        return loss

    def _step(self, factor: float) -> None:
        """A step that is not like the one before."""
        everybody = enumerate(((p, group) for group in self.param_groups for p in group["params"]), self.first_number)
        held = [(number, p, self._gradient(number, p, group), group) for number, (p, group) in everybody if p.grad is not None]
        self.settle_masters()  # whatever refuses the step does so before a master or a state is made
        work = [self._work(*each) for each in held]
        self.steps += 1
        if work and self.rule.counts:
            torch._foreach_add_([w.state["step"] for w in work], 1.0)
        kernels = kernels_for(work[0].p.device) if work else None
        left = work if kernels is None else self._compiled.run(kernels, work, factor, self)
        for w in left:
            self._update(w, factor)

    def _gradient(self, number: int, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient of a parameter. Raises ConfigError where no step can be taken with it, or with the states that are there."""
        state = self.state.get(p, {})
        for key in self.rule.kept(group):
            if isinstance(state.get(key), Tensor) and (made := state[key].numel()) != p.numel():
                raise ConfigError(
                    f"parameter {number} had {made} elements when its {key} was made, and has {p.numel()} of shape {tuple(p.shape)} now",
                    "Make the optimizer anew after resizing a model.",
                )
        return self.rule.gradient(p, number)

    def _work(self, number: int, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> Work:
        """What is to be done to a parameter; its states are made at its first step."""
        rule, kept = self.rule, self.rule.kept(group)
        state: dict[str, Any] = self.state[p] if kept else self.state.get(p, {})  # torch's optimizers too have none where nothing is kept
        first = [key for key in kept if not isinstance(state.get(key), Tensor)]
        if rule.counts and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for key in first:
            if p.is_complex() or p.dtype == torch.float64:
                state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
            else:
                put(state, key, self.codec.zeros(p.detach(), rule.roles[key]))
        return Work(number, p, gradient, master_of(p), state, group, kept, bool(first))

    def _update(self, w: Work, factor: float) -> None:
        """The plain definition, for one parameter."""
        p, state = w.p, w.state
        weight = w.master.read() if w.master is not None else p.detach()
        gradient = w.gradient.resolve_conj().to(weight.dtype)
        if factor != 1.0:
            gradient = gradient * factor
        encoded = weight.dtype == torch.float32  # complex and fp64 weights keep their states in their own dtype
        states = [self.decoded(state, key, p) if encoded else state[key] for key in w.keys]
        views = [torch.view_as_real(t) if t.is_complex() else t for t in (weight, gradient, *states)]
        self.rule.settings(w.group, w.count(), w.first).update_(*views)
        if w.master is not None:
            w.master.write(weight, self.noise(w.number))
        for key, values in zip(w.keys, states, strict=True):
            if encoded:
                self.encode(state, key, values, w.number)


def _paired(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with lists as tuples: a list would be shared by all groups, and changed in all of them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


OnePass.step._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile runs it as it is: there is nothing to fuse
