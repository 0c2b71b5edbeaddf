"""torch's fused AdamW, with unscaling and clipping in its own pass over the gradients and little Python around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim.adamw import AdamWRule
from halfstep.optim.base import evaluated, refuse_factor
from halfstep.optim.codec import CODECS
from halfstep.optim.foreign import count_of, groups_of, refuse_amsgrad, refuse_incomplete, refuse_other_sizes, refuse_states
from halfstep.optim.hooked import AFTER, BEFORE, loaded, to_load, without_hooks
from halfstep.optim.loading import converted, widened
from halfstep.optim.quiet import QuickToClear, hooked

AMSGRAD = "Use torch.optim.AdamW(amsgrad=True)."
RULE = AdamWRule()


class FusedAdamW(QuickToClear, torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` on the CPU: the same kernel, the same states, equal bits where nothing is clipped.

    `step(factor=f)` multiplies gradients by f in the kernel's own pass (clip coefficient over loss scale), and leaves them so multiplied. The
    parameters that have taken equally many steps share one `step` tensor. Parameters and gradients are dense fp32 or fp64.
    Bytes per parameter beside its gradient: 4 + 8. Raises ConfigError for sparse gradients.
    Source: Loshchilov and Hutter, arXiv:1711.05101; torch._fused_adamw_.
    """

    takes_factor = True
    writes_gradients = True  # a factor is multiplied into the gradients themselves

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, fused=True)

    @hooked
    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss, if there is one."""
        loss = evaluated(closure)
        bad, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)  # torch's own protocol with a GradScaler
        if factor != 1.0:
            refuse_factor(factor)
            divisor = torch.tensor(1.0 / factor if factor else math.inf, dtype=torch.float32)
        with torch.no_grad():
            alike = self._alike()
            counts = {id(s["step"]): s["step"] for _, _, own in alike for s in own}.values()
            for count in counts:
                count.add_(1)
            for settings, held, own in alike:
                grads: list[Any] = [p.grad for p in held]
                lists = [held, grads, [s["exp_avg"] for s in own], [s["exp_avg_sq"] for s in own], [s["step"] for s in own]]
                for p, g, first, second, at in _by_dtype(lists):
                    if factor != 1.0 and p[0].dtype == torch.float64:  # the kernel divides by an fp32 number
                        torch._foreach_mul_(g, factor)
                        torch._fused_adamw_(p, g, first, second, [], at, amsgrad=False, found_inf=bad, **settings)
                        continue
                    torch._fused_adamw_(p, g, first, second, [], at, amsgrad=False, grad_scale=divisor, found_inf=bad, **settings)
            for count in counts if bad is not None else ():
                count.sub_(bad)
        return loss

    def _alike(self) -> Collection[tuple[dict[str, Any], list[Tensor], list[dict[str, Any]]]]:
        """The parameters that have a gradient, those of groups with the same settings together; with their states."""
        found: dict[Any, tuple[dict[str, Any], list[Tensor], list[dict[str, Any]]]] = {}
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if group["amsgrad"]:
                raise ConfigError("amsgrad=True was asked for, and FusedAdamW has no such rule", AMSGRAD)
            for p in held:
                if p.grad.is_sparse:
                    raise ConfigError(
                        f"a parameter of shape {tuple(p.shape)} has a sparse gradient, and AdamW updates every element",
                        "Use sparse=False in its embedding, or torch.optim.SparseAdam.",
                    )
            if len(held) < len(group["params"]):
                self._part(group["params"])
            lr, (beta1, beta2) = group["lr"], group["betas"]
            settings = {"lr": lr, "beta1": beta1, "beta2": beta2, **{key: group[key] for key in ("weight_decay", "eps", "maximize")}}
            alike = (id(lr) if isinstance(lr, Tensor) else lr, *list(settings.values())[1:])
            if held:
                known = found.setdefault(alike, (settings, [], []))
                known[1].extend(held)
                known[2].extend([self.state[p] for p in held])
        everybody = [p for _, held, _ in found.values() for p in held]
        if False in ["step" in s for _, _, own in found.values() for s in own]:
            self._begin(everybody)
        return found.values()

    def _begin(self, held: list[Tensor]) -> None:
        """States for parameters that have none."""
        step: Tensor | None = None
        for p in held:
            if "step" in self.state[p]:
                continue
            step = torch.zeros((), dtype=torch.float32, device=p.device) if step is None or step.device != p.device else step
            zeros = [torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2)]
            self.state[p] |= {"step": step, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def state_dict(self) -> dict[str, Any]:
        """torch's form. Each parameter has a `step` of its own there, as torch's AdamW needs it."""
        packed = super().state_dict()
        states = {n: s | {"step": s["step"].clone()} if isinstance(s.get("step"), Tensor) else s for n, s in packed["state"].items()}
        return packed | {"state": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, from the state of any AdamW; encoded moments are decoded. Nothing is changed when it does not fit.

        Raises CheckpointError for a state of another optimizer or of the amsgrad variant, settings out of range, other shapes, and masters of 16-bit
        weights, which are not kept here.
        """
        state_dict = to_load(self, state_dict)
        refuse_other_sizes(state_dict, self.param_groups)
        name = type(self).__name__
        refuse_amsgrad(state_dict["param_groups"], name, AMSGRAD)
        refuse_states(state_dict["state"], RULE.roles, name)
        groups = groups_of(state_dict["param_groups"], self.param_groups, self.defaults, name, RULE.check)
        if state_dict.get("masters"):
            many = len(state_dict["masters"])
            raise CheckpointError(f"the state holds the fp32 masters of {many} 16-bit weights, and {name} keeps none", "Use halfstep.optim.AdamW.")
        held = dict(zip((n for group in groups for n in group["params"]), (p for g in self.param_groups for p in g["params"]), strict=True))
        states = {n: self._converted(s, held[n], number) for number, n in enumerate(held) if (s := state_dict["state"].get(n))}
        with without_hooks(self, BEFORE, AFTER):
            super().load_state_dict({"state": states, "param_groups": groups})
        shared: dict[float, Tensor] = {}
        for own in self.state.values():
            if isinstance(own.get("step"), Tensor):
                own["step"] = shared.setdefault(float(own["step"]), own["step"])
        loaded(self)

    def _converted(self, saved: Mapping[str, Any], p: Tensor, number: int) -> dict[str, Any]:
        refuse_incomplete(saved, ("step", *RULE.roles), number)
        state = converted(widened(saved, p), p, number, RULE.roles, CODECS["fp32"])
        return state | {"step": count_of(state["step"], number)}

    def _part(self, members: list[Tensor]) -> None:
        """Those that sit this step out keep their number of steps: a tensor of their own from now on."""
        for p in members:
            if p.grad is None and "step" in self.state.get(p, ()):
                self.state[p]["step"] = self.state[p]["step"].clone()


def _by_dtype(lists: list[list[Tensor]]) -> Iterable[list[list[Tensor]]]:
    """The lists, or where parameters are of several dtypes the lists of each. Complex numbers as pairs."""
    kind = lists[0][0].dtype
    if not kind.is_complex and all(p.dtype is kind for p in lists[0]):
        return [lists]
    found = []
    for one in {p.dtype: None for p in lists[0]}:
        places = [i for i, p in enumerate(lists[0]) if p.dtype is one]
        found.append([[torch.view_as_real(t) if t.is_complex() else t for t in (column[i] for i in places)] for column in lists])
    return found
