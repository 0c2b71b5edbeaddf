"""torch's fused AdamW, with unscaling and clipping in its own pass over the gradients and little Python around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from halfstep.errors import ConfigError
from halfstep.optim.base import evaluated
from halfstep.optim.quiet import QuickToClear


class FusedAdamW(QuickToClear, torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` on the CPU: the same kernel, the same states, equal bits where nothing is clipped.

    `step(factor=f)` multiplies gradients by f in the kernel's own pass (clip coefficient over loss scale), and leaves them so multiplied. The
    parameters of a group that have taken equally many steps share one `step` tensor. Parameters and gradients are dense fp32 or fp64.
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

    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss, if there is one."""
        given: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        named = {} if factor == 1.0 else {"factor": factor}
        if torch._C._autograd._profiler_enabled():
            with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
                return self._step_between_hooks(given, named)
        return self._step_between_hooks(given, named)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it otherwise, to do what `_step_between_hooks` does

    def _step_between_hooks(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        own: Iterable[Any] = self._optimizer_step_pre_hooks.values()
        for hook in chain(_global_optimizer_pre_hooks.values(), own):
            changed = hook(self, given, named)
            if changed is not None:
                given, named = changed
        result = self._step(*given[1:], **named)
        own = self._optimizer_step_post_hooks.values()
        for hook in chain(own, _global_optimizer_post_hooks.values()):
            hook(self, given, named)
        return result

    def _step(self, closure: Callable[[], Any] | None = None, factor: float = 1.0) -> Any:
        loss = evaluated(closure)
        bad, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)  # torch's own protocol with a GradScaler
        if factor != 1.0:
            divisor = torch.tensor(1.0 / factor, dtype=torch.float32)
        with torch.no_grad():
            for group in self.param_groups:
                self._update(group, divisor, bad)
        return loss

    def _update(self, group: dict[str, Any], divisor: Tensor | None, bad: Tensor | None) -> None:
        state = self.state
        held = [p for p in group["params"] if p.grad is not None]
        if not held:
            return
        if any("step" not in state[p] for p in held):
            self._begin(held)
        if len(held) < len(group["params"]):
            self._part(group["params"])
        own = [state[p] for p in held]
        steps = [s["step"] for s in own]
        counts = {id(s): s for s in steps}.values()
        for count in counts:
            count.add_(1)
        lists = [held, [p.grad for p in held], [s["exp_avg"] for s in own], [s["exp_avg_sq"] for s in own], steps]
        beta1, beta2 = group["betas"]
        settings = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"], "eps": group["eps"]}
        for p, g, first, second, at in _alike(lists):
            torch._fused_adamw_(p, g, first, second, [], at, maximize=group["maximize"], amsgrad=False, grad_scale=divisor, found_inf=bad, **settings)
        if bad is not None:
            for count in counts:
                count.sub_(bad)

    def _begin(self, held: list[Tensor]) -> None:
        """States for parameters that have none."""
        step: Tensor | None = None
        for p in held:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ConfigError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, and AdamW updates every element",
                    "Use sparse=False in its embedding, or torch.optim.SparseAdam.",
                )
            if "step" in self.state[p]:
                continue
            step = torch.zeros((), dtype=torch.float32, device=p.device) if step is None or step.device != p.device else step
            zeros = [torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2)]
            self.state[p] |= {"step": step, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def _part(self, members: list[Tensor]) -> None:
        """Those that sit this step out keep their number of steps: a tensor of their own from now on."""
        for p in members:
            if p.grad is None and "step" in self.state.get(p, ()):
                self.state[p]["step"] = self.state[p]["step"].clone()


def _alike(lists: list[list[Tensor]]) -> Iterable[list[list[Tensor]]]:
    """The lists, or where parameters are of several dtypes the lists of each. Complex numbers as pairs."""
    kind = lists[0][0].dtype
    if not kind.is_complex and all(p.dtype is kind for p in lists[0]):
        return [lists]
    found = []
    for one in {p.dtype: None for p in lists[0]}:
        places = [i for i, p in enumerate(lists[0]) if p.dtype is one]
        found.append([[torch.view_as_real(t) if t.is_complex() else t for t in (column[i] for i in places)] for column in lists])
    return found
