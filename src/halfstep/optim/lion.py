"""Lion on fp32 masters of 16-bit weights: steps of one size in every direction, the sign of a moving average of gradients, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics import LionStep
from halfstep.optim.onepass import OnePass
from halfstep.optim.rule import Rule
from halfstep.policy import Policy


class LionRule(Rule):
    """One moving average; its first step is like all others."""

    name = "Lion"
    roles = MappingProxyType({"exp_avg": "first"})

    def settings(self, group: Mapping[str, Any], count: int, first: bool) -> LionStep:
        """See Rule."""
        return LionStep(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )

    def gradient(self, p: Tensor, number: int) -> Tensor:
        """See Rule. A complex number has no sign."""
        if p.is_complex():
            raise ConfigError(f"parameter {number} of shape {tuple(p.shape)} is complex, and Lion steps by signs", "Use halfstep.optim.SGD for it.")
        return super().gradient(p, number)


class Lion(OnePass):
    """Evolved sign momentum with decoupled weight decay, for fp32 weights and for 16-bit weights with masters.

    params: tensors, (name, tensor) pairs or groups, as in torch. lr: the size of each step, a third to a tenth of AdamW's; may be a tensor.
    betas: decay of the average in the step's direction, and of the one that is kept. weight_decay: three to ten times AdamW's for the same effect.
    weights, states, policy, seed: as in `halfstep.optim.AdamW`. The one state, `exp_avg`, takes 4 bytes per parameter in fp32, 2 in bf16 and
    1.03 in int8.

    `step(factor=f)` multiplies gradients by f on the way in (clip coefficient over loss scale) and leaves `p.grad` as it is. Gradients may be
    fp32, bf16 or fp16. Bytes per parameter beside its gradient: 4 + 4 for fp32 weights, 2 + 2 + 4 split, 2 + 2 + 1.03 split with int8 states.
    On a CPU with numba and on a GPU with Triton it is one pass, bit-equal to the plain definition (`numerics.lion_`) that runs without them.
    Raises ConfigError for sparse gradients, complex parameters and numbers out of range.
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.
    """

    rule = LionRule()
    roles = rule.roles
    needed = tuple(roles)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        weights: str | None = None,
        states: str | None = None,
        policy: str | Policy | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, weights, states, policy, seed)
