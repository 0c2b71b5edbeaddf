"""What a trace found: each fault with its place, the numbers that show it, and what to do, as frozen values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from halfstep.numerics import stored

Fault = Literal[
    "data",
    "weights",
    "overflow",
    "nonfinite",
    "mismatch",
    "mask",
    "eps",
    "clamp",
    "stale",
    "underflow",
    "masters",
    "table",
    "softmax",
    "norm",
    "near",
    "shape",
]
SEVERITY: tuple[Fault, ...] = get_args(Fault)  # the order in which findings are reported: a cause before its consequences
HALF = (torch.float16, torch.bfloat16)
SHORT = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8 (e5m2)",
}
CLOSEST = 8  # modules named in `Trace.closest`


def short(dtype: torch.dtype) -> str:
    """The field's name of a format: fp16, bf16, fp32; torch's own for any other (int64)."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def number(value: float) -> str:
    """A number as a person reads it: 41000, 1.06e+05, 0.002."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    return f"{value:.3g}"


@dataclass(frozen=True)
class Range:
    """The values of one tensor: smallest non-zero and largest finite magnitude (0 when there is none), and how many elements are not finite."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    least: float
    largest: float
    nan: int = 0
    inf: int = 0

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return not (self.nan or self.inf)

    def __str__(self) -> str:
        shape = f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''})"
        text = f"{short(self.dtype)} {shape} {number(self.least)}..{number(self.largest)}"
        return text + "".join(f", {count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "inf")) if count)


@torch.no_grad()
def range_of(t: Tensor) -> Range:
    """Measure a tensor of any dtype and device. Temporary memory: two bytes per element and an fp32 copy of a 16-bit tensor."""
    if t.is_meta or not t.numel():
        return Range(t.dtype, tuple(t.shape), 0.0, 0.0)
    values = stored(t.detach())
    values = (values.float() if values.dtype in HALF or values.itemsize == 1 else values).abs()
    if not values.is_floating_point():
        values = values.double()
    finite = values.isfinite()
    nan = int(values.isnan().sum())
    known = values[finite]
    least = known[known > 0]
    return Range(
        t.dtype,
        tuple(t.shape),
        float(least.amin()) if least.numel() else 0.0,
        float(known.amax()) if known.numel() else 0.0,
        nan,
        int((~finite).sum()) - nan,
    )


@dataclass(frozen=True)
class Place:
    """Where an op ran.

    module: path as in named_modules(), "" for the model itself and for what is outside of any module. kind: type of the module, "" outside.
    op: "linear", "mm", "softmax". source: "model.py:42", the first line outside of torch and halfstep (for a backward op, that of its
    forward op), "" when unknown.
    """

    module: str = ""
    kind: str = ""
    op: str = ""
    direction: Literal["forward", "backward"] = "forward"
    source: str = ""

    @property
    def named(self) -> str:
        """The module as words: "blocks.1.wo (Linear)", "the model (GPT)", "" outside of any module."""
        if self.module:
            return f"{self.module} ({self.kind})" if self.kind else self.module
        return f"the model ({self.kind})" if self.kind else ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.named or "code outside of the model", self.direction, self.source) if part)


@dataclass(frozen=True)
class Finding:
    """One fault. what: a sentence with numbers. remedy: a sentence. fixed: halfstep has dealt with it already.

    inputs, output: ranges of the tensors of the op. step: the optimizer step, when it was given. at: the index of the op, by which findings of
    one severity are ordered; -1 for what was there before the run.
    """

    fault: Fault
    place: Place
    what: str
    remedy: str
    inputs: tuple[Range, ...] = ()
    output: Range | None = None
    step: int | None = None
    fixed: bool = False
    at: int = field(default=-1, compare=False)

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step is not None else ""
        lines = [f"{self.fault} in {self.place}{step}: {self.what}{' (fixed)' if self.fixed else ''}"]
        if self.inputs:
            lines.append(f"  inputs: {'; '.join(map(str, self.inputs))}")
        if self.output is not None:
            lines.append(f"  output: {self.output}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Most severe first, then earliest; what is fixed already comes last. Equal findings once."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: (f.fixed, SEVERITY.index(f.fault), f.at)))


@dataclass(frozen=True)
class Trace:
    """What one traced run showed.

    findings: most severe, then earliest first. loss: the value, None when nothing gave one. closest: modules whose products came closest to the limit
    of their format, as (name, largest / limit, inf when it was passed), worst first, at most 8. error: what the traced code raised, "" for nothing.
    ops: how many ops ran.
    """

    findings: tuple[Finding, ...] = ()
    loss: float | None = None
    closest: tuple[tuple[str, float], ...] = ()
    error: str = ""
    ops: int = 0

    @property
    def first(self) -> Finding | None:
        """The finding to look at first, or None."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        if self.findings:
            lines = [str(finding) for finding in self.findings]
        else:
            loss = f"loss {number(self.loss)}, " if self.loss is not None else ""
            lines = [f"nothing found: {loss}all of {self.ops} ops finite" if self.ops else "nothing found"]
        if self.closest:
            close = ", ".join(f"{name} {f'{share:.1%}' if share <= 1 else 'beyond it'}" for name, share in self.closest[:3])
            near = f"closest to the limit of its format: {close}"
            lines[-1:] = [lines[-1], near] if self.findings else [f"{lines[-1]}; {near}"]
        if self.error:
            lines.append(f"the traced code raised: {self.error}")
        return "\n".join(lines)
