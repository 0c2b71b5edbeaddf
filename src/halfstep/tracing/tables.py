"""Integers, positions and tables that go through 16 bits: bf16 counts exactly to 256 and fp16 to 2048, and beyond that neighbours become one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from halfstep.numerics import COUNTS, FORMATS, different, table_loss
from halfstep.tracing.findings import HALF, Finding, Place, number, range_of, short
from halfstep.tracing.observe import Event
from halfstep.tracing.tags import Collected

_LOADED = "Keep it in fp32: build it after the cast, or exclude it from the cast (halfstep's own *-true precisions keep such buffers in fp32)."
_ANGLE = 0.25  # radians between neighbouring arguments from which on sines mean nothing
_MIXED = ("add", "sub", "rsub", "mul", "div")  # ops that cast an integer operand themselves


class Tables:
    """Positions, timesteps, ids and tables in 16 bits.

    Before a run: buffers and frozen parameters that hold a table (frequencies, positions, schedules, sines) in 16 bits, or in fp32 with values that
    were rounded to 16 bits earlier. In a run: integers cast to 16 bits that change, also as operands of arithmetic and in fp32; ranges and running
    counts made in 16 bits; indices read out of 16 bits; sines of arguments so large that their neighbours lie a quarter of a radian apart.
    """

    def __init__(self) -> None:
        self._found = Collected()

    def begin(self, model: nn.Module) -> None:
        """Look at every buffer and frozen parameter. Cost: a pass over the 16-bit ones."""
        for name, part in model.named_modules():
            told: list[Tensor] = []
            for own, t in _fixed(part):
                fault = table_fault(own, t)
                if fault and not any(t.shape == other.shape and torch.equal(t, other) for other in told):  # a second copy of it
                    told.append(t)
                    place = Place(name, type(part).__name__, own)
                    self._found.add(Finding("table", place, fault, _LOADED, output=range_of(t)), name, own)

    def see(self, event: Event) -> None:
        """Look at one op."""
        if event.backward or not event.outputs or event.outputs[0].is_meta:
            return
        base, made = event.base.rstrip("_"), event.outputs[0]
        if base == "_to_copy":
            self._cast(event, made)
        if made.dtype not in HALF:
            return
        if base in ("arange", "linspace"):
            self._ranged(event, made)
        elif base == "cumsum":
            self._counted(event, made)
        elif base in ("sin", "cos") and event.inputs[0].dtype in HALF and not event.mutable:
            self._sine(event, event.inputs[0])
        elif base in _MIXED:
            for t in event.inputs:
                if t.dim() and _is_integer(t):
                    self._narrowed(event, t, made.dtype, "meet a tensor in")

    def modules(self) -> list[tuple[Finding, tuple[str, ...]]]:
        """The same, each with all modules that have it."""
        return self._found.modules()

    def findings(self) -> list[Finding]:
        """One finding for each line (for each buffer); how many modules share it is said."""
        return self._found.findings()

    def _report(self, event: Event, what: str, remedy: str) -> None:
        place = event.place
        finding = Finding("table", place, what, remedy, tuple(range_of(t) for t in event.inputs[:2]), range_of(event.outputs[0]), at=event.index)
        self._found.add(finding, place.source or place.module, place.op)

    def _cast(self, event: Event, made: Tensor) -> None:
        given = event.inputs[0]
        if made.dtype in HALF and given.dim():
            if _is_integer(given):
                self._narrowed(event, given, made.dtype, "are cast to")
            elif given.dtype in (torch.float32, torch.float64):
                self._narrowed(event, given, made.dtype, "(as floats) are cast to", collide=True)
        elif given.dtype in HALF and _is_integer(made) and made.numel():
            top = float(given.abs().amax())
            if COUNTS[given.dtype] < top < math.inf:
                what = f"integers up to {number(top)} are read out of {short(given.dtype)}, which counts exactly only to {COUNTS[given.dtype]}"
                self._report(event, what, "Keep ids and indices in an integer tensor all the way.")

    def _narrowed(self, event: Event, given: Tensor, dtype: torch.dtype, how: str, collide: bool = False) -> None:
        """Integers that `dtype` changes. collide: only those of which several become one (floats that happen to be whole numbers)."""
        if given.numel() < 2 or float(given.abs().amax() if given.dtype != torch.uint8 else given.amax()) <= COUNTS[dtype]:
            return
        if collide and not bool((given == given.round()).all()):
            return
        values = torch.unique(given)
        after = values.to(dtype)
        changed, left = int((after.to(torch.float64) != values.to(torch.float64)).sum()), different(after)
        if not changed or (collide and (left == values.numel() or not bool(values.isfinite().all()))):
            return
        lost = f"{values.numel()} different values become {left}" if left < values.numel() else f"{changed} of {values.numel()} values change"
        what = f"integers up to {number(float(values.abs().amax()))} {how} {short(dtype)}, which counts exactly only to {COUNTS[dtype]}: {lost}"
        self._report(event, what, "Keep positions, timesteps and ids in integers or fp32, and cast what is computed of them.")

    def _ranged(self, event: Event, made: Tensor) -> None:
        left = different(made)
        if left < made.numel():
            what = f"a range of {made.numel()} numbers is made in {short(made.dtype)} and has only {left} different ones"
            self._report(event, what, "Make the range in integers or fp32, and cast what is computed of it.")

    def _counted(self, event: Event, made: Tensor) -> None:
        given = event.inputs[0]
        if given.numel() < 2 or not bool(((given == 0) | (given == 1)).all()):
            return
        along = event.args[1] if len(event.args) > 1 else event.kwargs.get("dim", -1)
        top = float(given.to(torch.float64).cumsum(along).amax())
        if top > COUNTS[made.dtype]:
            what = f"ones are counted in {short(made.dtype)}, which counts exactly only to {COUNTS[made.dtype]}, up to {number(top)}"
            self._report(event, what, "Count in integers: mask.long().cumsum(...).")

    def _sine(self, event: Event, given: Tensor) -> None:
        form = FORMATS[short(given.dtype)]
        top = float(given.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if given.numel() else 0.0
        step = 2.0 ** math.floor(math.log2(top)) * form.epsilon if top > 0 else 0.0
        if step >= _ANGLE:
            what = f"{event.place.op} of arguments up to {number(top)} in {form.name}, where neighbouring numbers are {number(step)} apart"
            self._report(event, what, "Compute angles and their sines in fp32 (positions times frequencies, outside autocast), and cast the sines.")


def table_fault(name: str, t: Tensor) -> str:
    """What is wrong with a fixed tensor `t` whose own name is `name`, in words; "" when it is no table, or has lost nothing that shows."""
    lost = table_loss(name, t)
    if lost is None:
        return ""
    if lost.kind == "frequencies":
        off = f"times a position of 1000 they are off by up to {number(lost.off)} radians"
        return f"{name}, a table of {lost.size} frequencies, is held in {lost.form}: {off}"
    if lost.kind == "rounded":
        return f"{name}, a table of {lost.size} frequencies, is fp32 and was rounded to {lost.form} before: the digits are lost"
    if lost.kind == "steps":
        return f"{name}, a table of {lost.size} steps, is held in {lost.form} and has only {lost.size - lost.same} different ones"
    return f"{name}, a table of {lost.size} rows, is held in {lost.form}, and {lost.same} rows equal the one before"


def _fixed(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating buffers, frozen parameters and plain tensors of a module, by their own names."""
    for own, t in (*part._buffers.items(), *part._parameters.items(), *part.__dict__.items()):
        if isinstance(t, Tensor) and t.is_floating_point() and not (t.requires_grad or torch.nn.parameter.is_lazy(t)):
            yield own, t


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
