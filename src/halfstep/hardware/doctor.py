"""Capabilities to advice: what `halfstep doctor` prints. Pure functions of the record."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.hardware.capabilities import Capabilities
from halfstep.hardware.probe import probe


@dataclass(frozen=True)
class Diagnosis:
    """What a device can do and which precision suits it; `str()` is the text for people, `as_dict()` the one for machines."""

    capabilities: Capabilities
    advice: str  # a preset
    reason: str

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return self.capabilities.as_dict() | {"advice": self.advice, "reason": self.reason}

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
            ("torch.compile", f"needs a C++ compiler: {c.compiler or 'none found (apt-get install g++)'}" if c.kind == "cpu" else "available"),
            ("versions", ", ".join(f"{p} {v}" for p, v in c.versions)),
            ("advice", f"{self.advice}: {self.reason}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def diagnose(capabilities: Capabilities) -> Diagnosis:
    """The precision that suits a device, by what it has instructions for."""
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


def doctor(device: str | None = None) -> Diagnosis:
    """Look at `device` (default: the one that would be trained on) and say what it can do.

    Raises ConfigError when the device does not exist.
    """
    return diagnose(probe(device))
