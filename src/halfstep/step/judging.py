"""Unscaling: every gradient is judged once before it is used, and again when somebody has changed it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.errors import StepOrderError
from halfstep.kernels import cpu_kernels
from halfstep.step import checks
from halfstep.step.deferred import can_defer
from halfstep.step.marks import gradients, marks, parameters
from halfstep.step.narrow import widen_fp16
from halfstep.step.record import Record
from halfstep.step.state import Loose, StepState
from halfstep.step.verdict import LARGEST_GRADIENT, Evidence, Verdict, decide, gather

UNSCALED = {torch.float32, torch.bfloat16}  # gradients whose share of underflow nobody asks for where they bear no scale


def make_unscaled(state: StepState, owner: Any) -> Verdict | None:
    """Unscale what is still scaled, judge again what was changed since; the verdict, or None when there is none or it is read later."""
    record, held = state.record(owner), gradients(owner)
    if record.stepped or not held:
        return record.verdict
    if not record.unscaled or _stale(state, record, held):
        return unscale(state, owner)
    return _judged_again(state, owner, record, held)


def unscale(state: StepState, owner: Any, divide: bool = True) -> Verdict | None:
    """Judge the gradients of `owner`, of which there is at least one, and divide fit ones by the loss scale.

    divide: False leaves that to the optimizer, whose step must follow at once.
    """
    record = state.record(owner)
    record.loss, record.evidence = state.loss_of(owner), None
    record.verdict = _at_once(state, owner, record, record.loss)
    if record.verdict is None:
        evidence = measure(state, owner)
        if defers(state, owner):
            record.evidence = evidence
        else:
            record.verdict = _decided(state, owner, record, evidence)
    unscaled = record.verdict is None or record.verdict.fit
    if unscaled and divide:
        if state.scale_at_hand != 1.0:
            widen_fp16(state, owner)
        numerics.multiply_(gradients(owner), 1.0 / state.scale_at_hand)
    elif not unscaled:  # what another optimizer has too, and measure() has scaled again
        numerics.multiply_([p.grad for p in parameters(owner) if p.grad is not None and state.ledger.is_unscaled(p)], 1.0 / state.scale_at_hand)
    record.clipped, record.heard, record.losses = False, False, state.losses
    if divide:
        state.ledger.use(parameters(owner), unscaled)
        record.marks = marks(gradients(owner))
    return record.verdict


def _at_once(state: StepState, owner: Any, record: Record, loss: Tensor | None) -> Verdict | None:
    """The verdict on gradients on a CPU that bear no scale and are fit, from their norm alone; None: they must be looked at closely."""
    if state.scale_at_hand != 1.0 or state.agree is not None or state.scaling.senses or isinstance(owner, Loose):
        return None
    held, kernels = gradients(owner), None
    if False in [g.is_cpu and g.layout is torch.strided for g in held] or (state.deferred is not None and defers(state, owner)):
        return None
    if getattr(owner, "knows_masters", False):  # their kernels give the largest magnitudes too, which the watch takes down
        kernels = cpu_kernels()
        if kernels is None or not {g.dtype for g in held} <= UNSCALED:
            return None
        sums, peaks = kernels.squares(held)
        total = sums.sum().sqrt().float()
    elif state.watching.wants(owner, record.applied) or {g.dtype for g in held} != {torch.float32}:
        return None
    else:
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(held)))
    norm, seen = torch.stack((total, total if loss is None else loss.to(total))).tolist()  # read at one time
    if not (norm <= LARGEST_GRADIENT and math.isfinite(seen)):
        return None
    if kernels is not None:
        state.watching.take_down(state, owner, peaks, None, 1.0)
    return Verdict(True, norm)


def measure(state: StepState, owner: Any) -> Evidence:
    """Evidence on the gradients of `owner` as they are, still scaled. Raises StepOrderError when they were changed since the backward pass."""
    if state.scale_at_hand != 1.0:
        own = parameters(owner)
        if not state.noticed and not isinstance(owner, Loose):
            checks.refuse_unseen(owner, state.called)
        checks.refuse_edits([] if state.editing else state.ledger.edited(own), state.ledger.mixed(own), state.called)
        state.join_ranks(lambda: own)
        shared = [p.grad for p in own if p.grad is not None and state.ledger.is_unscaled(p)]
        numerics.multiply_(shared, state.scale_at_hand)  # of a parameter that another optimizer has too, which was unscaled before
    else:
        state.join_ranks(lambda: parameters(owner))
    compiled = bool(getattr(owner, "knows_masters", False))
    lasts = not isinstance(owner, Loose)
    wanted = lasts and state.watching.wants(owner, state.record(owner).applied)
    evidence = gather(gradients(owner), state.scale_at_hand, state.loss_of(owner), state.agree, state.scaling.senses, compiled, watch=wanted)
    if lasts:
        state.watching.note(state, owner, evidence)
    return evidence


def defers(state: StepState, owner: Any) -> bool:
    """Whether the verdict on this optimizer's gradients may be read after its step."""
    wanted = next(g.is_cuda for p in parameters(owner) if (g := p.grad) is not None) if state.deferred is None else state.deferred
    looked_into = state.heal == "skip" or bool(state.trying)  # what heals must be known while the forward pass is remembered
    return wanted and looked_into and state.on_overflow == "skip" and can_defer(owner)


def _decided(state: StepState, owner: Any, record: Record, evidence: Evidence) -> Verdict:
    """The verdict, after backward passes at lower scales if that was asked for and can help."""
    name = state.namer(owner)
    verdict = decide(evidence, evidence.values.tolist(), name, gradients(owner))
    fall = 2.0
    while not verdict.fit and verdict.blames_scale and _can_replay(state, owner):
        lower = max(state.scaling.floor, state.scale_at_hand / fall)
        if lower == state.scale_at_hand:
            break
        state.made_under, fall = lower, fall * fall
        with state.around(), state.buffers.untouched():  # a forward pass that is computed again may move them
            state.replay.run(lower, state.everybody(), state.ledger.holds)
        state.ledger.again()
        record.replays += 1
        evidence = measure(state, owner)
        verdict = decide(evidence, evidence.values.tolist(), name, gradients(owner))
    record.measured = evidence
    if state.hopeless and not verdict.fit:
        verdict = verdict.not_the_scale()
    if record.replays and verdict.fit:
        state.scaling.lower(state.scale_at_hand)
    elif record.replays:
        verdict = verdict.not_the_scale()  # bad at the lowest scale too
    return verdict


def _can_replay(state: StepState, owner: Any) -> bool:
    """Whether backward passes may be run again: not after another optimizer has stepped or was unscaled, since theirs would be undone."""
    others = [r for o, r in state.records.items() if o is not owner]
    wanted = state.on_overflow == "replay" and state.scaling.active and not state.replay.is_empty
    return wanted and not any(r.stepped or r.unscaled for r in others)


def _stale(state: StepState, record: Record, held: list[Tensor]) -> bool:
    """Without scaling nobody need call scale(): other gradients than the bad ones that were judged are a new backward pass."""
    return not state.scaling.active and record.verdict is not None and not record.verdict.fit and not record.judged(held)


def _judged_again(state: StepState, owner: Any, record: Record, held: list[Tensor]) -> Verdict | None:
    """The verdict on unscaled gradients, measured once more if somebody (a clip of the user's) changed them since."""
    verdict = record.verdict
    if record.judged(held) or (verdict is not None and not verdict.fit):
        return verdict
    if state.scaling.active and record.losses != state.losses:
        raise StepOrderError(
            "gradients were unscaled and changed after another loss was scaled: a backward pass has added scaled gradients to unscaled ones",
            "Call unscale_() or clip after the last backward pass of a step, and edit gradients before the next loss is scaled.",
        )
    now = gather(held, 1.0, state.loss_of(owner), state.agree)
    if record.evidence is not None:
        record.marks = marks(held)
        record.signs.append(now.values[0] < record.evidence.values[0] / record.evidence.scale)
        values = record.evidence.values.clone()
        values[2] = torch.maximum(values[2], now.values[2])
        record.evidence = Evidence(values, record.evidence.norms, record.evidence.scale, record.evidence.sensed, True)
        return None
    assert verdict is not None
    new = decide(now, now.values.tolist(), state.namer(owner), held)
    record.clipped = record.clipped or new.norm < verdict.norm
    norm = verdict.norm if new.fit else new.norm
    record.verdict = Verdict(new.fit, norm, new.loss_finite, new.culprits, verdict.peak, verdict.share, nonfinite=new.nonfinite)
    return record.verdict
