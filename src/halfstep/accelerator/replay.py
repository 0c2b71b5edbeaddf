"""A whole step run again at a lower loss scale: forward passes too, with the random states and buffers they began with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from halfstep import checkpoint
from halfstep.amp import GradScaler
from halfstep.step import StepResult


def run(
    compute: Callable[[], object],
    step: Callable[[], StepResult],
    clear: Callable[[], None],
    scaler: GradScaler,
    overflow: bool = True,
    sixteen: bool = True,
) -> StepResult:
    """Run `compute` (forward and backward passes, clipping) and `step`; while that overflows, again at a lower scale.

    The scale falls by 2, then 4, 16, 256, until the step is applied or the scale is at its floor. A step that is bad there too is
    not the scale's fault: the scale goes back to where it was. A step whose forward pass overflowed in modules that were pinned for it is run again
    at the same scale. The result's `replays` says how often it was run again, `pinned` names those modules.
    A step replayed at some scale is the step first taken at that scale, bit for bit, if `compute` depends on nothing but weights, buffers,
    random states and its batches. overflow: False leaves an overflow of the gradients refused. sixteen: whether something runs in 16 bits; without
    it and without a scale there is nothing that another run would mend, and random states are not kept.
    """
    if not sixteen and not scaler.is_enabled():
        compute()
        return step()
    begun = checkpoint.capture(brief=True)
    fall, replays, first, before = 2.0, 0, 0.0, math.inf
    pinned: tuple[str, ...] = ()
    while True:
        if replays:
            checkpoint.restore(begun)
        compute()
        scale = scaler.scale_at_hand
        first, lower = first or scale, max(scaler.floor, scale / fall)
        last = not overflow or lower == scale or scale >= before
        with scaler.trying("pin") if last else scaler.trying("overflow", "pin"):
            result = step().settled()  # a verdict on its way counts, and heals, inside this block
        if result.pinned:
            pinned += result.pinned
        elif result or last or result.reason != "overflow":
            break
        else:
            before, fall = scale, fall * fall
        clear()
        scaler.discard_()
        scaler.update(scale if result.pinned else lower)
        replays += 1
    if replays and not result and before < math.inf:
        scaler.update(first)
    return replace(result.settled(), replays=replays, next_scale=scaler.get_scale(), pinned=pinned) if replays else result
