"""AdamW on fp32 masters of 16-bit weights, with states in fp32, bf16 or int8: one pass over everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.errors import CheckpointError, ConfigError
from halfstep.kernels import cpu_kernels
from halfstep.optim.base import MasteredOptimizer, evaluated
from halfstep.optim.codec import Role
from halfstep.optim.compiled import CompiledAdamW, Work
from halfstep.optim.masters import master_of
from halfstep.policy import Policy

ROLES: dict[str, Role] = {"exp_avg": "first", "exp_avg_sq": "second"}


class AdamW(MasteredOptimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW, for fp32 weights and for 16-bit weights with masters.

    params: tensors, (name, tensor) pairs or groups, as in torch. lr may be a tensor of one element.
    weights: how 16-bit weights keep their fp32 master: "split" (exact, 2 bytes; the default), "split24" (1 byte), "kahan" (2), "stochastic" (0) or
        "plain" (nothing: small updates round away). Without it masters that the model's policy has made are used as they are.
    states: "fp32", "bf16" or "int8" for both moments: 8, 4 or 2.06 bytes per parameter.
    policy: a precision such as "bf16-lean" instead of the two. seed: of the noise in stochastic rounding; the same seed gives the same bits.

    `step(factor=f)` multiplies gradients by f on the way in (clip coefficient over loss scale) and leaves `p.grad` as it is. Gradients may be
    fp32, bf16 or fp16. Bytes per parameter beside its gradient: 4 + 8 for fp32 weights, 2 + 2 + 8 split, 2 + 2 + 2.06 split with int8 states.
    On a CPU with numba it is one pass, bit-equal to the plain definition (`numerics.adamw_`) that runs elsewhere.
    Raises ConfigError for sparse gradients and for settings without effect. Source: Loshchilov and Hutter, arXiv:1711.05101.
    """

    roles = ROLES
    needed = ("step", *ROLES)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        weights: str | None = None,
        states: str | None = None,
        policy: str | Policy | None = None,
        seed: int = 0,
    ) -> None:
        for name, value, good in (
            ("lr", float(lr), float(lr) >= 0),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("betas", betas, len(betas) == 2 and all(0 <= b < 1 for b in betas)),
        ):
            if not good:
                raise ConfigError(f"{name}={value} is out of range", "betas lie in [0, 1), the others are 0 or more.")
        self.set_formats(policy, weights, states, seed)
        self._compiled = CompiledAdamW()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss, if there is one."""
        loss = evaluated(closure)
        if self._compiled.repeated(self, factor):
            return loss
        self.settle_masters()
        everybody = enumerate(((p, g) for g in self.param_groups for p in g["params"]), self.first_number)
        held = [(number, p, group) for number, (p, group) in everybody if p.grad is not None]
        work = [Work(number, p, p.grad.detach(), master_of(p), self._state(p, number), group) for number, p, group in held]
        self.steps += 1
        if work:
            torch._foreach_add_([w.state["step"] for w in work], 1.0)
        kernels = cpu_kernels() if any(w.p.is_cpu for w in work) else None
        left = work if kernels is None else self._compiled.run(kernels, work, factor, self)
        for w in left:
            self._update(w, factor)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See MasteredOptimizer. Raises CheckpointError also for a state of the amsgrad variant."""
        if any(group.get("amsgrad") for group in state_dict.get("param_groups", ())):
            raise CheckpointError(
                "the state is of an AdamW with amsgrad=True, and halfstep.optim.AdamW has no such rule",
                "Use halfstep.optim.wrap(torch.optim.AdamW(...)).",
            )
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32)  # others save a number, or an integer tensor

    def _state(self, p: Tensor, number: int) -> dict[str, Any]:
        """The states of a parameter, made at its first step."""
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ConfigError(
                f"parameter {number} of shape {tuple(p.shape)} has a sparse gradient, and AdamW updates every element",
                "Use sparse=False in its embedding, or torch.optim.SparseAdam.",
            )
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            wide = torch.float32 if not (p.is_complex() or p.dtype == torch.float64) else p.dtype
            for key in ROLES:
                state[key] = torch.zeros_like(p, dtype=wide, memory_format=torch.preserve_format)
                if wide == torch.float32:
                    self.encode(state, key, state[key], number)
        return state

    def _update(self, w: Work, factor: float) -> None:
        """The plain definition, for one parameter."""
        p, state, group = w.p, w.state, w.group
        weight = w.master.read() if w.master is not None else p.detach()
        gradient = w.gradient.resolve_conj().to(weight.dtype)
        if factor != 1.0:
            gradient = gradient * factor
        encoded = weight.dtype == torch.float32  # complex and fp64 weights keep their states in their own dtype
        moments = [self.decoded(state, key, p) if encoded else state[key] for key in ROLES]
        views = [torch.view_as_real(t) if t.is_complex() else t for t in (weight, gradient, *moments)]
        numerics.adamw_(
            *views,
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(state["step"]),
            maximize=bool(group["maximize"]),
        )
        if w.master is not None:
            w.master.write(weight, self.noise(w.number))
        for key, values in zip(ROLES, moments, strict=True):
            if encoded:
                self.encode(state, key, values, w.number)


AdamW.step._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile runs it as it is: there is nothing to fuse
