"""`GradScaler`: torch's interface on the truthful step engine."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.amp.healing import Healer
from halfstep.amp.sampling import Sampler
from halfstep.amp.scaler_state import load_into, state_of
from halfstep.amp.statistics import count_once
from halfstep.errors import ConfigError, suggest
from halfstep.hardware import parse_device
from halfstep.policy import LARGEST_SCALE, LossScale, power_of_two
from halfstep.step import (
    Agree,
    DynamicScaling,
    Follower,
    FollowingScaling,
    Heal,
    NoScaling,
    OnOverflow,
    StepEngine,
    StepResult,
    StepState,
    clip,
    maker_of,
    scaling_for,
)

Outputs = TypeVar("Outputs")


STRATEGIES = {"follow": FollowingScaling, "stock": DynamicScaling}
ON_OVERFLOW = ("skip", "replay", "raise")
HEAL = ("skip", "pin", "raise")


class GradScaler:
    """Scales losses so that small fp16 gradients do not become 0, and takes optimizer steps that say what they did.

    The methods and the state are those of `torch.amp.GradScaler`; what differs:

    - `device` need not be given: it is that of the first loss, so the scaler is never silently off. A given device that
      is not the loss's is refused.
    - `step` returns a `StepResult`, true when the weights moved. Every optimizer is told apart, fused ones included: its
      step is simply not called when a gradient is inf, NaN or above 2^60.
    - `strategy="follow"`: the first `scale(loss)` probes the backward pass under several scales, `init_scale` first, and starts
      where it has head room, so no step is lost to finding the scale; later it follows the size of the gradients. "stock" is
      torch's rule: starts at `init_scale`, halves after an overflow, doubles after `growth_interval` good steps.
    - the scale is a power of two and stays in [`floor`, `ceiling`]; a non-finite loss does not lower it.
    - `on_overflow`: "skip" the step; "replay" its backward passes at lower scales until the gradients are fit (the graphs of a
      step are kept until it is taken: the memory of its saved activations); or "raise" `StepRefusedError`.
    - a module of a watched model whose outputs do not fit 16 bits is named (`watch`), and the step refused; `heal="pin"` holds it in fp32 from the
      next forward pass on, `heal="raise"` raises `StepRefusedError` for any bad forward pass.
    - after `patience` bad steps of an optimizer in a row `step` raises `DivergedError`.
    - gradients that are changed or stepped with while still scaled are refused at that line.
    - `agree`: a function that gets a small fp32 tensor and returns its maximum over all ranks, so that they skip together.
    - `deferred`: whether verdicts may be read after the step, which spares a GPU the wait; default: on a GPU, for "skip" and
      torch's fused optimizers. Their `StepResult` waits when it is read.
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
        strategy: Literal["follow", "stock"] = "follow",
        on_overflow: OnOverflow = "skip",
        heal: Heal = "skip",
        floor: float = 1.0,
        ceiling: float = LARGEST_SCALE,
        patience: int = 50,
        agree: Agree | None = None,
        deferred: bool | None = None,
    ) -> None:
        self.device = device
        for name, value, known in (("strategy", strategy, STRATEGIES), ("on_overflow", on_overflow, ON_OVERFLOW), ("heal", heal, HEAL)):
            if value not in known:
                raise ConfigError(f"{name}={value!r} is not known", suggest(str(value), known))
        kind = STRATEGIES[strategy]
        scaling = kind(init_scale, growth_factor, backoff_factor, growth_interval, floor, ceiling) if enabled else NoScaling()
        self._engine = StepEngine(scaling, patience, on_overflow=on_overflow, agree=agree, deferred=deferred)
        self._look_into(heal)

    def _look_into(self, heal: Heal) -> None:
        self._healer, self._sampler = Healer(), Sampler()
        self._engine.state.watching.modules = self._sampler.sampled
        self._sampler.number = functools.partial(_next_step, self._engine)
        self._engine.state.heal, self._engine.state.explain = heal, self._healer.explain
        self._engine.state.remembered = self._healer.remembered

    @classmethod
    def from_policy(
        cls, scale: LossScale, *, patience: int = 50, on_overflow: OnOverflow = "skip", heal: Heal = "skip", agree: Agree | None = None
    ) -> GradScaler:
        """The scaler that a policy's loss scale describes: none, static or dynamic."""
        if scale.kind == "static" and on_overflow == "replay":
            raise ConfigError(f"on_overflow='replay' has no effect with scale={scale}, which is never lowered", "Use scale=dynamic, or 'skip'.")
        scaler = cls(enabled=False, patience=patience, on_overflow=on_overflow, heal=heal, agree=agree)
        scaler._engine.scaling = scaling_for(scale)
        return scaler

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the scaler needs (deepcopy, pickle): settings, scale and counts, and nothing of gradients at hand."""
        self._engine.settle()
        state = self._engine.state
        settings = {"on_overflow": state.on_overflow, "agree": state.agree, "deferred": state.deferred}
        counts = {"patience": state.patience, "bad_steps": self.bad_steps, "steps": self.steps, "heal": state.heal}
        return {"device": self.device, "scaling": state.scaling, "settings": settings} | counts

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.device = state["device"]
        self._engine = StepEngine(copy.copy(state["scaling"]), state["patience"], **state["settings"])
        self._engine.bad_steps, self._engine.steps = state["bad_steps"], state.get("steps", 0)
        self._look_into(state.get("heal", "skip"))

    def scale(self, outputs: Outputs) -> Outputs:
        """A loss (or an iterable of losses) times the loss scale; call `.backward()` on the result.

        A 16-bit loss is scaled in fp32. The first call calibrates the scale (at most nine further backward passes, their gradients
        thrown away). Raises ConfigError for a loss without a graph, an integer loss, and one on another device than the one given.
        """
        if isinstance(outputs, Tensor):
            self._check_device(outputs)
            self._healer.recall.begin()
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

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, stalled: bool = False
    ) -> StepResult:
        """Unscale if that was not done, then call `optimizer.step()` if the gradients and the loss are fit to be used.

        max_norm: clip the gradients to this norm on the way. With a halfstep optimizer it costs no pass of its own, and `p.grad` stays as the
        backward pass left it, scaled and not clipped (`FusedAdamW` and, on a GPU, torch's fused optimizers leave it unscaled and clipped).
        stalled: measure the share of updates that rounded away (`StepResult.stalled`; a copy of the weights while the step runs).
        closure: for optimizers that evaluate the loss themselves (LBFGS, SAM-like); it calls `scale(loss).backward()`. Each of its
        evaluations is unscaled and judged; a bad one ends the step and puts weights and states back (memory: a copy of both).

        Raises StepOrderError for a wrong order of calls, DivergedError after `patience` bad steps in a row, StepRefusedError for
        a bad step under on_overflow="raise".
        """
        if getattr(optimizer, "takes_steps_itself", False):
            raise ConfigError("this optimizer was prepared by an accelerator, which scales and unscales by itself", "Call optimizer.step().")
        self._healer.recall.spend(optimizer)
        result = self._engine.step(optimizer, closure, max_norm, stalled)
        if type(result) is StepResult and not result:
            self._sampler.again()
        return result

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

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip gradients to `max_norm`, unscaling them first where that was not done. Returns the norm before clipping.

        error_if_nonfinite: raise RuntimeError, as torch does, instead of leaving bad gradients to `step`, which refuses them.
        """
        total = self._engine.clip([parameters] if isinstance(parameters, Tensor) else parameters, max_norm, norm_type)
        return _finite(total) if error_if_nonfinite else total

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp the elements of gradients to [-clip_value, clip_value], unscaling first. Bad ones are left to `step`, which refuses them."""
        self._engine.clip_value([parameters] if isinstance(parameters, Tensor) else parameters, clip_value)

    def rescale_(self, factor: float) -> None:
        """Multiply the gradients of all optimizers seen so far by `factor`: for an accumulation window that ends early."""
        self._engine.rescale(factor)

    def name_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names (as from `model.named_parameters()`) by which a bad gradient is reported."""
        self._engine.name_parameters(named)

    def watch(self, item: Optimizer | nn.Module) -> None:
        """Make an optimizer or a module known before its first step.

        Of a module, the buffers that its forward pass changes (BatchNorm's running statistics) become part of the step: a step that
        is refused puts them back. Running statistics are also found without this, from the graph of the first losses, but a
        first batch that is bad is then too early. Its forward passes of a step are remembered, so that the module to blame for a bad one is named:
        they are run once more without a graph. Batch norms under activation checkpointing count each batch once.
        Memory: a copy of the buffers that change, and the inputs of the forward passes of a step.
        """
        if not isinstance(item, nn.Module | Optimizer):
            raise ConfigError(f"watch() was given a {type(item).__name__}", "Give it a model or an optimizer.")
        self._engine.know(item)
        if isinstance(item, nn.Module):
            count_once(item)
            self._healer.watch(item)
            self._sampler.watch(item)

    def follow(self, scheduler: Any, optimizer: Optimizer | None = None) -> Follower:
        """A scheduler in its place that holds still when its optimizer's step (that of `optimizer`, if given) was refused."""
        return Follower(scheduler, self._engine, optimizer if optimizer is not None else scheduler.optimizer)

    def applied_steps(self, optimizer: Optimizer) -> int:
        """How many steps of this optimizer were applied."""
        self._engine.settle()
        return self._engine.state.record(optimizer).applied

    def discard_(self) -> None:
        """Throw away the scaled gradients at hand, of all optimizers: they will be made again."""
        self._engine.discard()

    def trying(self, *reasons: Literal["overflow", "pin"]) -> AbstractContextManager[None]:
        """A block whose steps will be computed again if they overflow, or if modules were pinned: a refusal is not counted and moves no scale."""
        return self._engine.trying(*reasons)

    def note_checkpoint(self, folder: str) -> None:
        """Tell which checkpoint was written or loaded last: DivergedError names it."""
        self._engine.state.checkpoint = folder

    def run_backward_inside(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Open `context()` around the backward passes that the scaler runs itself, to calibrate or to replay."""
        self._engine.state.around = context

    def bring_together(self, join: Callable[[Iterable[Tensor] | None], bool], share: Callable[[Any], list[Any]]) -> None:
        """For several processes. `join` makes gradients (all, or those of models with these parameters) the mean over ranks where they are not yet,
        and says whether it has changed some. `share` gives the values of all ranks."""
        self._engine.state.together, self._healer.share = join, share

    def join_ranks(self) -> None:
        """Make gradients the mean over ranks now, if they are to be; it is done before they are judged in any case."""
        self._engine.state.join_ranks()

    def on_applied(self, optimizer: Optimizer, function: Callable[[], object]) -> None:
        """Call `function()` after each step that was applied: an EMA of the weights, a counter."""
        self._engine.state.record(optimizer).hooks.append(function)

    def edits(self) -> AbstractContextManager[None]:
        """A block in which gradients that are still scaled may be edited by something that does not depend on the scale (`p.grad.div_(n)`)."""
        return self._engine.edits()

    def get_scale(self) -> float:
        """The scale now; 1 when scaling is off. The next loss may lower it (`strategy="follow"`)."""
        self._engine.settle()
        self._engine.state.scale_was_read = True
        return self._engine.scaling.scale

    @property
    def scale_at_hand(self) -> float:
        """The scale that the gradients made last were made under; 1 when scaling is off."""
        return self._engine.state.scale_at_hand

    @property
    def floor(self) -> float:
        """The lowest scale there can be."""
        return self._engine.scaling.floor

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

    def watch_state(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """What was measured last of how close the run is to its limits (`StepResult.watch`), as plain values for a checkpoint."""
        return self._engine.state.watching.plain(optimizers)

    def load_watch_state(self, saved: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Go on from `watch_state` of the same optimizers."""
        self._engine.state.watching.take_over(saved, optimizers)

    @property
    def steps(self) -> int:
        """Steps that moved the weights, of the optimizer with the most; those of the run that this one goes on from included."""
        self._engine.settle()
        return self._engine.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._engine.steps = count

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
        """The state under torch's keys, with what is ours beside them; empty when scaling is off."""
        return state_of(self._engine)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state from `state_dict()` or from `torch.amp.GradScaler`'s. Nothing is changed when it does not fit.

        A scale that is not a power of two (torch allows that) is rounded down to one, with a warning. An empty state (saved without
        a scaler, or with one that was off) is announced with a warning, and the next loss calibrates the scale.
        Raises CheckpointError for a state without a scale, or with one that no run can go on from.
        """
        load_into(self._engine, state_dict)

    def _dynamic(self) -> DynamicScaling:
        scaling = self._engine.scaling
        if not isinstance(scaling, DynamicScaling):
            raise ConfigError("growth and back-off belong to a dynamic loss scale, and this scaler has none", "Make it with enabled=True.")
        return scaling

    def _replace(self, **changes: Any) -> None:
        self._engine.scaling = replace(self._dynamic(), **changes)

    def _check_device(self, loss: Tensor) -> None:
        kind = loss.device.type
        if self.device is None:
            self.device = kind
        elif self.device != kind and parse_device(self.device).type != kind:
            raise ConfigError(
                f"this GradScaler was made for {self.device!r} and the loss is on {kind!r}",
                "Leave the device out (it is taken from the first loss), or move the model and the data.",
            )


def _next_step(engine: StepEngine) -> int:
    return engine.steps + 1


def _finite(total: Tensor) -> Tensor:
    if not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, and error_if_nonfinite=True was asked for")
    return total


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` that cannot act on scaled gradients: those a GradScaler has made are unscaled first.

    Returns the norm of the unscaled gradients before clipping, a scalar tensor. Bad gradients are left as they are: the step
    will be refused. Raises ConfigError when the gradients come from several scalers.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    makers = {id(m): m for p in chosen if p.grad is not None and isinstance(m := maker_of(p.grad), StepState)}
    if not makers:
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
    if len(makers) > 1:
        raise ConfigError("these gradients were made by several GradScalers", "Clip the parameters of each by themselves.")
    total = clip(next(iter(makers.values())), chosen, max_norm, norm_type)
    return _finite(total) if error_if_nonfinite else total
