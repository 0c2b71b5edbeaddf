"""Softmax and norms written by hand in 16 bits: torch's own compute in fp32 inside, these round and overflow between their ops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from halfstep.numerics import FORMATS
from halfstep.tracing.findings import HALF, Fault, Finding, number, range_of, short
from halfstep.tracing.observe import Event
from halfstep.tracing.tags import Collected, Tags

_KEEP = ("clone", "expand", "_to_copy", "add", "clamp", "clamp_min", "maximum", "neg")  # + eps, a cast: what it was, it stays
_MASKED = ("mul", "masked_fill", "where")  # of exponentials: still to be summed
_ROOTS = ("sqrt", "rsqrt")


@dataclass(frozen=True)
class _Note:
    """Part of a softmax or a norm. dtype: the 16-bit format its exponentials or squares were in, of values up to `top`.

    narrow: their sum was 16-bit too.
    """

    kind: Literal["exp", "exp sum", "exp inverse", "square", "square sum"]
    dtype: torch.dtype
    top: float
    narrow: bool = False

    @property
    def lossy(self) -> bool:
        """Whether it matters: fp16 ends at 65504, and bf16 loses digits that a sum in fp32 would keep."""
        return self.dtype == torch.float16 or self.narrow


class Handwritten:
    """Follows exponentials to their sum and the quotient (or logarithm) of both, and squares to their mean and its root.

    Reported once for each line, when exponentials or squares were fp16, or bf16 and so were their sums. Where they are fp32 (under halfstep's
    autocast exp, pow and sum are, and x * x is not) nothing is said.
    """

    def __init__(self) -> None:
        self._notes: Tags[_Note] = Tags()
        self._found = Collected()

    def begin(self, model: nn.Module) -> None:
        """Nothing can be seen before the run."""

    def see(self, event: Event) -> None:
        """Look at one op."""
        given = event.inputs
        notes = [self._notes.get(t) for t in given]  # before they are dropped from what the op writes to
        self._notes.follow(event)
        if event.backward or not event.outputs or not given or not event.outputs[0].is_floating_point():
            return
        made = event.outputs[0]
        base = event.base.rstrip("_")
        note = self._begun(event, base, given[0]) if given[0].dtype in HALF else None
        if note is None and any(n is not None for n in notes):
            note = self._gone_on(event, base, given, notes, made)
        if note is not None:
            self._notes.put(made, note)

    def findings(self) -> list[Finding]:
        """One finding for each line; how many modules share it is said."""
        return self._found.findings()

    def _begun(self, event: Event, base: str, x: Tensor) -> _Note | None:
        """The first step of a softmax or a norm, of 16-bit values."""
        if base in ("exp", "exp2"):
            return _Note("exp", x.dtype, _top(event.outputs[0].log() if event.mutable else x))
        if _squares(base, event):
            return _Note("square", x.dtype, _top(event.outputs[0].sqrt() if event.mutable else x.abs()))
        if base in ("var", "var_mean"):
            return _Note("square sum", x.dtype, _top(x.abs()), narrow=True)
        return None

    def _gone_on(self, event: Event, base: str, given: tuple[Tensor, ...], notes: list[_Note | None], made: Tensor) -> _Note | None:
        """What an op has made of a part, reported when it is the last step."""
        first, second = notes[0], notes[1] if len(notes) > 1 else None
        kinds = {n.kind: n for n in notes if n is not None}
        if base in ("sum", "mean") and first is not None and first.kind in ("exp", "square") and made.numel() < given[0].numel():
            return replace(first, kind="exp sum" if first.kind == "exp" else "square sum", narrow=made.dtype in HALF)
        if base == "div" and first is not None and second is not None and (first.kind, second.kind) == ("exp", "exp sum"):
            self._report(event, "softmax", second, "softmax is written by hand", "torch.softmax")
        elif base == "reciprocal" and first is not None and first.kind == "exp sum":
            return replace(first, kind="exp inverse")
        elif base == "mul" and {"exp", "exp inverse"} <= set(kinds):
            self._report(event, "softmax", kinds["exp inverse"], "softmax is written by hand", "torch.softmax")
        elif base == "log" and first is not None and first.kind == "exp sum":
            self._report(event, "softmax", first, "log-sum-exp is written by hand", "torch.logsumexp (or log_softmax)")
        elif first is not None and first.kind == "square sum" and (base in _ROOTS or (base == "pow" and _exponent(event) in (0.5, -0.5))):
            self._report(event, "norm", first, "a norm is written by hand", "F.rms_norm, F.layer_norm or torch.linalg.vector_norm")
        elif base in _KEEP or (base in _MASKED and "exp" in kinds):
            return first or next((n for n in notes if n is not None), None)
        elif base in ("mul", "div") and len(given) == 1 and first is not None and first.kind in ("exp sum", "exp inverse", "square sum"):
            return first  # times or over a number: that of the elements
        return None

    def _report(self, event: Event, fault: Fault, note: _Note, how: str, instead: str) -> None:
        if not note.lossy:
            return
        form = FORMATS[short(note.dtype)]
        what = f"{how} in {form.name}: "
        if note.dtype != torch.float16:
            what += f"each step rounds to {form.mantissa_bits + 1} bits"
        elif fault == "softmax":
            what += f"e^x is beyond its limit of {number(form.largest)} from 11.1 on, and the largest x here is {number(note.top)}"
        else:
            what += f"squares are beyond its limit of {number(form.largest)} from 256 on, and the largest value here is {number(note.top)}"
        remedy = f"Use {instead}, which computes in fp32 inside, or cast up first: x.float()."
        ranges = tuple(range_of(t) for t in event.inputs[:2])
        self._found.add(Finding(fault, event.place, what, remedy, ranges, range_of(event.outputs[0]), at=event.index))


def _top(x: Tensor) -> float:
    return float(x.amax()) if x.numel() and not x.is_meta else 0.0


def _squares(base: str, event: Event) -> bool:
    """Whether an op squares its first input."""
    if base == "pow":
        return _exponent(event) == 2
    if base == "square":
        return True
    given = event.inputs
    return base == "mul" and len(given) == 2 and (given[0] is given[1] or _same(given[0], given[1]))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same elements."""
    if a.is_meta or not (a.layout == b.layout == torch.strided):
        return False
    return a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


def _exponent(event: Event) -> float | None:
    value = event.args[1] if len(event.args) > 1 else event.kwargs.get("exponent")
    return float(value) if isinstance(value, int | float) else None
