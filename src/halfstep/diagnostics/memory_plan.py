"""What a training step takes: bytes by kind, the peak, and what would make it less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KINDS = ("weights", "residuals", "gradients", "states", "buffers", "casts", "activations", "temporary")
MEANT = {
    "weights": "the parameters",
    "residuals": "what lies beside 16-bit weights",
    "gradients": "at the end of the backward pass",
    "states": "of the optimizer",
    "buffers": "of the model, and copies for steps that are refused",
    "casts": "16-bit copies of weights that the backward pass needs",
    "activations": "what the forward pass keeps for the backward pass",
    "temporary": "all else at the peak: gradients of activations, room to work in",
}
Phase = Literal["forward pass", "backward pass", "optimizer's step", ""]
LARGEST = 5  # modules that are told


@dataclass(frozen=True)
class Saving:
    """A setting that would lower the peak, and the peak with it, in bytes."""

    setting: str
    peak: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a training step takes, by kind: each at its largest, `temporary` at the peak. The batch itself is not counted.

    weights, residuals, states, buffers: there all the time. gradients: at the end of the backward pass (with gradient release: those that last).
    casts, activations: at the end of the last forward pass. temporary: what is none of these when the peak is reached.
    peak: the most that is there at once. at_peak: what is there then, by kind; the sum is `peak`. phase: in which part of the step; "" where
    that is not known.
    modules: the modules that keep most for the backward pass, with their bytes. savings: other settings and the peak with each.
    measured: counted in a real step, and not predicted from shapes. about: model, precision, optimizer and batch, for people.
    """

    weights: int
    residuals: int
    gradients: int
    states: int
    buffers: int
    casts: int
    activations: int
    temporary: int
    peak: int
    at_peak: Mapping[str, int]
    phase: Phase
    modules: tuple[tuple[str, int], ...] = ()
    savings: tuple[Saving, ...] = ()
    measured: bool = False
    about: str = ""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, int]:
        """Bytes by kind, and the peak, as plain numbers: what stands in memory.json."""
        return {kind: int(getattr(self, kind)) for kind in KINDS} | {"peak": self.peak}

    def __str__(self) -> str:
        unit, size = _unit(self.peak)
        parts = sorted(((k, n) for k, n in self.at_peak.items() if n / size >= 0.005), key=lambda pair: -pair[1])
        shares = ", ".join(f"{kind} {n / size:.2f}" for kind, n in parts)
        verb = "took" if self.measured else "takes"
        phase = f", in the {self.phase}" if self.phase else ""
        lines = [f"a step {verb} {self.peak / size:.2f} {unit} at its peak{phase}: {shares}", self.about, ""]
        lines.append(f"{'kind':<12} {unit:>10} {'at the peak':>12}")
        for kind in KINDS:
            mine, then = getattr(self, kind), self.at_peak.get(kind, 0)
            if mine or then:
                lines.append(f"{kind:<12} {mine / size:>10.2f} {then / size:>12.2f}  {MEANT[kind]}")
        if self.modules:
            lines += ["", "most kept for the backward pass:"]
            lines += [f"  {name or 'the model itself'}  {n / size:.2f} {unit} ({n / max(self.activations, 1):.0%})" for name, n in self.modules]
        if self.savings:
            lines += ["", "what would lower it:"]
            lines += [f"  {s.setting}  {s.peak / size:.2f} {unit} at the peak, {(self.peak - s.peak) / size:.2f} less" for s in self.savings]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _unit(count: int) -> tuple[str, int]:
    """The unit that a number of bytes is told in."""
    for name, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return name, 1 << power
    return "KiB", 1 << 10
