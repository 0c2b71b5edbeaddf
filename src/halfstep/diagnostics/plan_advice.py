"""Which precision to take: what the device is good at, then what was measured on this model. Pure functions of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from halfstep.diagnostics.plan_bytes import WALKED
from halfstep.diagnostics.plan_text import bytes_text, ratio, share
from halfstep.diagnostics.planned import Tried
from halfstep.errors import ConfigError
from halfstep.hardware import FAMILIES, Capabilities, Rates, diagnose
from halfstep.policy import parse
from halfstep.policy.choice import SHARE

LEAST = 0.03  # share of time that counts as a difference
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

    Of those that can be used: for "speed" the fastest by measured times, and where these do not tell one in the device's format; one in half the
    memory where it would not fit. For "memory" the one that takes the least.
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
        chosen, why = _in_less(chosen, why, usable, memory_bytes)
    return Decision(chosen, (why, *gains(chosen, fp32)))


def _in_less(chosen: Tried, why: str, usable: Sequence[Tried], memory_bytes: int) -> tuple[Tried, str]:
    """What leaves room for activations where `chosen` does not, in its format if there is one; where nothing does the least, and says so."""
    smaller = [t for t in usable if _takes(t) < _takes(chosen)]
    fits = [t for t in smaller if _takes(t) <= SHARE * memory_bytes]
    some = [t for t in fits or smaller if _form(t) == _form(chosen)] or fits or smaller
    needed, whole = bytes_text(_takes(chosen)), bytes_text(memory_bytes)
    if not some:
        return chosen, f"{why}. Weights, gradients and states take {needed} of {whole}, and nothing that was tried takes less"
    taken = max(some, key=_takes) if fits else min(some, key=_takes)
    least = "" if fits else ", the least of what was tried and still too much"
    return taken, f"weights, gradients and states would take {needed} of {whole}, and this takes {bytes_text(_takes(taken))}{least}"


def _by_speed(usable: Sequence[Tried], advice: Advice, fp32: Tried | None) -> tuple[Tried, str]:
    """The fastest by measured times where these tell, and only else one in the device's format. The reason says which of the two it went by."""
    timed = [t for t in usable if t.seconds]
    base = fp32 if fp32 in timed else timed[0] if timed else None
    best = min(timed, key=lambda t: ratio(t.seconds, base.seconds)) if base is not None else None
    near = [t for t in timed if best is not None and not clearly_faster(best, t)]
    if best is None or len(timed) < 2 or len(near) == len(timed):
        told = "they were not measured" if len(timed) < 2 else "measured times of this model do not tell the precisions apart"
        chosen, other = _by_device(usable, advice, fp32)
        return chosen, f"by the device, since {told}: {other}{advice}"
    chosen, _ = _by_device(near, advice, fp32) if any(_form(t) == advice.format for t in near) else (near[0], "")
    slower = ", ".join(f"{t.precision} {ratio(t.seconds, chosen.seconds):.2f}" for t in timed if t not in near)
    alike = ", ".join(t.precision for t in near if t is not chosen)
    why = f"by measured times: no other is clearly faster on this model; times its time take {slower}"
    return chosen, f"{why}{f'; no clear difference to {alike}' if alike else ''}. By its rates the device's format is {advice}"


def _by_device(some: Sequence[Tried], advice: Advice, fp32: Tried | None) -> tuple[Tried, str]:
    """The first in the device's format; where there is none fp32, or what comes first, with words that say so."""
    suited = [t for t in some if _form(t) == advice.format]
    if suited:
        return suited[0], ""
    native = [t for t in some if advice.format != "fp32" and _form(t) not in ("fp32", *advice.emulated)]
    if native:
        return native[0], f"nothing in {advice.format} can be used, and {_form(native[0])} is native too: "
    return (fp32 if fp32 is not None and fp32 in some else some[0]), f"nothing in {advice.format} can be used: "


def _form(one: Tried) -> str:
    return parse(one.precision).autocast


def _takes(one: Tried) -> int:
    return sum(count for kind, count in one.predicted.items() if kind not in WALKED)


def clearly_faster(one: Tried, other: Tried | None) -> bool:
    """Whether one precision was faster than another by more than rounds differ.

    Compared are the times of the same round. Of four rounds and more the best and the worst are left out; in all others it must be faster, and the
    median by 3 % and by more than half of what lies between them.
    """
    if other is None or len(one.seconds) < 2 or len(one.seconds) != len(other.seconds):
        return False
    low, middle, high = spread(one.seconds, other.seconds)
    return high < 1 and 1 - middle > max(LEAST, (high - low) / 2)


def spread(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Lowest, median and highest of one time over another of the same round; of four rounds and more the best and the worst are left out."""
    found = sorted(a / b for a, b in zip(seconds, base, strict=True))
    kept = found[1:-1] if len(found) >= 4 else found
    return kept[0], median(found), kept[-1]


def gains(one: Tried, fp32: Tried | None) -> tuple[str, ...]:
    """What a precision costs and gains beside fp32, as sentences; no claim where the noise is larger than the difference."""
    if fp32 is None or one is fp32:
        return ()
    said = []
    if one.seconds and fp32.seconds:
        low, times, high = spread(one.seconds, fp32.seconds)
        rounds = f"rounds {low:.2f} to {high:.2f}"
        if clearly_faster(one, fp32) or clearly_faster(fp32, one):
            said.append(f"a forward and a backward pass takes {times:.2f} of fp32's time here ({rounds})")
        else:
            said.append(f"no difference in time to fp32 could be measured here: {times:.2f} of its time, {rounds}")
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
