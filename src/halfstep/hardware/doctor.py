"""Capabilities and rates to advice: what `halfstep doctor` prints. Pure functions of the records."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.hardware.capabilities import Capabilities
from halfstep.hardware.probe import probe
from halfstep.hardware.rates import FAMILIES, HALF, Rates, measured_rates


@dataclass(frozen=True)
class Diagnosis:
    """What a device can do and which precision suits it; `str()` is the text for people, `as_dict()` the one for machines."""

    capabilities: Capabilities
    advice: str  # a preset
    reason: str
    rates: Rates | None = None

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        measured = self.rates.as_dict() if self.rates is not None else {}
        return self.capabilities.as_dict() | {"advice": self.advice, "reason": self.reason} | measured

    def __str__(self) -> str:
        c = self.capabilities
        what = {True: "native", False: "emulated"}
        rows = [
            (
                "device",
                f"{c.device}: {c.name}, {c.level}, {c.cores} {'threads' if c.kind == 'cpu' else 'multiprocessors'}, {c.memory_bytes / 2**30:.1f} GiB",
            ),
            *((f, what[f in c.native]) for f in ("fp32", "bf16", "fp16")),
            ("tf32", "native" if c.is_native("tf32") else "not on this device"),
            *(_measured(self.rates, c.cores) if self.rates is not None else ()),
            ("torch.compile", f"needs a C++ compiler: {c.compiler or 'none found (apt-get install g++)'}" if c.kind == "cpu" else "available"),
            ("versions", ", ".join(f"{p} {v}" for p, v in c.versions)),
            ("advice", f"{self.advice}: {self.reason}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _measured(rates: Rates, threads: int) -> list[tuple[str, str]]:
    """Rows of what was measured: operations per second in fp32, and in each other format how many times that, the way that is taken first."""
    rows = []
    for family in [f for f in FAMILIES if any(row.family == f for row in rates.rows)]:
        found = [row for row in rates.rows if row.family == family]
        parts = [f"fp32 {_per_second(found[0].fp32, 'FLOP')}{'' if rates.device.startswith('cuda') else ' a thread'}"]
        for row in (r for r in found if r.format != "fp32"):
            ways = {"emulated": row.emulated / row.fp32, "native": row.native / row.fp32}
            shown = sorted((name for name in ways if ways[name]), key=lambda name: (name == "emulated") != row.emulate)
            parts.append(f"{row.format} {', '.join(f'{ways[name]:.2f} {name}' for name in shown)}")
        rows.append((family, "; ".join(parts)))
    if not rates.device.startswith("cuda"):
        taken = {form: [f for f in FAMILIES if f in rates.emulated(form)] for form in HALF}
        told = {form: "native" if not names else f"{', '.join(names)} emulated" for form, names in taken.items()}
        rows.append(("products", "; ".join(f"{form}: {'all emulated' if len(taken[form]) == len(FAMILIES) else told[form]}" for form in HALF)))
    copies = "on the device" if rates.device.startswith("cuda") else f"by {threads} thread{'s' if threads > 1 else ''}"
    rows.append(("copies", f"{_per_second(rates.bandwidth, 'B')} read and written {copies}"))
    rows.append(("rates", "measured now" if rates.fresh else "measured before and kept"))
    return rows


def _per_second(rate: float, unit: str) -> str:
    return f"{rate / 1e12:.3g} T{unit}/s" if rate >= 1e12 else f"{rate / 1e9:.3g} G{unit}/s"


def diagnose(capabilities: Capabilities, rates: Rates | None = None) -> Diagnosis:
    """The precision that suits a device, by its rates for a transformer, or without them by what it has instructions for."""
    if rates is not None:
        form, why = rates.fastest(("matmul", "attention"))
        memory = "; the *-lean precisions train in half the memory" if form == "fp32" else ""
        images, _ = rates.fastest(("convolution",))
        apart = f"; a net of convolutions: {_mixed(images)}" if images != form else ""
        return Diagnosis(capabilities, _mixed(form), why + memory + apart, rates)
    if capabilities.is_native("bf16"):
        return Diagnosis(capabilities, "bf16-mixed", "bf16 is native here and needs no loss scale")
    if capabilities.is_native("fp16"):
        return Diagnosis(capabilities, "fp16-mixed", "fp16 is native here and bf16 is not")
    return Diagnosis(
        capabilities,
        "fp32",
        "no 16-bit format is native here; bf16-mixed and fp16-mixed run with the right numbers (operands rounded to 16 bits, multiplied in fp32) "
        "but are not faster than fp32",
    )


def _mixed(form: str) -> str:
    return form if form == "fp32" else f"{form}-mixed"


def doctor(device: str | None = None) -> Diagnosis:
    """Look at `device` (default: the one that would be trained on), measure it, and say what it can do.

    A CPU is measured once (0.5 s) and its rates are kept in $XDG_CACHE_HOME/halfstep or ~/.cache/halfstep.
    Raises ConfigError when the device does not exist.
    """
    return diagnose(probe(device), measured_rates(device))
