"""What a step has come to whose parameters were updated inside the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import Release, Released
from halfstep.step import taking
from halfstep.step.marks import parameters
from halfstep.step.record import Record
from halfstep.step.releases import MODES, bind
from halfstep.step.result import Culprit, StepResult
from halfstep.step.state import StepState
from halfstep.step.verdict import NAMED, Evidence, Verdict


def take(state: StepState, optimizer: Optimizer, handle: Release, closure: Any, max_norm: float | None, stalled: bool) -> StepResult:
    """Close the books of a step."""
    record = state.record(optimizer)
    _refuse(closure, max_norm, stalled)
    if state.scaling.active and record.awaits_update:
        raise StepOrderError("step() was called twice on one optimizer without update() between", "Call update() once per iteration, after step().")
    bind(state, handle)
    losses = handle.losses
    with state.taking_a_step():
        told = handle.close(state.scale_at_hand)
    if not told.numbers:
        return taking.no_gradients(state, optimizer)
    record.loss = torch.stack([x.to(losses[0].device) for x in losses]).sum() if losses else state.loss
    verdict = _verdict(state, optimizer, handle, record, told)
    record.verdict, record.clipped, record.stalled = verdict, told.clipped, None
    result = taking.told(state, optimizer, record, verdict, heal="skip" if told.moved else state.heal)
    if told.moved and not verdict.fit:
        result = replace(result, applied=True, reason="partly", detail="; ".join(filter(None, (result.detail, _kept(told)))))
    taking.spend(state, optimizer, record)
    taking.window_ends(state, bool(told.moved))
    return taking.counted(state, record, result)


def _refuse(closure: Any, max_norm: float | None, stalled: bool) -> None:
    """Raise ConfigError for what needs gradients that are there."""
    if closure is not None:
        raise ConfigError("a closure was given with released gradients, which every evaluation of it would use", "Leave out the release.")
    if max_norm is not None:
        raise ConfigError(f"max_norm={max_norm} was given to a step with released gradients: the backward pass has used them up", MODES)
    if stalled:
        raise ConfigError("stalled=True was given to a step with released gradients: its weights have moved already", "Leave it out.")


def _kept(told: Released) -> str:
    stay = len(told.numbers) - told.moved
    return f"{stay} of {len(told.numbers)} parameters stayed as they were, the others were updated before that was known"


def _verdict(state: StepState, optimizer: Optimizer, handle: Release, record: Record, told: Released) -> Verdict:
    """The verdict on gradients that are gone, and the measurements for the watch."""
    everybody = parameters(optimizer)
    held = [everybody[n] for n in told.numbers]
    norms = told.squares.sqrt().float()
    evidence = Evidence(torch.empty(0), norms, told.scale, told.share is not None, True, told.peaks)
    if told.share is not None:
        evidence = replace(evidence, share=torch.tensor(told.share))
    state.watching.note(state, optimizer, evidence, held)
    peaks = dict(zip(told.numbers, (told.peaks / told.scale).tolist(), strict=True))
    blamed = sorted(told.bad, key=lambda n: (peaks[n] == peaks[n], -peaks[n]))  # NaN first, then the largest
    loss = float(record.loss) if told.held and record.loss is not None else 0.0
    culprits = [Culprit("loss", "forward", loss)] if told.held else []
    names = {n: handle.names.get(id(everybody[n])) or state.called(everybody[n]) for n in blamed}
    culprits += [Culprit(names[n], "backward", peaks[n]) for n in blamed]
    nonfinite = tuple(names[n] for n in blamed if not abs(peaks[n]) < float("inf"))
    peak = float(told.peaks.amax()) if told.share is not None else None
    verdict = Verdict(not culprits, told.grad_norm, not told.held, tuple(culprits[:NAMED]), peak, told.share, nonfinite=nonfinite)
    return verdict.not_the_scale() if state.hopeless and not verdict.fit else verdict
