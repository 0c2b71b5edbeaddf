"""Steps that evaluate a closure (LBFGS, SAM-like optimizers): every evaluation is unscaled and judged like a step of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from halfstep.errors import StepOrderError
from halfstep.optim import keep
from halfstep.step import checks
from halfstep.step.judging import make_unscaled
from halfstep.step.marks import gradients, parameters, unchanged
from halfstep.step.state import StepState
from halfstep.step.verdict import Verdict


class _Refused(Exception):  # noqa: N818  stops the optimizer in the middle of its step; never leaves this module
    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


def step_with_closure(state: StepState, optimizer: Optimizer, closure: Callable[[], Any]) -> Verdict | None:
    """Run `optimizer.step(closure)`; the verdict is that of the last evaluation, or of the first bad one. None when it made no gradients.

    After a bad evaluation weights and optimizer states are put back to what they were before the step. Memory: a copy of both.
    """
    record = state.record(optimizer)
    checks.refuse_settings(optimizer)
    held = gradients(optimizer)
    with state.at_once():
        if held and not record.stepped and not unchanged(record.spent, held):
            verdict = make_unscaled(state, optimizer)  # SAM-like optimizers use what is there before they call the closure
            if verdict is not None and not verdict.fit:
                return verdict
        return _evaluated(state, optimizer, closure)


def _evaluated(state: StepState, optimizer: Optimizer, closure: Callable[[], Any]) -> Verdict | None:
    record, replays = state.record(optimizer), 0
    put_back = [keep(p) for p in parameters(optimizer)]
    kept = [(p, copy.deepcopy(values)) for p, values in optimizer.state.items()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    @torch.enable_grad()
    def judged() -> Any:
        nonlocal replays
        record.forget()
        before = state.losses
        loss = closure()
        if state.scaling.active and state.losses == before:
            raise StepOrderError(
                "the closure made gradients of a loss that was not scaled", "Write scaler.scale(loss).backward() in it (accelerator.backward(loss))."
            )
        if gradients(optimizer):
            verdict = make_unscaled(state, optimizer)
            replays += record.replays
            if verdict is not None and not verdict.fit:
                raise _Refused(verdict)
        return loss

    verdict, whole = None, False
    try:
        state.take_a_step(optimizer.step, judged)
        verdict, whole = record.verdict, True
    except _Refused as refused:
        verdict = refused.verdict
    finally:
        if not whole:  # an error of the closure's own comes through, and changes nothing either
            for undo in put_back:
                undo()
            optimizer.state.clear()
            optimizer.state.update(kept)
            for group, was in zip(optimizer.param_groups, groups, strict=True):
                group.update(was)
    record.replays = replays
    return verdict
