"""AdamW on fp32 masters of 16-bit weights, with states in fp32, bf16 or int8: one pass over everything."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from halfstep.numerics import AdamWStep
from halfstep.optim.foreign import count_of, refuse_amsgrad, refuse_torchs
from halfstep.optim.onepass import OnePass
from halfstep.optim.rule import Rule
from halfstep.policy import Policy


class AdamWRule(Rule):
    """Two moments, and a step's number to correct them by."""

    name = "AdamW"
    roles = MappingProxyType({"exp_avg": "first", "exp_avg_sq": "second"})
    counts = True

    def settings(self, group: Mapping[str, Any], count: int, first: bool) -> AdamWStep:
        """See Rule."""
        return AdamWStep(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=count,
            maximize=bool(group["maximize"]),
        )


class AdamW(OnePass):
    """Adam with decoupled weight decay, as torch.optim.AdamW, for fp32 weights and for 16-bit weights with masters.

    params: tensors, (name, tensor) pairs or groups, as in torch. lr may be a tensor of one element. foreach, fused: how torch would go about the
        step; here it is one pass whatever they say. amsgrad, capturable, differentiable: only False.
    weights: how 16-bit weights keep their fp32 master: "split" (exact, 2 bytes; the default), "split24" (1 byte), "kahan" (2), "stochastic" (0) or
        "plain" (nothing: small updates round away). Without it masters that the model's policy has made are used as they are.
    states: "fp32", "bf16" or "int8" for both moments: 8, 4 or 2.06 bytes per parameter.
    policy: a precision such as "bf16-lean" instead of the two. seed: of the noise in stochastic rounding; the same seed gives the same bits
        (optimizers of one run with the same seed draw apart, in the order in which the scaler or accelerator meets them).

    `step(factor=f)` multiplies gradients by f on the way in (clip coefficient over loss scale) and leaves `p.grad` as it is. Gradients may be
    fp32, bf16 or fp16. Bytes per parameter beside its gradient: 4 + 8 for fp32 weights, 2 + 2 + 8 split, 2 + 2 + 2.06 split with int8 states.
    On a CPU with numba and on a GPU with Triton it is one pass, bit-equal to the plain definition (`numerics.adamw_`) that runs without them.
    Raises ConfigError for sparse gradients and for settings without effect. Source: Loshchilov and Hutter, arXiv:1711.05101.
    """

    rule = AdamWRule()
    roles = rule.roles
    needed = ("step", *roles)
    lacks = ("amsgrad", "capturable", "differentiable")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        weights: str | None = None,
        states: str | None = None,
        policy: str | Policy | None = None,
        seed: int = 0,
    ) -> None:
        refuse_torchs("AdamW", amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, weights, states, policy, seed)

    def groups_to_load(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See MasteredOptimizer. Raises CheckpointError also for a state of the amsgrad variant."""
        refuse_amsgrad(state_dict["param_groups"], "halfstep.optim.AdamW", "Use halfstep.optim.wrap(torch.optim.AdamW(...)).")
        return super().groups_to_load(state_dict)

    def _converted(self, saved: Mapping[str, Any], p: Tensor, number: int) -> dict[str, Any]:
        """See MasteredOptimizer."""
        state = super()._converted(saved, p, number)
        return state | {"step": count_of(state["step"], number)} if state else state
