"""Are these gradients fit to be used? Measured in one pass and read in one transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.step.result import Culprit

LARGEST_GRADIENT = 2.0**60  # a finite 1e21 makes AdamW's second moment inf, and the weight then never moves again
NAMED = 8  # culprits named; one bad batch often makes every gradient bad


@dataclass(frozen=True)
class Verdict:
    """Fit or not, the norm of the unscaled gradients, whether the loss was finite, and what was to blame."""

    fit: bool
    norm: float
    loss_finite: bool = True
    culprits: tuple[Culprit, ...] = ()


def judge(gradients: Sequence[Tensor], scale: float, loss: Tensor | None, name: Callable[[int], str]) -> Verdict:
    """Measure `gradients` (made under loss scale `scale`) and the `loss` (unscaled, or None).

    One pass over the gradients and one read from the device when they are good. When the norm says that something is
    wrong, a second look tells an element that is inf, NaN or above 2^60 (unscaled) from a mere overflow of the sum, and
    names the parameters: `name(i)` is the name of gradient i.
    """
    device = gradients[0].device
    values = [numerics.stored(g) for g in gradients]
    total = numerics.norm(values, device)
    seen = torch.zeros((), device=device) if loss is None else loss.detach().to(device, torch.float32)
    norm, loss_value = (float(v) for v in torch.stack((total, seen)).tolist())
    if math.isfinite(loss_value) and norm / scale <= LARGEST_GRADIENT:
        return Verdict(True, norm / scale)
    norm = float(numerics.wide_norm(values, device)) / scale
    bad = [Culprit("loss", "forward", loss_value)] if not math.isfinite(loss_value) else []
    blamed = [(i, worst) for i, g in enumerate(values) if not (worst := float(numerics.largest([g], device)) / scale) <= LARGEST_GRADIENT]
    blamed.sort(key=lambda found: -math.inf if math.isnan(found[1]) else -found[1])  # worst first, NaN and inf before any number
    bad += [Culprit(name(i), "backward", worst) for i, worst in blamed[: NAMED - len(bad)]]
    return Verdict(not bad, norm, math.isfinite(loss_value), tuple(bad))
