"""What an audit found, as a frozen record: its text for people, and plain values for machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.diagnostics.audit_reasons import Reason
from halfstep.diagnostics.audit_why import WHYS, Row
from halfstep.tracing.findings import number

TOP = 12  # rows of a table


@dataclass(frozen=True)
class Audit:
    """Why 16 bits are not faster here, or what they gain.

    precision: what was looked at; baseline: what it is held against ("fp32", "the model as it is"), "" for nothing. step, other: seconds of one
    forward and backward pass by the clock, of both (0 where it was not run). measured: step / other by the median of the rounds, predicted: the step
    over fp32's, from the ops that predicted_from names; 0 where it is not known. Below 1 is faster.
    suggested: where nothing runs in 16 bits, the precision that `predicted` is about.
    outside: share of the step outside of the ops' work. rows: ops that are alike, slowest first; seconds: of their work, which with `outside` makes
    up the step. findings: the reasons, costliest first.
    ops: how many ran in one step. backward: whether there was a backward pass.
    """

    precision: str
    baseline: str
    model: str
    device: str
    step: float
    other: float
    measured: float
    predicted: float
    predicted_from: str
    outside: float
    rows: tuple[Row, ...]
    findings: tuple[Reason, ...]
    ops: int
    backward: bool
    suggested: str = ""
    notes: tuple[str, ...] = ()

    @property
    def product_flops(self) -> dict[str, float]:
        """Shares of the products' operations by the format they ran in."""
        return _shares([(row.format, row.flops) for row in self.rows if row.flops])

    @property
    def answer(self) -> str:
        """The first line."""
        flops = sum(share for name, share in self.product_flops.items() if name.startswith(("bf16", "fp16", "16-bit")))
        if self.suggested:
            said = f"nothing runs in 16 bits here; {self.suggested} would take {self.predicted:.2f} of this step (predicted)"
        elif self.measured:
            than = "fp32's step" if self.baseline == "fp32" else f"the step of {self.baseline}"
            said = f"{self.precision} takes {self.measured:.2f} of {than} here"
            if self.predicted:
                said += f" (predicted {self.predicted:.2f})" if self.baseline == "fp32" else f", {self.predicted:.2f} of what fp32 would (predicted)"
        elif self.predicted:
            said = f"{self.precision} takes {self.predicted:.2f} of what fp32 would (predicted; fp32 was not run)"
        else:
            said = f"{self.precision} takes {_time(self.step)} a step"
        if not self.suggested:
            said += f"; {flops:.0%} of product flops run in 16 bits" if self.product_flops else "; no product whose flops are known ran"
        first = self.findings[0] if self.findings else None
        return f"{said}; the largest loss is {first.cause} ({first.share:.0%} of the step)" if first is not None else said

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "answer": self.answer,
            "precision": self.precision,
            "baseline": self.baseline,
            "model": self.model,
            "device": self.device,
            "step_seconds": self.step,
            "baseline_seconds": self.other or None,
            "measured": self.measured or None,
            "predicted": self.predicted or None,
            "predicted_from": self.predicted_from,
            "suggested": self.suggested,
            "outside": self.outside,
            "backward": self.backward,
            "ops": self.ops,
            "product_flops": self.product_flops,
            "findings": [asdict(f) for f in self.findings],
            "classes": [_class(name, rows, self.step) for name, rows in self._grouped(lambda r: r.cls)],
            "modules": [_class(name, rows, self.step) for name, rows in self._grouped(lambda r: r.where)],
            "rows": [_plain(row, self.step) for row in self.rows],
            "notes": list(self.notes),
        }

    def _grouped(self, key: Callable[[Row], str]) -> list[tuple[str, list[Row]]]:
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[key(row)].append(row)
        return sorted(groups.items(), key=lambda item: -sum(r.seconds for r in item[1]))

    def __str__(self) -> str:
        way = "forward and backward" if self.backward else "forward only (there is no loss)"
        lines = [
            self.answer,
            f"{self.model} on {self.device}: {_time(self.step)} a step, {way}, {self.ops} ops, {self.outside:.0%} of it outside of their work",
        ]
        lines += [f"\n{place}. {finding}" for place, finding in enumerate(self.findings, 1)] or ["\nno reason takes 3 % of the step"]
        lines += ["", *_table("kind of op", self._grouped(lambda r: r.cls), self.step)]
        lines += ["", *_table("module", self._grouped(lambda r: r.where), self.step)]
        wide = [
            (f"{key}: {WHYS[key]}", rows) for key, rows in self._grouped(lambda r: r.why if "fp32" in r.format and r.cls != "casts" else "") if key
        ]
        if wide and self.product_flops and not self.suggested:
            lines += ["", *_table("in fp32, and why", wide, self.step)]
        lines += [f"\n{note}" for note in self.notes]
        return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _shares(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    total = sum(value for _, value in pairs)
    found: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        found[name] += value / total if total else 0.0
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _class(name: str, rows: Sequence[Row], step: float) -> dict[str, Any]:
    seconds = sum(r.seconds for r in rows)
    return {
        "name": name,
        "calls": sum(r.calls for r in rows),
        "seconds": seconds,
        "share": seconds / step if step else 0.0,
        "bytes": sum(r.bytes for r in rows),
        "flops": sum(r.flops for r in rows),
        "formats": _shares([(r.format or "none", r.seconds) for r in rows]),
    }


def _plain(row: Row, step: float) -> dict[str, Any]:
    plain = asdict(row)
    plain["class"] = plain.pop("cls")
    return plain | {"share": row.seconds / step if step else 0.0}


def _table(head: str, groups: Sequence[tuple[str, list[Row]]], step: float) -> list[str]:
    rows = [(head, "share", "calls", "MB", "GFLOP", "formats by time")]
    for name, group in groups[:TOP]:
        one = _class(name, group, step)
        formats = ", ".join(f"{form} {share:.0%}" for form, share in one["formats"].items() if form != "none" and share >= 0.005)
        rows.append((name, f"{one['share']:.1%}", str(one["calls"]), number(one["bytes"] / 1e6), number(one["flops"] / 1e9), formats))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        f"{row[0]:<{widths[0]}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:5], widths[1:], strict=True)) + f"  {row[5]}".rstrip()
        for row in rows
    ]
    if len(groups) > TOP:
        lines.append(f"and {len(groups) - TOP} more, {sum(r.seconds for _, g in groups[TOP:] for r in g) / step if step else 0.0:.1%} of the step")
    return [line.rstrip() for line in lines]
