"""Taking a step or not, now or on the device, and telling what happened."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.step import checks, refusal
from halfstep.step.clipping import adopt, clip, clip_to, refuse_norm
from halfstep.step.closures import step_with_closure
from halfstep.step.deferred import Pending, Reading, divides_itself, step_on_device
from halfstep.step.judging import defers, make_unscaled, measure, unscale
from halfstep.step.marks import gradients, marks, parameters
from halfstep.step.narrow import divides_late, has_fp16_gradients
from halfstep.step.record import Record
from halfstep.step.refusal import Explained, Heal
from halfstep.step.result import DeferredResult, Reason, StepResult
from halfstep.step.scaling import Seen
from halfstep.step.stalled import Before, share_of
from halfstep.step.state import StepState
from halfstep.step.verdict import NAMED, Evidence, Verdict, decide
from halfstep.step.watching import Watch

NOTHING = Explained()
SAMPLED = 4096  # elements of each weight that the watch looks at


def take(
    state: StepState, optimizer: Optimizer, closure: Callable[[], Any] | None, max_norm: float | None = None, stalled: bool = False
) -> StepResult:
    """Judge what is not judged yet, then clip to `max_norm` and step, or refuse. stalled: measure what was rounded away."""
    record = state.record(optimizer)
    record.devices = checks.refuse_states(optimizer, state.called, record.devices)
    before = Before(optimizer) if stalled else Before(optimizer, SAMPLED) if state.watching.wants_updates(record.applied) else None
    if closure is not None:
        if max_norm is not None:
            raise ConfigError("max_norm= has no effect with a closure, whose gradients are used inside the optimizer", "Clip in the closure.")
        verdict = step_with_closure(state, optimizer, closure)
    else:
        adopt(state, optimizer)
        checks.refuse_settings(optimizer)
        fused = not record.unscaled and divides_itself(optimizer)
        if fused and defers(state, optimizer):
            if max_norm is not None:
                refuse_norm(max_norm)
            record.evidence = measure(state, optimizer)
            return _take_on_device(state, optimizer, record, _divisor(state, record, record.evidence, max_norm), before)
        late = not record.unscaled and divides_late(optimizer) and (max_norm is not None or has_fp16_gradients(optimizer))
        if max_norm is not None and not late:
            clip(state, parameters(optimizer), max_norm, 2.0)
        if late:
            return _told(state, optimizer, record, _take_late(state, optimizer, record, max_norm), before)
        fused = not record.unscaled and divides_itself(optimizer)  # a clip has unscaled
        fused = fused and state.scale_at_hand != 1.0
        verdict = unscale(state, optimizer, divide=False) if fused else make_unscaled(state, optimizer)
        if verdict is None and record.evidence is not None:
            return _take_on_device(state, optimizer, record, 1.0, before)
        if verdict is not None and verdict.fit:
            if fused:
                _divide_and_step(
                    state, optimizer, record, torch.zeros((), device=gradients(optimizer)[0].device, dtype=torch.float32), state.scale_at_hand
                )
            else:
                state.take_a_step(optimizer.step)
    return _told(state, optimizer, record, verdict, before)


def _take_late(state: StepState, optimizer: Any, record: Record, max_norm: float | None) -> Verdict | None:
    """A step of an optimizer that divides and clips gradients in its own pass. They stay as the backward pass left them."""
    verdict = unscale(state, optimizer, divide=False)
    if verdict is None or not verdict.fit:
        return verdict
    factor = clip_to(verdict.norm, max_norm) if max_norm is not None else 1.0
    record.clipped = factor < 1.0
    try:
        state.take_a_step(optimizer.step, factor=factor / state.scale_at_hand)
    except BaseException:
        record.forget()  # they are still scaled
        raise
    if state.scaling.active and getattr(optimizer, "writes_gradients", False):
        state.ledger.use(parameters(optimizer))
    return verdict


def _told(state: StepState, optimizer: Optimizer, record: Record, verdict: Verdict | None, before: Before | None) -> StepResult:
    """What a step that was taken or refused has come to."""
    if verdict is None:
        return no_gradients(state, optimizer)
    record.verdict = verdict
    moved = before.counts() if before is not None and verdict.fit else None
    if moved is not None:
        state.watching.note_weights(state, optimizer)
    record.stalled = share_of(moved) if before is not None and before.whole else None
    loss = state.loss_of(optimizer)
    record.loss = record.loss if loss is None else loss  # some optimizers clear gradients in their step
    result = told(state, optimizer, record, verdict, state.heal, moved)
    spend(state, optimizer, record)
    window_ends(state, verdict.fit)
    return counted(state, record, result)


def told(state: StepState, optimizer: Optimizer, record: Record, verdict: Verdict, heal: Heal, moved: Tensor | None = None) -> StepResult:
    """The result of a verdict, with what the watch has seen and, for a refused step, what its forward passes show. moved: see `Watching.watch`."""
    watch, said = state.watching.watch(optimizer, record.applied, moved), NOTHING
    if not verdict.fit:
        with state.buffers.untouched():
            said = refusal.explained(state.explain, verdict, heal, state.watching.number(record.applied))
    return _result(state, verdict, record, state.scale_at_hand, record.heard, watch, said)


def no_gradients(state: StepState, optimizer: Optimizer) -> StepResult:
    """A step that had nothing to do, and why."""
    state.loss_spent = True
    scale = state.scaling.scale
    detail = checks.why_no_gradients(optimizer, state.called, state.watch.leaves())
    return StepResult(False, "no-gradients", scale=scale, next_scale=scale, loss_tensor=state.loss, detail=detail)


def _divisor(state: StepState, record: Record, evidence: Evidence, max_norm: float | None) -> float | Tensor:
    """What the device divides the gradients by: the loss scale, and with `max_norm` also what brings their norm down to that."""
    scale = state.scale_at_hand
    if max_norm is None:
        return scale
    norm = evidence.values[0] / scale
    record.signs.append(torch.isfinite(norm) & (norm + 1e-6 > max_norm))
    if max_norm == 0:
        return torch.full_like(norm, math.inf)
    return scale * torch.clamp((norm + 1e-6) / max_norm, min=1.0)


def _take_on_device(state: StepState, optimizer: Optimizer, record: Record, scale: float | Tensor, before: Before | None) -> StepResult:
    """Let the device decide. The result is found out when somebody asks, and at the next loss at the latest."""
    evidence = record.evidence
    assert evidence is not None
    bad, reading, name = evidence.bad, Reading(evidence.values), state.namer(optimizer)
    _divide_and_step(state, optimizer, record, bad, scale)
    signs = Reading(torch.stack(record.signs).any().float().reshape(1)) if record.signs else None
    counts = before.counts() if before is not None else None
    moved = counts * (bad == 0).to(counts.device) if counts is not None else None  # a refused step has made no updates
    if before is not None:
        state.watching.note_weights(state, optimizer)
    watch = state.watching.watch(optimizer, record.applied, moved)
    told = Record(clipped=record.clipped, loss=state.loss_of(optimizer))
    made_under, hopeless, window = state.scale_at_hand, state.hopeless, state.remembered()
    number = state.watching.number(record.applied)

    def find() -> StepResult:
        verdict, said = decide(evidence, reading.numbers(), name), NOTHING
        if hopeless and not verdict.fit:
            verdict = verdict.not_the_scale()
        if not verdict.fit and window == state.remembered():  # else its forward passes are forgotten
            with state.buffers.untouched():
                said = refusal.explained(state.explain, verdict, state.heal, number)
        told.stalled = share_of(moved) if before is not None and before.whole else None
        told.clipped = told.clipped or (signs is not None and verdict.fit and bool(signs.numbers()[0]))
        result = _result(state, verdict, told, made_under, False, watch, said)
        if state.scaling.active:
            state.unheard.append(verdict)
        return result

    pending = record.pending = Pending(find)
    pending.then(lambda: counted(state, record, pending.settle()))
    record.heard = True
    spend(state, optimizer, record)
    window_ends(state, bad)
    return DeferredResult(pending.settle, told.loss)


def _divide_and_step(state: StepState, optimizer: Optimizer, record: Record, bad: Tensor, scale: float | Tensor) -> None:
    """The step of a fused optimizer, which divides by `scale` itself. If it fails before that, the gradients are as a backward pass left them."""
    try:
        state.take_a_step(step_on_device, optimizer, bad, scale)
    except BaseException:
        if isinstance(scale, Tensor) or scale != 1.0:
            record.forget()
        raise
    state.ledger.use(parameters(optimizer))


def settle(state: StepState) -> None:
    """Find out the results of all steps whose verdicts were left on the device."""
    for record in state.records.values():
        if record.pending is not None:
            pending, record.pending = record.pending, None
            pending.settle()


def spend(state: StepState, optimizer: Optimizer, record: Record) -> None:
    """The gradients at hand, and the losses they came from, are used up."""
    state.loss_spent = True
    record.spent_to = state.passes - 1
    state.ledger.spend(parameters(optimizer))
    record.spent = marks(gradients(optimizer))
    if not any(state.waits(other) for other in state.records.owners() if other is not optimizer):
        state.replay.clear()
    if not state.scaling.active:
        record.forget()
        return
    record.stepped, record.awaits_update = True, True
    if not record.heard and record.verdict is not None:
        record.heard = True
        state.unheard.append(record.verdict)


def window_ends(state: StepState, fit: bool | Tensor) -> None:
    """Buffers follow the first optimizer of their forward passes that is applied; without one they are put back. A tensor is 1 for a bad step."""
    if isinstance(fit, Tensor):
        state.window.append(fit)
        if not any(state.waits(owner) for owner in state.records.owners()):
            close_window(state)
    elif fit:
        if any(verdict is False for verdict in state.window):
            state.buffers.redo()
        state.buffers.keep()
        state.window.append(True)
    elif not state.window:
        state.buffers.undo()
        state.window.append(False)


def close_window(state: StepState) -> None:
    """The forward passes of a step are the past: verdicts that are on the device decide over their buffers there."""
    on_device = [v for v in state.window if isinstance(v, Tensor)]
    if on_device:
        state.buffers.keep(torch.stack(on_device).amin())
    state.window.clear()
    state.buffers.forget()


def _result(
    state: StepState, verdict: Verdict, record: Record, scale: float, heard: bool, watch: Watch | None, said: Explained = NOTHING
) -> StepResult:
    bad: Reason = "forward-overflow" if said.overflow else "overflow" if verdict.loss_finite else "nonfinite-loss"
    scaled = state.scaling.active
    overflow, seen, blames = heard_together([*state.unheard, *([] if heard else [verdict])], scale) if scaled else (False, None, False)
    return StepResult(
        applied=verdict.fit,
        reason="applied" if verdict.fit else bad,
        grad_norm=verdict.norm,
        clipped=record.clipped,
        scale=scale if scaled else state.scaling.scale,
        next_scale=state.scaling.after(overflow, seen) if blames else state.scaling.scale,
        replays=record.replays,
        culprits=(*said.culprits, *verdict.culprits)[:NAMED],
        pinned=said.pinned,
        stalled=record.stalled,
        detail="; ".join(filter(None, ("bad at the lowest loss scale too, so the scale is not to blame" if verdict.persists else "", said.detail))),
        loss_tensor=record.loss,
        watch=replace(watch, nonfinite=verdict.nonfinite) if watch is not None and verdict.nonfinite else watch,
    )


def heard_together(verdicts: list[Verdict], scale: float) -> tuple[bool, Seen | None, bool]:
    """What several verdicts say to the scale: an overflow, the largest of the peaks and shares, and whether it should move at all."""
    peaks, shares = [v.peak for v in verdicts if v.peak is not None], [v.share for v in verdicts if v.share is not None]
    overflow = any(not v.fit for v in verdicts)
    seen = Seen(max(peaks), max(shares), scale) if peaks and not overflow else None
    return overflow, seen, bool(verdicts) and all(v.blames_scale for v in verdicts)


def counted(state: StepState, record: Record, result: StepResult) -> StepResult:
    """Count a step, run what follows applied ones, and refuse to go on after too many bad ones."""
    try:
        return _count(state, record, result)
    except BaseException:
        record.awaits_update = False  # who catches it may go on with the next batch
        raise


def _count(state: StepState, record: Record, result: StepResult) -> StepResult:
    if result.applied:
        record.applied += 1
        for hook in record.hooks:
            hook()
    if result.reason == "applied":
        record.bad_steps = 0
        return result
    if (result.reason == "overflow" and "overflow" in state.trying) or (result.pinned and "pin" in state.trying):
        state.unheard.clear()
        return result
    record.bad_steps += 1
    if record.bad_steps >= state.patience:
        raise refusal.diverged(result, record, state.watching.number(record.applied) - 1, state.patience, state.checkpoint)
    if state.on_overflow == "raise" or (state.heal == "raise" and result.reason in ("forward-overflow", "nonfinite-loss")):
        raise refusal.refused(result)
    return result
