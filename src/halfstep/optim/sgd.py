"""Stochastic gradient descent with momentum on fp32 masters of 16-bit weights: one pass over everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics import SGDStep
from halfstep.optim.foreign import refuse_torchs
from halfstep.optim.onepass import OnePass
from halfstep.optim.rule import Rule, as_number, out_of_range
from halfstep.policy import Policy

BUFFER = "momentum_buffer"


class SGDRule(Rule):
    """One buffer that gradients fade in, or none without momentum. A buffer that is new becomes the gradient."""

    name = "SGD"
    roles = MappingProxyType({BUFFER: "first"})

    def check(self, group: Mapping[str, Any]) -> None:
        """See Rule. Nesterov's form needs momentum and no dampening, dampening needs momentum."""
        super().check(group)
        momentum, dampening = group["momentum"], group["dampening"]
        if not 0 <= as_number(momentum) < 1:
            raise out_of_range("momentum", momentum, "It lies in [0, 1).")
        if not math.isfinite(as_number(dampening)):
            raise out_of_range("dampening", dampening, "It is a finite number, 0 for none.")
        if group["nesterov"] and (not momentum or dampening):
            raise ConfigError(f"nesterov=True with momentum={momentum} and dampening={dampening}", "It needs momentum above 0, and no dampening.")
        if dampening and not momentum:
            raise ConfigError(f"dampening={dampening} has no effect without momentum", "Give momentum=0.9, or leave it out.")

    def kept(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See Rule."""
        return (BUFFER,) if group["momentum"] else ()

    def settings(self, group: Mapping[str, Any], count: int, first: bool) -> SGDStep:
        """See Rule."""
        return SGDStep(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            first=first,
            maximize=bool(group["maximize"]),
        )

    def gradient(self, p: Tensor, number: int) -> Tensor:
        """See Rule. A sparse gradient is filled up with zeros (4 bytes per element): what is not in it decays and follows its momentum."""
        gradient = p.grad
        assert gradient is not None
        return gradient.detach().to_dense() if gradient.is_sparse else super().gradient(p, number)


class SGD(OnePass):
    """Gradient descent with momentum, as torch.optim.SGD, for fp32 weights and for 16-bit weights with masters.

    params: tensors, (name, tensor) pairs or groups, as in torch. lr may be a tensor of one element. momentum, dampening, nesterov: as in torch;
    the first step's buffer is the gradient. weight_decay: a part of the gradient. foreach, fused: how torch would go about the step; here it is one
    pass whatever they say. differentiable: only False.
    weights, states, policy, seed: as in `halfstep.optim.AdamW`. The one state, `momentum_buffer`, takes 4 bytes per parameter in fp32, 2 in bf16,
    1.03 in int8; without momentum there is none.

    `step(factor=f)` multiplies gradients by f on the way in (clip coefficient over loss scale) and leaves `p.grad` as it is. Gradients may be
    fp32, bf16 or fp16. Bytes per parameter beside its gradient: 4 + 4 for fp32 weights, 2 + 2 + 4 split, 2 + 2 + 1.03 split with int8 states.
    On a CPU with numba and on a GPU with Triton it is one pass, bit-equal to the plain definition (`numerics.sgd_`) that runs without them.
    Raises ConfigError for numbers out of range and for settings without effect. Source: Sutskever et al., On the importance of initialization and
    momentum in deep learning, 2013, in the form of torch.
    """

    rule = SGDRule()
    roles = rule.roles
    lacks = ("differentiable",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        weights: str | None = None,
        states: str | None = None,
        policy: str | Policy | None = None,
        seed: int = 0,
    ) -> None:
        refuse_torchs("SGD", differentiable=differentiable)
        settings = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
        super().__init__(params, {"lr": lr, **settings}, weights, states, policy, seed)
        moving = any(group["momentum"] for group in self.param_groups)
        if states not in (None, "fp32") and not moving:
            raise ConfigError(f"states={states} has no effect: without momentum SGD keeps no state", "Give momentum=0.9, or leave it out.")

    def _converted(self, saved: Mapping[str, Any], p: Tensor, number: int) -> dict[str, Any]:
        """See MasteredOptimizer. A buffer that is None is torch's for one that is not there yet."""
        return super()._converted({key: value for key, value in saved.items() if key != BUFFER or value is not None}, p, number)
