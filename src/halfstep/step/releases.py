"""Optimizers that update inside the backward pass, and the engine whose losses they step on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.optim import RELEASES, Release
from halfstep.step import checks
from halfstep.step.graph import Reached
from halfstep.step.state import StepState
from halfstep.step.verdict import FP16_NORMAL

MODES = "halfstep.optim.release(optimizer, clip='per_parameter' or 'last', max_norm=...) clips on the way."


def handle_for(optimizer: Any) -> Release | None:
    """The handle that releases the gradients of an optimizer, or None."""
    return vars(optimizer).get("halfstep_release") if RELEASES else None


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


def begin(state: StepState) -> None:
    """A backward pass begins: released gradients are used from now on, unless the losses of their step are not finite."""
    fit = state.loss is None or state.loss_spent or bool(torch.isfinite(state.loss).all())
    if state.agree is not None:
        fit = not bool(state.agree(torch.tensor([float(not fit)])))
    smallest = FP16_NORMAL if state.scaling.senses else 0.0
    for handle in handles(state):
        optimizer = handle.optimizer
        if optimizer is not None:
            checks.refuse_settings(optimizer)
            handle.open(state.scale_at_hand, fit, smallest)


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
