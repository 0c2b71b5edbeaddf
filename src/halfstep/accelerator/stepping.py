"""Backward passes, accumulation windows, clipping and optimizer steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import optim
from halfstep.accelerator import replay
from halfstep.accelerator.configuration import AutocastKwargs
from halfstep.accelerator.core import Core
from halfstep.accelerator.facts import refuse_changed, refuse_loss
from halfstep.accelerator.prepared import PreparedOptimizer
from halfstep.accelerator.settings import taken
from halfstep.amp import autocast, backward_context, forward_context
from halfstep.distributed import NOBODY, Users
from halfstep.errors import ConfigError
from halfstep.step import StepResult
from halfstep.step.marks import Marks, gradients, marks, unchanged

if TYPE_CHECKING:
    from halfstep.optim import Release

logger = logging.getLogger("halfstep")


class Stepping(Core):
    """What an accelerator does in the loop."""

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """The block in which prepared models run; for a loss that should run in 16 bits too.

        autocast_handler: `AutocastKwargs(enabled=False)` makes it a block in fp32.
        """
        if autocast_handler is not None and not taken(AutocastKwargs, autocast_handler).enabled:
            return autocast(self.device.type, enabled=False)
        self._precise = True
        return forward_context(self.policy, self.device, self._products)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide `loss` by the micro-batches of its window, scale it as the policy says, and run the backward pass.

        A window has gradient_accumulation_steps of them; the last one before a loader ends may have fewer, and its
        gradients are then the mean over those.
        """
        refuse_loss(loss, self._models, "gradient" in kwargs)
        if not (self._models or self._precise):
            self._say_without_model()
        window, self._held, self._opening = self._window, True, False
        if self._short is not None:  # the loader ended inside a window: what was divided by the full length is a mean over fewer
            self.scaler.rescale_(self._full_window / window)
            self._short = None
        part = loss / window if window > 1 else loss
        scaled = self.scaler.scale(part)
        before = {id(o.optimizer): marks(gradients(o.optimizer)) for o in self._optimizers} if self._tells_apart() else None
        joins = self.sync_gradients and self._reduces
        for handle in self._releases:
            handle.hold = not joins
        if joins:
            self._reducer.expect(self._users(scaled))
        try:
            with backward_context(self.policy, self.device, self._products):
                scaled.backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._reducer.give_up()
            raise
        if before is not None:
            self._note_reached(before)
        if joins:
            self.scaler.join_ranks()

    def _say_without_model(self) -> None:
        """Say, once, that the precision is that of no model: nobody prepared one, and `autocast` was not entered."""
        self._precise = True
        if str(self.policy) != "fp32":
            logger.warning(
                "no model was prepared, so the loss was computed without %s. Give the model to prepare(), or compute the loss inside "
                "accelerator.autocast()",
                self.policy,
            )

    def _users(self, loss: Tensor) -> Users:
        """Who uses gradients up inside the backward pass of `loss`, once they are the mean over ranks."""
        if self.ranks.world == 1 or all(handle.removed for handle in self._releases):
            return NOBODY
        from halfstep.step.releases import UsedInside

        return UsedInside(loss)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch of a window: `optimizer.step()` and `zero_grad()` act only in the last one.

        The last of a window is every gradient_accumulation_steps-th, and the last batch of a prepared loader.
        """
        self._earlier, self._window = self._micro_batches, self._full_window
        self._micro_batches += 1
        full = self._micro_batches >= self._full_window
        self.sync_gradients = full or (self._ends_with_loader and any(loader.at_end for loader in self._loaders))
        if self.sync_gradients and not full:
            self._window = self._short = self._micro_batches
        if self.sync_gradients:
            self._micro_batches = 0
        self._reached.clear()
        if not self._earlier:
            self._holding.clear()
        self._opening = True
        try:
            yield
        finally:
            self._window, self._opening = self._full_window, False

    def may_clear(self, optimizer: Optimizer) -> bool:
        """Whether `zero_grad` may clear gradients of `optimizer` now: not those of a window that is going on.

        Neither at the start of its last micro-batch, nor later in it while it is another optimizer's turn and this one's gradients are still those of
        the micro-batches before (a GAN's generator while its discriminator steps).
        """
        if self._tells_apart():
            return self.sync_gradients if id(optimizer) in self._reached else id(optimizer) not in self._holding
        if self._opening:
            return not self._held or not self._earlier
        return self.sync_gradients or not self._held

    def _tells_apart(self) -> bool:
        """Whether windows are kept for each optimizer by itself."""
        return len(self._optimizers) > 1 and self._full_window > 1

    def _note_reached(self, before: dict[int, Marks]) -> None:
        """A backward pass has run: note whose gradients it has added to."""
        found = {id(o.optimizer) for o in self._optimizers if not unchanged(before[id(o.optimizer)], gradients(o.optimizer))}
        self._reached |= found
        self._holding |= found

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip unscaled gradients to `max_norm` and return their norm before that; None, and nothing, inside a window."""
        return self.scaler.clip_grad_norm_(parameters, max_norm, norm_type) if self.sync_gradients else None

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every element of unscaled gradients to [-clip_value, clip_value]; nothing inside a window. Bad gradients stay bad."""
        if self.sync_gradients:
            self.scaler.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients of a prepared optimizer, of several, or of all by the loss scale, so that they can be read. Nothing inside a window.

        `clip_grad_norm_` and `clip_grad_value_` do it by themselves. Raises StepOrderError when called twice before a step.
        """
        chosen = self._optimizers if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for one in chosen if self.sync_gradients else ():
            inner = one.optimizer if isinstance(one, PreparedOptimizer) else one
            if optimizer is not None or any(p.grad is not None for group in inner.param_groups for p in group["params"]):
                self.scaler.unscale_(inner)

    def release(
        self,
        optimizer: PreparedOptimizer,
        *,
        clip: Literal["per_parameter", "last"] | None = None,
        max_norm: float | None = None,
        after_bad: Literal["tensor", "rest"] = "tensor",
    ) -> Release:
        """Let a prepared optimizer update inside the backward pass and free each gradient at once: see `halfstep.optim.release`.

        Only the last micro-batch of a window updates. Several processes update with the mean over all, a bucket of gradients at a time
        (`DataParallel.bucket_cap_mb`): two of them are on their way, or being filled, while the backward pass goes on. `remove()` of the handle
        undoes it. Raises ConfigError for what cannot work: on_overflow="replay" under a loss scale, an optimizer that was not prepared.
        """
        if optimizer not in self._optimizers:
            raise ConfigError(f"release() was given a {type(optimizer).__name__} that was not prepared", "Give it what prepare(optimizer) returned.")
        model = self._models[0] if len(self._models) == 1 else None
        shared = self.ranks.world > 1
        handle = optim.release(optimizer.optimizer, model, clip=clip, max_norm=max_norm, after_bad=after_bad, shared=shared)
        try:
            self.scaler.watch(optimizer.optimizer)  # which binds the two, or refuses
        except ConfigError:
            handle.remove()
            raise
        self._releases.append(handle)
        return handle

    def on_applied(self, optimizer: PreparedOptimizer, function: Callable[[], object]) -> None:
        """Call `function()` after each step of a prepared optimizer that was applied: an EMA of the weights, a counter."""
        self.scaler.on_applied(optimizer.optimizer, function)

    def applied_steps(self, optimizer: Optimizer) -> int:
        """How many steps of `optimizer` (one that was prepared) have moved the weights."""
        return self.scaler.applied_steps(optimizer)

    def run_step(
        self,
        optimizer: PreparedOptimizer,
        compute: Callable[[], object],
        *,
        max_norm: float | None = None,
        stalled: bool = False,
        on_overflow: bool = True,
    ) -> StepResult:
        """Call `compute()`, which makes the gradients of one step, then `optimizer.step()`; after an overflow run both again at a lower loss scale.

        With heal="pin" also after a forward pass that overflowed, with the modules to blame held in fp32.

        compute: the forward and backward passes (`backward`) of all micro-batches, and clipping. Before it runs again, random states and the
        buffers of prepared models are put back and gradients cleared, so that the step is the one that the lower scale would have given.
        Nothing is kept in memory for this but the random states. The result's `replays` counts. max_norm, stalled: as in `optimizer.step`.
        on_overflow: False runs them again for pinned modules only.
        """
        step = functools.partial(optimizer.step, max_norm=max_norm, stalled=stalled)
        self.last_step = replay.run(compute, step, optimizer.zero_grad, self.scaler, on_overflow, self.policy.is_mixed or self.policy.whole)
        return self.last_step

    def take_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, stalled: bool = False
    ) -> StepResult:
        """Step `optimizer` (one that was prepared) or not, and let the loss scale follow. `PreparedOptimizer.step` calls it."""
        if not self.sync_gradients:
            scale = self.scaler.get_scale()
            self.last_step = StepResult(False, "accumulating", scale=scale, next_scale=scale)
            return self.last_step
        self._held = False
        self._holding.discard(id(optimizer))
        for model in self._models:
            if refuse_changed(model, self._signatures[id(model)], self._optimizers):
                self.scaler.watch(model)  # parts that are new
        try:
            self.last_step = self.scaler.step(optimizer, closure, max_norm=max_norm, stalled=stalled)
        finally:
            self.scaler.update()
            self.reduced_bytes, self._sent = self._reducer.sent - self._sent, self._reducer.sent
        return self.last_step
