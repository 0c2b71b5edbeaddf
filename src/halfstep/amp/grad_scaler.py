"""`GradScaler`: torch's interface on the truthful step engine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import CheckpointError, ConfigError
from halfstep.hardware import parse_device
from halfstep.policy import LARGEST_SCALE, LossScale, power_of_two
from halfstep.step import DynamicScaling, NoScaling, StepEngine, StepResult, scaling_for

Outputs = TypeVar("Outputs")


class GradScaler:
    """Scales losses so that small fp16 gradients do not become 0, and takes optimizer steps that say what they did.

    The methods and the state are those of `torch.amp.GradScaler`; what differs:

    - `device` need not be given: it is that of the first loss, so the scaler is never silently off. A given device that
      is not the loss's is refused.
    - `step` returns a `StepResult`, true when the weights moved. Every optimizer is told apart, fused ones included: its
      step is simply not called when a gradient is inf, NaN or above 2^60.
    - the scale is a power of two and stays in [`floor`, `ceiling`]; a non-finite loss does not lower it.
    - after `patience` bad steps in a row `step` raises `DivergedError`.
    - `enabled=False` turns the scaling off and keeps the checks, so the same loop serves bf16 and fp32.

    Memory: none per parameter. One pass over the gradients to measure, one to unscale; the verdict is read to the host
    once per step. Source: Micikevicius et al., arXiv:1710.03740; torch.amp.GradScaler for the interface.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        floor: float = 1.0,
        ceiling: float = LARGEST_SCALE,
        patience: int = 50,
    ) -> None:
        self.device = device
        scaling = DynamicScaling(init_scale, growth_factor, backoff_factor, growth_interval, floor, ceiling) if enabled else NoScaling()
        self._engine = StepEngine(scaling, patience)

    @classmethod
    def from_policy(cls, scale: LossScale, *, patience: int = 50) -> GradScaler:
        """The scaler that a policy's loss scale describes: none, static or dynamic."""
        scaler = cls(enabled=False, patience=patience)
        scaler._engine.scaling = scaling_for(scale)
        return scaler

    def scale(self, outputs: Outputs) -> Outputs:
        """A loss (or an iterable of losses) times the loss scale; call `.backward()` on the result.

        A 16-bit loss is scaled in fp32. Raises ConfigError when the loss is on another device than the one given.
        """
        if isinstance(outputs, Tensor):
            self._check_device(outputs)
            return cast(Outputs, self._engine.scale(outputs))
        if isinstance(outputs, Mapping | str) or not isinstance(outputs, Iterable):
            raise ConfigError(f"scale() was given a {type(outputs).__name__}", "Give it a loss tensor or a list of them, for example outputs.loss.")
        scaled = [self.scale(o) for o in outputs]
        return cast(Outputs, tuple(scaled) if isinstance(outputs, tuple) else scaled)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale they were made under, so that they can be clipped or read.

        Raises StepOrderError when called twice before a step. Bad gradients are left as they are: `step` will refuse them.
        """
        self._engine.unscale(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> StepResult:
        """Unscale if that was not done, then call `optimizer.step()` if the gradients and the loss are fit to be used.

        Raises StepOrderError for a wrong order of calls, DivergedError after `patience` bad steps in a row, ConfigError
        for a closure, which would make its gradients behind the scaler's back.
        """
        if args or kwargs:
            raise ConfigError(
                "step() was given a closure or other arguments, and gradients made inside a closure cannot be checked",
                "Run the closure yourself before step(optimizer); for LBFGS use optimizer.step(closure) without a scaler, in fp32.",
            )
        if getattr(optimizer, "takes_steps_itself", False):
            raise ConfigError("this optimizer was prepared by an accelerator, which scales and unscales by itself", "Call optimizer.step().")
        return self._engine.step(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale follow the steps since the last update, or set it to `new_scale` (a power of two)."""
        if new_scale is None or not self.is_enabled():
            return self._engine.update()
        value, scaling = power_of_two("new_scale", float(new_scale)), self._engine.scaling
        if isinstance(scaling, DynamicScaling) and not scaling.floor <= value <= scaling.ceiling:
            raise ConfigError(
                f"new_scale={value:g} lies outside [{scaling.floor:g}, {scaling.ceiling:g}]", "Move the floor or the ceiling of this GradScaler."
            )
        return self._engine.update(value)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients to `max_norm`, unscaling them first where that was not done. Returns the norm before clipping."""
        return self._engine.clip([parameters] if isinstance(parameters, Tensor) else parameters, max_norm, norm_type)

    def rescale_(self, factor: float) -> None:
        """Multiply the gradients of all optimizers seen so far by `factor`: for an accumulation window that ends early."""
        self._engine.rescale(factor)

    def name_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names (as from `model.named_parameters()`) by which a bad gradient is reported."""
        self._engine.name_parameters(named)

    def watch(self, optimizer: Optimizer) -> None:
        """Make an optimizer known before its first step, so that `clip_grad_norm_` can unscale its gradients."""
        self._engine.know(optimizer)

    def get_scale(self) -> float:
        """The scale that the next loss will get; 1 when scaling is off."""
        return self._engine.scaling.scale

    def is_enabled(self) -> bool:
        """Whether losses are scaled. The checks on gradients are on in any case."""
        return self._engine.scaling.active

    @property
    def bad_steps(self) -> int:
        """Steps in a row, up to now, that could not be applied."""
        return self._engine.bad_steps

    @bad_steps.setter
    def bad_steps(self, count: int) -> None:
        self._engine.bad_steps = count

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by after `growth_interval` good steps."""
        return self._dynamic().growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, a power of two of 1 or more."""
        self._replace(growth=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after an overflow."""
        return self._dynamic().backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the back-off factor, one over a power of two."""
        self._replace(backoff=new_factor)

    def get_growth_interval(self) -> int:
        """Good steps in a row before the scale grows."""
        return self._dynamic().window

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of good steps before the scale grows."""
        self._replace(window=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The state under torch's keys, with floor, ceiling and the count of bad steps; empty when scaling is off."""
        scaling = self._engine.scaling
        if not scaling.active:
            return {}
        state: dict[str, Any] = {"scale": scaling.scale, "bad_steps": self._engine.bad_steps}
        if isinstance(scaling, DynamicScaling):
            state |= {
                "growth_factor": scaling.growth,
                "backoff_factor": scaling.backoff,
                "growth_interval": scaling.window,
                "_growth_tracker": scaling.good,
                "floor": scaling.floor,
                "ceiling": scaling.ceiling,
            }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state from `state_dict()` or from `torch.amp.GradScaler`'s. Nothing is changed when it does not fit.

        A scale that is not a power of two (torch allows that) is rounded down to one, with a warning.
        Raises CheckpointError for an empty state or one without a scale.
        """
        if not self.is_enabled():
            return
        if "scale" not in state_dict:
            raise CheckpointError(
                "the state holds no loss scale: it was saved without a scaler, or with one that was off",
                "Leave load_state_dict out to start from init_scale, or save the state of an enabled scaler.",
            )
        scaling, scale = self._engine.scaling, float(state_dict["scale"])
        if not scale > 0:
            raise CheckpointError(f"the saved loss scale is {scale:g}: the run it comes from had failed", "Use an older checkpoint.")
        if isinstance(scaling, DynamicScaling):
            floor, ceiling = float(state_dict.get("floor", scaling.floor)), float(state_dict.get("ceiling", scaling.ceiling))
            usable = _round_down(min(max(scale, floor), ceiling))
            self._engine.scaling = DynamicScaling(
                usable,
                float(state_dict.get("growth_factor", scaling.growth)),
                float(state_dict.get("backoff_factor", scaling.backoff)),
                int(state_dict.get("growth_interval", scaling.window)),
                floor,
                ceiling,
                int(state_dict.get("_growth_tracker", 0)),
            )
        else:
            usable = _round_down(scale)
            scaling.scale = usable
        if usable != scale:
            warnings.warn(f"the saved loss scale {scale:g} is not a power of two inside [floor, ceiling]; going on with {usable:g}", stacklevel=2)
        self._engine.bad_steps = int(state_dict.get("bad_steps", 0))

    def _dynamic(self) -> DynamicScaling:
        scaling = self._engine.scaling
        if not isinstance(scaling, DynamicScaling):
            raise ConfigError("growth and back-off belong to a dynamic loss scale, and this scaler has none", "Make it with enabled=True.")
        return scaling

    def _replace(self, **changes: Any) -> None:
        old = self._dynamic()
        self._engine.scaling = DynamicScaling(**(vars(old) | changes))

    def _check_device(self, loss: Tensor) -> None:
        kind = loss.device.type
        if self.device is None:
            self.device = kind
        elif parse_device(self.device).type != kind:
            raise ConfigError(
                f"this GradScaler was made for {self.device!r} and the loss is on {kind!r}",
                "Leave the device out (it is taken from the first loss), or move the model and the data.",
            )


def _round_down(scale: float) -> float:
    """The largest power of two that is not above `scale`."""
    return 2.0 ** (math.frexp(scale)[1] - 1)
