"""The step engine: measure, decide, unscale, clip, update the optimizer, update the scale, and say what happened.

All three doors use this one. The order of a step:

    scale(loss).backward()     gradients are now multiplied by the loss scale
    unscale(optimizer)         one pass measures them, a verdict is reached, good ones are divided by the scale
    clip(...)                  acts on unscaled gradients
    step(optimizer)            does what is missing of the above, then updates the weights or does not, and tells
    update()                   the scale follows the verdicts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import numerics
from halfstep.errors import ConfigError, StepOrderError
from halfstep.hardware import keep_memory
from halfstep.optim import RELEASES
from halfstep.step import checks, clipping, guard, judging, narrow, taking
from halfstep.step.backward import through, value_of, when_backward_ends
from halfstep.step.graph import NOT_LOOKED_AT, Reached
from halfstep.step.marks import gradients, marks, parameters
from halfstep.step.multiply import times
from halfstep.step.record import Record
from halfstep.step.result import StepResult
from halfstep.step.scaling import Scaling
from halfstep.step.start import Start
from halfstep.step.state import OnOverflow, StepState
from halfstep.step.verdict import Agree, Verdict

LOOK_EVERY = 16  # losses of which one is looked at in any case
GRAPHS = 64  # sizes of graphs that are remembered as looked at


class StepEngine:
    """Carries out optimizer steps under one loss scale and refuses the bad ones.

    patience: after so many bad steps of one optimizer in a row `step` raises DivergedError.
    on_overflow: "skip" the step, "replay" its backward passes at lower scales, or "raise" StepRefusedError.
    agree: gets an fp32 tensor on the gradients' device and returns its maximum over all ranks; every verdict goes through it.
    deferred: whether a verdict may be read after the step; None: on a GPU. Only with "skip" and torch's fused optimizers.

    A bad step changes neither weights nor optimizer states nor the buffers of modules that are known.
    """

    def __init__(
        self, scaling: Scaling, patience: int = 50, *, on_overflow: OnOverflow = "skip", agree: Agree | None = None, deferred: bool | None = None
    ) -> None:
        if patience < 1:
            raise ConfigError(f"a patience of {patience} steps", "Use 1 or more.")
        self.state = StepState(scaling, patience, on_overflow, agree, deferred)
        self._start = Start(agree)
        self._update_due = False  # update() was called while a verdict was on its way
        self._task = -1  # the number that autograd gives to the backward pass at hand
        self._known: list[ref[Tensor]] = []  # all parameters, when the last loss came, where nothing is scaled
        self._last: int | None = None  # autograd's number of the last operation of the last loss
        self._sizes: set[int] = set()  # how many operations lay between two losses, where the graph of the second was looked at
        self._reaches: list[int] | None = None  # ids of the parameters of all optimizers, when a graph was looked at that reaches no others
        self._going_through: list[Tensor | None] = []  # losses that the backward pass at hand has come through

    @property
    def scaling(self) -> Scaling:
        """The state machine of the loss scale."""
        return self.state.scaling

    @scaling.setter
    def scaling(self, scaling: Scaling) -> None:
        self.state.scaling = scaling

    @property
    def bad_steps(self) -> int:
        """The longest row of bad steps that an optimizer is in now."""
        taking.settle(self.state)
        return max((record.bad_steps for record in self.state.records.values()), default=self.state.bad_before)

    @bad_steps.setter
    def bad_steps(self, count: int) -> None:
        self.state.bad_before = count
        for record in self.state.records.values():
            record.bad_steps = count

    @property
    def steps(self) -> int:
        """Applied steps of the optimizer with the most, and those of the run before this one."""
        return self.state.watching.before + max((record.applied for record in self.state.records.values()), default=0)

    @steps.setter
    def steps(self, count: int) -> None:
        self.state.watching.before += count - self.steps

    def name_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Names to call parameters by when their gradients are bad, as `module.named_parameters()` gives them."""
        known = {i: (r, name) for i, (r, name) in self.state.names.items() if r() is not None}
        self.state.names = known | {id(p): (ref(p), name) for name, p in named}

    def know(self, item: Optimizer | nn.Module) -> Record | None:
        """Make an optimizer known before its first step; of a module, guard the buffers and learn the names of the parameters."""
        self._reaches = None
        if isinstance(item, nn.Module):
            self.state.buffers.watch(item)
            self.name_parameters(item.named_parameters())
            return None
        if (handle := self.state.handle_for(item)) is not None:
            self.state.release.bind(self.state, handle)
        return self.state.record(item)

    def when_known(self, optimizer: Optimizer, run: Callable[[], object]) -> None:
        """Run something once the result of this optimizer's last step is known; at once if it is."""
        pending = self.state.record(optimizer).pending
        run() if pending is None else pending.then(run)

    def settle(self) -> None:
        """Learn the results that are still on the device."""
        taking.settle(self.state)
        due, self._update_due = self._update_due, False
        if due:
            self.update()

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, in fp32 at least; the same tensor when there is no scaling."""
        state = self.state
        checks.refuse_loss(loss)
        checks.refuse_penalty(loss, None if state.scale_was_read else state.penalty)
        state.penalty = None
        self.settle()
        self._begin()
        keep_memory(loss.device)
        reached, known = self._reached(loss), state.everybody()
        if state.scaling.active:
            state.ledger.look(known)
        else:  # looked at when the backward pass begins
            self._known = [ref(p) for p in known]
        narrow.before_a_backward_pass(state, known)
        state.buffers.found(reached.statistics)
        if RELEASES:
            state.release.find(state, reached)
        self._choose_scale(loss, reached)
        state.ledger.begin()
        seen = value_of(loss)
        if seen is not None:
            state.loss = seen if state.loss is None else state.loss + seen.to(state.loss.device)
        state.losses += 1
        if state.on_overflow == "replay" and state.scaling.active:
            checks.refuse_foreign(reached)
            loss = state.replay.keep(loss, lambda: state.scale_at_hand)
        if state.scaling.active:
            guard.install()
            loss = times(loss, lambda: state.scale_at_hand, state.sign_penalty)
        if getattr(loss, "watched_by", None) is state.sign:
            return loss  # with scaling off it is the user's own tensor, and this its second time
        loss.watched_by = state.sign  # type: ignore[attr-defined]
        begins = partial(self._backward_begins, seen)  # lives as long as the graph
        if RELEASES:
            state.release.expect(state, loss, seen, begins)
        when_backward_ends(loss, begins, self._backward_ended)
        return loss

    def _reached(self, loss: Tensor) -> Reached:
        """What a loss reaches. Nobody looks where nothing is scaled, modules are known, and optimizers have all that was reached so far.

        A graph of another size than those that were looked at is looked at: a batch norm that nobody has shown may have joined.
        """
        state = self.state
        if state.scaling.active or not state.buffers.has_modules:
            return state.watch.look(loss)
        own, size = list(map(id, state.owned())), self._operations(loss)
        if own != self._reaches:
            self._sizes.clear()
        state.unseen = own == self._reaches and size in self._sizes and state.losses % LOOK_EVERY != 0
        if state.unseen:
            return NOT_LOOKED_AT
        reached = state.watch.look(loss)
        self._reaches = own if own and {id(p) for p in state.watch.leaves()} <= set(own) else None
        if size is not None and len(self._sizes) < GRAPHS:
            self._sizes.add(size)
        return reached

    def _operations(self, loss: Tensor) -> int | None:
        """How many differentiable operations this thread has done since the last loss, by autograd's own count; None where it does not tell."""
        number = getattr(loss.grad_fn, "_sequence_nr", None)
        before, self._last = self._last, number() if number is not None else None
        return None if before is None or self._last is None else self._last - before

    def _choose_scale(self, loss: Tensor, reached: Reached) -> None:
        """The scale of this loss: that of the gradients at hand, if there are any, unless the step calibrates and it must be lower."""
        state = self.state
        if not state.scaling.active:
            state.made_under = state.scaling.scale
            return
        under_way = state.made_under is not None and state.in_flight()
        if not under_way:
            state.scaling.begin()
        if self._start.wants(state.scaling, reached) and not any(r.unscaled for r in state.records.values()):
            with state.around():
                self._start.calibrate(state.scaling, loss, reached, state.owned(), state.buffers)
            state.hopeless = self._start.hopeless
            if under_way and state.made_under is not None and state.scaling.scale < state.made_under:
                held = [p.grad for p in state.everybody() if p.grad is not None and state.ledger.holds(p)]
                numerics.multiply_(held, state.scaling.scale / state.made_under)
                state.ledger.again()
                under_way = False
        if not under_way:
            state.scale_was_read = state.scale_was_read and state.made_under == state.scaling.scale
            state.made_under = state.scaling.scale

    def _begin(self) -> None:
        """A new loss: gradients that were stepped with, or judged and thrown away since, are the past."""
        state = self.state
        for loose in [x for x in state.loose if not any(state.ledger.waits(p) for p in parameters(x))]:
            state.dissolve(loose)
        for owner, record in state.records.items():
            if record.stepped:
                record.spent = marks(gradients(owner))
                record.forget()
            elif record.unscaled and self._thrown_away(owner, record):
                record.forget()
                state.buffers.repair()
                state.loss_spent = state.loss_spent or not any(numerics.stored(g).any() for o in state.records.owners() for g in gradients(o))
        if state.loss_spent:
            state.loss, state.loss_spent, state.noticed = None, False, 0
            self._start.next_step()
            state.hopeless = False
            state.replay.clear()
            taking.close_window(state)

    def _thrown_away(self, owner: Any, record: Record) -> bool:
        """Whether gradients that were judged have been cleared since, without a step: what follows is a new backward pass."""
        held = gradients(owner)
        return not held or (not record.judged(held) and not any(bool(numerics.stored(g).any()) for g in held))

    def _backward_begins(self, seen: Tensor | None, gradient: Tensor) -> bool:
        """A backward pass comes through a loss, with `gradient` (1, or what the user has divided it by). Whether it is the first of this pass."""
        task = torch._C._current_graph_task_id()
        first = task != self._task
        if first:  # an earlier pass may have ended with an error
            self._task, self._going_through = task, []
            if not self.state.scaling.active:
                self.state.ledger.look([p for r in self._known if (p := r()) is not None], listen=False)
        if self.state.releases:
            self.state.release.begin(self.state, seen, first)
        self._going_through.append(through(seen, gradient))
        return len(self._going_through) == 1

    def _backward_ended(self) -> None:
        """At the end of a backward pass: take down which gradients it has made, and for whom."""
        state, losses = self.state, [loss for loss in self._going_through if loss is not None]
        self._going_through = []
        seen = torch.stack([loss.to(losses[0].device) for loss in losses]).sum() if len(losses) > 1 else losses[0] if losses else None
        if state.releases:
            state.release.ended(state, seen)
        moved, added = state.ledger.note(state.sign, state.passes, seen)
        state.noticed += 1
        state.passes += 1
        state.replay.note(moved, added)
        for owner, record in state.records.items():
            if not record.unscaled:
                continue
            own = {id(p) for p in parameters(owner)}
            if not own & moved:
                continue
            if state.scale_at_hand != 1.0 and record.unscaled and not record.stepped and own & added:
                raise StepOrderError(
                    "gradients were unscaled before this backward pass, which has added scaled gradients to unscaled ones",
                    "Call unscale_() or clip once per step, after the last backward pass of it.",
                )
            if record.unscaled and not record.stepped and (not state.scaling.active or not own & added):
                record.forget()  # those that were judged were added to, or cleared since the loss was scaled

    def unscale(self, optimizer: Optimizer) -> Verdict | None:
        """Judge the gradients of `optimizer` and, when they are fit, divide them by the loss scale in place.

        None when it has no gradients, or the verdict will be read later. Raises StepOrderError when they were unscaled already, or changed since.
        """
        record = self.state.record(optimizer)
        self.state.join_ranks(lambda: parameters(optimizer))
        if self.state.releases:
            self.state.release.refuse_edits(self.state, map(id, parameters(optimizer)), "unscaling")
        if not gradients(optimizer):
            return None
        clipping.adopt(self.state, optimizer)
        if self.state.scaling.active and record.unscaled and not record.stepped:
            raise StepOrderError(
                "unscale_() was already called on this optimizer since its last step, or a clip has unscaled its gradients: twice divides them twice",
                "Call it once per step, before clipping.",
            )
        return (judging.unscale if self.state.scaling.active else judging.make_unscaled)(self.state, optimizer)

    def clip(self, chosen: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of `chosen` parameters to `max_norm`, unscaling them first. Returns their norm before clipping, a scalar tensor."""
        return clipping.clip(self.state, chosen, max_norm, norm_type)

    def clip_value(self, chosen: Iterable[Tensor], value: float) -> None:
        """Clamp the elements of the gradients of `chosen` parameters to [-value, value], unscaling them first."""
        clipping.clip_value(self.state, chosen, value)

    @contextmanager
    def edits(self) -> Iterator[None]:
        """Inside, gradients that are still scaled may be changed by something that does not depend on the scale."""
        self.state.editing = True
        try:
            yield
        finally:
            self.state.editing = False
            self.state.ledger.again()

    @contextmanager
    def trying(self, *reasons: str) -> Iterator[None]:
        """Inside, a step that overflows ("overflow"), or whose culprits were pinned ("pin"), is refused and put back as ever, but not counted.

        Nor is it held against the scale.
        """
        self.state.trying = frozenset(reasons)
        try:
            yield
        finally:
            self.state.trying = frozenset()

    def rescale(self, factor: float) -> None:
        """Multiply the gradients of all known optimizers, and the losses noted for this step, by `factor`."""
        state = self.state
        narrow.widen(state, state.owned())
        numerics.multiply_(list({id(g): g for owner in state.records.owners() for g in gradients(owner)}.values()), factor)
        state.ledger.again()
        if state.loss is not None and not state.loss_spent:
            state.loss = state.loss * factor
        state.ledger.rescale(factor)
        if state.releases:
            state.release.rescale(state, factor)

    def discard(self) -> None:
        """Throw away the gradients at hand that are still scaled, of all optimizers: they will be made again."""
        for p in self.state.everybody():
            if self.state.ledger.holds(p):
                p.grad = None

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, max_norm: float | None = None, stalled: bool = False
    ) -> StepResult:
        """Update the weights if the gradients and the loss are fit, and say what happened.

        max_norm: clip to this norm on the way. stalled: measure the share of updates that rounded away.
        Raises StepOrderError when the order of calls makes the gradients wrong, DivergedError after `patience` bad steps in a row,
        StepRefusedError for a bad step under on_overflow="raise".
        """
        state, record = self.state, self.state.record(optimizer)
        if (handle := state.handle_for(optimizer)) is not None:
            return state.release.take(state, optimizer, handle, closure, max_norm, stalled)  # type: ignore[no-any-return]
        if closure is None:
            state.join_ranks(lambda: parameters(optimizer))
        if closure is None and not gradients(optimizer):
            return taking.no_gradients(state, optimizer)
        if state.scaling.active and record.awaits_update:
            raise StepOrderError("step() was called twice without update() between", "Call update() once per iteration, after step().")
        if closure is None and state.scaling.active and record.stepped:
            raise StepOrderError("step() was called twice for one backward pass", "Call scale(loss).backward() before each step().")
        if closure is None and state.scaling.active and state.made_under is None:
            raise StepOrderError(
                "no loss was scaled before step(), so its gradients cannot be unscaled", "Call scale(loss).backward() instead of loss.backward()."
            )
        return taking.take(state, optimizer, closure, max_norm, stalled)

    def update(self, new_scale: float | None = None) -> None:
        """Let the scale follow the steps since the last update, or set it. Gradients already made keep their own scale.

        Bad gradients that were unscaled and thrown away without a step count too. After a non-finite loss the scale stays:
        a bad forward pass is not the scale's fault.
        """
        state = self.state
        if new_scale is None and not state.scaling.active:
            state.unheard.clear()
            return
        if new_scale is not None:
            taking.settle(state)
        for record in state.records.values():
            record.awaits_update = False
            if record.verdict is not None and not record.verdict.fit and not record.heard:
                record.heard = True
                state.unheard.append(record.verdict)
        if any(record.pending is not None and not record.pending.is_settled for record in state.records.values()) and new_scale is None:
            self._update_due = True
            return
        verdicts, state.unheard = state.unheard, []
        overflow, seen, moves = taking.heard_together(verdicts, state.scale_at_hand)
        if new_scale is not None and new_scale < state.scaling.scale:
            state.scaling.lower(new_scale)
        elif new_scale is not None:
            state.scaling.begin()
            state.scaling.scale = new_scale
        elif moves:
            state.scaling.update(overflow, seen)
