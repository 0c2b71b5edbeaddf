"""Optimizers that update inside the backward pass: when they may, and what their steps have come to. Imported when there is one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import RELEASES, Release, Released, handle_of
from halfstep.step import checks, taking
from halfstep.step.graph import Reached, walk
from halfstep.step.marks import parameters
from halfstep.step.record import Record
from halfstep.step.result import Culprit, StepResult
from halfstep.step.state import StepState
from halfstep.step.verdict import FP16_NORMAL, NAMED, Evidence, Verdict

MODES = "halfstep.optim.release(optimizer, clip='per_parameter' or 'last', max_norm=...) clips on the way."


def handles(state: StepState) -> list[Release]:
    """Those that step on gradients of this engine's losses."""
    return [h for r in state.releases if (h := r()) is not None and h in RELEASES]


def find(state: StepState, reached: Reached) -> None:
    """Before a backward pass: be the source of all released gradients that the loss may reach. Raises ConfigError where that cannot work."""
    state.releases = [ref(h) for h in handles(state)]
    ids: set[int] | None = None
    for handle in [h for h in RELEASES if h.source is None or h.source() is not state]:
        ids = {id(p) for p in (*reached.leaves, *state.owned())} if ids is None else ids
        if handle.reaches(ids):
            bind(state, handle)
            state.record(handle.optimizer)  # before it steps: what a first meeting changes must not come in the middle of a step


def bind(state: StepState, handle: Release) -> None:
    """From now on `handle` steps on the gradients of this engine's losses."""
    if state.on_overflow == "replay" and state.scaling.active:
        raise ConfigError(
            "on_overflow='replay' runs a step again, and one whose gradients are released is half applied by then",
            "Use on_overflow='skip', or leave out the release.",
        )
    handle.source = ref(state)
    if all(r() is not handle for r in state.releases):
        state.releases.append(ref(handle))


def expect(state: StepState, loss: Tensor, seen: Tensor | None, begins: object) -> None:
    """A loss was scaled, `seen` is its value. If that is not finite, nothing that it reaches is updated by a loss that comes before it.

    begins: lives as long as its graph, so that a loss whose backward pass is left out holds nothing.
    """
    if seen is not None and handles(state) and not torch.isfinite(seen):
        state.unfit.append((ref(begins), seen, {id(p) for p in walk(loss).leaves}))


def begin(state: StepState, seen: Tensor | None, first: bool) -> None:
    """A backward pass comes through a loss: gradients are used from now on, save those of parameters that a loss reaches which is not finite.

    A hook on the loss runs before anything below it: what this loss reaches has not been updated by this pass. first: of the losses of this pass.
    Where ranks train together, what a loss reaches that is not finite on one of them is left alone on all.
    """
    fit, known = seen is None or bool(torch.isfinite(seen)), handles(state)
    unfit = [u for u in state.unfit if u[0]() is not None]
    state.unfit = [u for u in unfit if u[1] is not seen]
    smallest = FP16_NORMAL if state.scaling.senses else 0.0
    for handle in known:
        optimizer = handle.optimizer
        if optimizer is not None:
            if first:
                handle.shut()  # an earlier pass may have ended with an error
                checks.refuse_settings(optimizer)
            handle.open(state.scale_at_hand, fit and not any(handle.reaches(ids) for _, _, ids in state.unfit), smallest)
    if first and not all(handle.hold for handle in known):
        _hold_together(state, known, [any(handle.reaches(ids) for _, _, ids in unfit) for handle in known])


def _hold_together(state: StepState, known: list[Release], holds: list[bool]) -> None:
    """Nothing more is updated by the handles that are to be held, or are held already, on some rank. One small message for all of them."""
    if state.agree is None:
        return
    agreed = state.agree(torch.tensor([float(hold or handle.held) for hold, handle in zip(holds, known, strict=True)]))
    for hold, handle in zip(agreed.tolist(), known, strict=True):
        if hold:
            handle.hold_back()


class UsedInside:
    """Which gradients the backward pass of a loss uses up, for whoever makes them the mean over ranks (`halfstep.distributed.Users`)."""

    def __init__(self, loss: Tensor) -> None:
        reached = walk(loss)
        self._reached = None if reached.partial else {id(p) for p in reached.leaves}

    def reaches(self, p: Tensor) -> bool:
        """Whether the backward pass may give `p` a gradient."""
        return self._reached is None or id(p) in self._reached

    def takes(self, p: Tensor) -> bool:
        """Whether the gradient of `p` is released."""
        return handle_of(p) is not None

    def use(self, p: Tensor) -> None:
        """Update `p` and free its gradient."""
        handle = handle_of(p)
        if handle is not None:
            handle.whole(p)


def ended(state: StepState, loss: Tensor | None) -> None:
    """A backward pass has ended; `loss` is what came through it."""
    for handle in handles(state):
        handle.shut()
        if handle.touched and loss is not None:
            handle.losses.append(loss)
            handle.touched = False


def rescale(state: StepState, factor: float) -> None:
    """Losses noted for the steps at hand are multiplied by `factor`."""
    for handle in handles(state):
        handle.losses = [loss * factor for loss in handle.losses]


def refuse_edits(state: StepState, ids: Iterable[int], what: str) -> None:
    """Raise ConfigError for unscaling or clipping gradients that are released. ids: of their parameters."""
    if any(handle.reaches(set(ids)) for handle in handles(state)):
        raise ConfigError(f"{what} was asked for gradients that are released: the backward pass has used them up", MODES)


def take(state: StepState, optimizer: Optimizer, handle: Release, closure: Any, max_norm: float | None, stalled: bool) -> StepResult:
    """Close the books of a step."""
    record = state.record(optimizer)
    _refuse(closure, max_norm, stalled)
    if state.scaling.active and record.awaits_update:
        raise StepOrderError("step() was called twice on one optimizer without update() between", "Call update() once per iteration, after step().")
    bind(state, handle)
    losses = handle.losses
    state.unfit.clear()
    state.join_ranks(lambda: parameters(optimizer))
    _hold_together(state, [handle], [False])
    told = state.take_a_step(handle.close, state.scale_at_hand)
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
    elsewhere = state.agree is not None and record.loss is not None and math.isfinite(loss)
    culprits = [Culprit("another rank", "backward", math.nan) if elsewhere else Culprit("loss", "forward", loss)] if told.held else []
    names = {n: handle.names.get(id(everybody[n])) or state.called(everybody[n]) for n in blamed}
    culprits += [Culprit(names[n], "backward", peaks[n]) for n in blamed]
    nonfinite = tuple(names[n] for n in blamed if not abs(peaks[n]) < float("inf"))
    peak = float(told.peaks.amax()) if told.share is not None else None
    verdict = Verdict(not culprits, told.grad_norm, not told.held, tuple(culprits[:NAMED]), peak, told.share, nonfinite=nonfinite)
    return verdict.not_the_scale() if state.hopeless and not verdict.fit else verdict
