"""Finding a loss scale inside the first backward pass, so that no step is lost to finding it.

Loss scaling does not touch the forward pass: the same graph can be differentiated under several scales. A probe is one such
backward pass whose gradients are looked at and thrown away. The scale chosen is HEAD_ROOM below one that went through:
activation gradients overflow before parameter gradients do, and only a probe sees them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.step.scaling import HEAD_ROOM, UNDERFLOW, FollowingScaling
from halfstep.step.verdict import FP16_NORMAL, LARGEST_GRADIENT, Agree


@dataclass(frozen=True)
class Probe:
    """What a backward pass under `scale` gave: whether all gradients were fit, the largest (scaled), the share that is subnormal HEAD_ROOM lower."""

    scale: float
    fit: bool
    peak: float
    share: float


Prober = Callable[[float], Probe]


class CannotProbe(RuntimeError):  # noqa: N818  never leaves the engine
    """This graph cannot be differentiated twice; the text says why and what helps."""


def prober(loss: Tensor, leaves: Sequence[Tensor], agree: Agree | None, backward: Callable[[Tensor], Sequence[Tensor]] | None = None) -> Prober:
    """A function that probes the graph of `loss` under a scale. `backward` replaces torch.autograd.grad where that is refused."""
    device = loss.device

    def probe(scale: float) -> Probe:
        with _undisturbed(device):
            wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
            scaled = (wide * scale).sum()  # several losses: most likely their reduction is no more than their sum
            grads = backward(scaled) if backward is not None else _gradients(scaled, leaves)
            values = [numerics.stored(g) for g in grads]
            peak, share = numerics.largest(values, device), numerics.subnormal_share(values, FP16_NORMAL * HEAD_ROOM, device)
            found = torch.stack((~(peak <= LARGEST_GRADIENT * scale) | ~torch.isfinite(peak), torch.nan_to_num(peak), share))
            bad, largest, small = (agree(found) if agree is not None else found).tolist()
        return Probe(scale, not bad, largest, small)

    return probe


def _gradients(scaled: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    try:
        found = torch.autograd.grad(scaled, leaves, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CannotProbe(str(error)) from error
    return [g for g in found if g is not None]


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Random states are put back, and an overflow in a probe is no anomaly."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
        yield


Found = Literal["found", "silent", "hopeless"]


def calibrate(scaling: FollowingScaling, probe: Prober) -> Found:
    """Set `scaling` from probes. Nothing is changed when the gradients are all zero ("silent") or bad at every scale ("hopeless").

    One probe when the starting scale has its head room (two when gradients are subnormal there), at most eight otherwise.
    """
    low, high = math.log2(scaling.floor), math.log2(scaling.ceiling)
    start = math.log2(scaling.scale)
    found = probe(2.0**start * HEAD_ROOM)
    if found.fit and not found.peak:
        return "silent"
    if found.fit:
        return _settle(scaling, _raised(found, start, high, probe))
    lowest = probe(2.0**low * HEAD_ROOM)
    if not lowest.fit:
        return _without_room(scaling, probe)
    best, bad = lowest, start
    while math.log2(best.scale / HEAD_ROOM) + 1 < bad:
        middle = math.floor((math.log2(best.scale / HEAD_ROOM) + bad) / 2)
        tried = probe(2.0**middle * HEAD_ROOM)
        best, bad = (tried, bad) if tried.fit else (best, middle)
    return _settle(scaling, best)


def _raised(found: Probe, start: float, high: float, probe: Prober) -> Probe:
    """A higher scale than the one asked for while more than UNDERFLOW of the gradients are subnormal and there is room."""
    exponent = start
    while found.share > UNDERFLOW and exponent < high:
        exponent = min(high, exponent + 4)
        tried = probe(2.0**exponent * HEAD_ROOM)
        if not tried.fit:
            break
        found = tried
    return found


def _without_room(scaling: FollowingScaling, probe: Prober) -> Found:
    """The largest scale in [floor, HEAD_ROOM * floor) that goes through, when none does with head room."""
    for factor in (8.0, 4.0, 2.0, 1.0):
        found = probe(scaling.floor * factor)
        if found.fit:
            scaling.calibrate(scaling.floor, max(found.peak, 1.0))
            return "found"
    return "hopeless"


def _settle(scaling: FollowingScaling, found: Probe) -> Found:
    if not found.peak:
        return "silent"
    scaling.calibrate(found.scale / HEAD_ROOM, found.peak)
    return "found"
