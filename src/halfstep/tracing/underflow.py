"""Gradients that became 0 in fp16: what a loss scale is for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.tracing.births import again_in_fp32
from halfstep.tracing.findings import Finding, number, range_of
from halfstep.tracing.observe import Event

SHARE = 0.5  # of the elements that are not 0
SMALLEST = 2.0**-24  # the smallest fp16 number


class Underflow:
    """Watches backward ops in fp16: one of whose results more than half are 0, and would not be in fp32, is where gradients get lost.

    scaled: a loss scale is at work in the run, which then is what has to be right, and nothing is said.
    """

    def __init__(self, scaled: bool = False) -> None:
        self.scaled = scaled
        self._found: Finding | None = None

    def begin(self, model: nn.Module) -> None:
        """Forget earlier runs."""
        self._found = None

    def see(self, event: Event) -> None:
        """Look at a backward op, until one is found: those after it lose what is lost already."""
        if self.scaled or not event.backward or self._found is not None or event.error is not None or event.mutable or event.is_view:
            return
        for place, out in enumerate(event.outputs):
            if out.dtype != torch.float16 or out.numel() < 2:
                continue
            zeros = out.numel() - int(out.count_nonzero())
            if zeros <= SHARE * out.numel() / 4:  # cheap, and true of nearly all
                continue
            exact = _exact(event, place, out)
            if exact is None:
                continue
            alive = int(exact.count_nonzero())
            lost = int(((out == 0) & (exact != 0)).sum())
            if alive and lost > SHARE * alive:
                self._found = _finding(event, exact, lost, alive)
                return

    def findings(self) -> list[Finding]:
        """Where it began, nearest to the loss."""
        return [self._found] if self._found is not None else []


def _exact(event: Event, place: int, out: Tensor) -> Tensor | None:
    """What the result would be without rounding to fp16; None when it is not known."""
    if event.base == "_to_copy":
        given = event.inputs[0]
        return given if given.dtype == torch.float32 and given.shape == out.shape else None
    results = again_in_fp32(event)
    return results[place] if results is not None and place < len(results) and results[place].shape == out.shape else None


def _finding(event: Event, exact: Tensor, lost: int, alive: int) -> Finding:
    seen = range_of(exact)
    of = f" of {event.forward_op}" if event.forward_op and event.base != "_to_copy" else ""
    what = (
        f"{lost} of {alive} gradients{of} that are not 0 became 0: they reach from {number(seen.least)} to {number(seen.largest)}, and fp16 begins "
        f"at {number(SMALLEST)}"
    )
    remedy = (
        "scale the loss (halfstep.amp.GradScaler, or the precision fp16-mixed, which does); if a scaler is at work already, give its scale to the "
        "trace: trace(scale=scaler.get_scale())"
    )
    inputs = tuple(range_of(t) for t in event.inputs if t.is_floating_point())
    return Finding("underflow", event.place, what, remedy, inputs, range_of(event.outputs[0]), at=event.index)
