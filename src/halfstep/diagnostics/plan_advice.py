"""Which precision to take: what the device is good at, then what was measured on this model. Pure functions of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep.diagnostics.plan_bytes import WALKED
from halfstep.diagnostics.plan_text import bytes_text, ratio, share
from halfstep.diagnostics.planned import Tried
from halfstep.errors import ConfigError
from halfstep.hardware import FAMILIES, Capabilities, Rates, diagnose
from halfstep.policy import parse
from halfstep.policy.choice import SHARE

LOSS_WITHIN = 0.02  # of fp32's loss on the same batches
Target = Literal["speed", "memory"]


@dataclass(frozen=True)
class Advice:
    """What suits a device, whatever the model. format: fp32, bf16 or fp16. reason: a sentence. emulated: the 16-bit formats that it only imitates."""

    format: str
    reason: str
    emulated: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.format}: {self.reason}"


def advise(device: Capabilities, rates: Rates | None = None, families: Sequence[str] = FAMILIES) -> Advice:
    """The format that suits a device for these families of products: by its measured rates, or without them by what it has instructions for.

    Emulation is named.
    """
    if rates is not None:
        form, why = rates.fastest(families)
    else:
        said = diagnose(device)
        form, why = parse(said.advice).autocast, said.reason
    return Advice(form, f"{_instructions(device)}; {why}", device.emulated)


def _instructions(device: Capabilities) -> str:
    """What the device multiplies natively, in words."""
    who = f"{device.name} ({'compute capability ' if device.kind == 'cuda' else ''}{device.level})"
    native = [f for f in ("bf16", "fp16") if device.is_native(f)]
    if len(native) == 2:
        return f"{who} has bf16 and fp16 natively"
    since = "which GPUs have from Ampere (8.0) on" if device.kind == "cuda" else "which CPUs have with AVX512-BF16 or AMX"
    if native == ["fp16"]:
        return f"{who} has fp16 natively and only emulates bf16, {since}"
    if native == ["bf16"]:
        return f"{who} has bf16 natively and only emulates fp16"
    return f"{who} has no 16-bit instructions, so bf16 and fp16 are emulated"


@dataclass(frozen=True)
class Decision:
    """The candidate that was taken, and why: the first sentence says what decided."""

    chosen: Tried
    reasons: tuple[str, ...]


def choose(tried: Sequence[Tried], advice: Advice, memory_bytes: int, target: Target = "speed") -> Decision:
    """The precision to train in, of those that were tried.

    Of those that can be used: for "speed" that in the device's format, unless the measured times of this
    model say clearly otherwise; one in half the memory where it would not fit. For "memory" the one that takes the least.
    memory_bytes: of the device. Raises ConfigError when none can be used.
    """
    usable = [t for t in tried if t.usable]
    if not usable:
        causes = "; ".join(f"{t.precision}: {t.problem}" for t in tried)
        raise ConfigError(f"no precision can be used: {causes}", "halfstep.trace(model, batch, precision=...) names the first fault of one.")
    fp32 = next((t for t in tried if t.precision == "fp32"), None)
    if len(usable) == 1:
        return Decision(usable[0], (f"it is the only one that can be used; the device's format is {advice}", *gains(usable[0], fp32)))
    if target == "memory":
        least = min(usable, key=_takes)
        return Decision(least, (f"it takes the least memory, {bytes_text(_takes(least))}", *gains(least, fp32)))
    chosen, why = _by_speed(usable, advice, fp32)
    if _takes(chosen) > SHARE * memory_bytes:
        smaller = [t for t in usable if _takes(t) < _takes(chosen)]
        fits = [t for t in smaller if _takes(t) <= SHARE * memory_bytes] or smaller
        same = [t for t in fits if parse(t.precision).autocast == parse(chosen.precision).autocast] or fits
        if same:
            needed, chosen = _takes(chosen), max(same, key=_takes)
            takes, whole = bytes_text(_takes(chosen)), bytes_text(memory_bytes)
            why = f"weights, gradients and states would take {bytes_text(needed)} of {whole}, and this takes {takes}"
    return Decision(chosen, (why, *gains(chosen, fp32)))


def _by_speed(usable: Sequence[Tried], advice: Advice, fp32: Tried | None) -> tuple[Tried, str]:
    """The candidate in the device's format, unless measured times say clearly otherwise."""
    suited = [t for t in usable if parse(t.precision).autocast == advice.format]
    faster = [t for t in usable if t is not fp32 and clearly_faster(t, fp32)]
    if advice.format != "fp32" and suited:
        first = suited[0]
        if fp32 is not None and fp32.usable and clearly_faster(fp32, first) and not [t for t in suited if t in faster]:
            if faster:
                best = _fastest(faster, fp32)
                return best, f"it was measured the fastest here, {_times(best, fp32)} fp32's time; the device's format is {advice}"
            return fp32, f"{advice.format} was measured slower than fp32 on this model, {_times(first, fp32)} times; the device's format is {advice}"
        return first, f"the device's format is {advice}"
    if faster and fp32 is not None:
        best = _fastest(faster, fp32)
        return best, f"it was measured clearly faster on this model, {_times(best, fp32)} of fp32's time; the device's format is {advice}"
    if fp32 is not None and fp32.usable and advice.format == "fp32":
        return fp32, f"the device's format is {advice}"
    left = [t for t in usable if t is not fp32] or list(usable)
    return left[0], f"nothing in {advice.format} can be used; the device's format is {advice}"


def _fastest(some: Sequence[Tried], fp32: Tried | None) -> Tried:
    return min(some, key=lambda t: ratio(t.seconds, fp32.seconds) if fp32 is not None else 0.0)


def _times(one: Tried, fp32: Tried | None) -> str:
    return f"{ratio(one.seconds, fp32.seconds):.2f}" if fp32 is not None else ""


def _takes(one: Tried) -> int:
    return sum(count for kind, count in one.predicted.items() if kind not in WALKED)


def clearly_faster(one: Tried, other: Tried | None) -> bool:
    """Whether one precision was faster than another in each of the rounds, and its slowest round than the other's fastest."""
    if other is None or not one.seconds or not other.seconds:
        return False
    return max(one.seconds) < min(other.seconds)


def gains(one: Tried, fp32: Tried | None) -> tuple[str, ...]:
    """What a precision costs and gains beside fp32, as sentences; no claim where the noise is larger than the difference."""
    if fp32 is None or one is fp32:
        return ()
    said = []
    if one.seconds and fp32.seconds:
        times = ratio(one.seconds, fp32.seconds)
        noise = max((max(t.seconds) - min(t.seconds)) / min(t.seconds) for t in (one, fp32))
        if clearly_faster(one, fp32) or clearly_faster(fp32, one):
            said.append(f"a forward and a backward pass takes {times:.2f} of fp32's time here")
        else:
            said.append(f"no difference in time to fp32 could be measured here: {times:.2f} of its time, and rounds differ by {share(noise)}")
    ours, theirs = _takes(one), _takes(fp32)
    if ours and theirs:
        said.append(f"weights, gradients and states take {bytes_text(ours)}, in fp32 {bytes_text(theirs)}{_step(one, fp32)}")
    if one.loss_error is not None:
        off = f", the gradients by {share(one.gradient_error)}" if one.gradient_error is not None else ""
        said.append(f"on these batches the loss is off by {share(one.loss_error)} of fp32's{off}")
    return tuple(said)


def _step(one: Tried, fp32: Tried) -> str:
    """What a whole step takes beside fp32's, where it was predicted, and the activations that were counted."""
    said = ""
    if one.predicted.get("peak") and fp32.predicted.get("peak"):
        said += f"; a step at its peak {bytes_text(one.predicted['peak'])}, in fp32 {bytes_text(fp32.predicted['peak'])} (predicted)"
    ours, theirs = one.measured.get("activations", 0), fp32.measured.get("activations", 0)
    return said + (f"; activations {bytes_text(ours)}, in fp32 {bytes_text(theirs)} (measured)" if ours and theirs else "")
