"""Are these gradients fit to be used? Measured in one pass on the device, read to the host in one transfer, now or later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.kernels import kernels_for
from halfstep.numerics import LARGEST_GRADIENT as LARGEST_GRADIENT
from halfstep.step.result import Culprit

NAMED = 8  # culprits named; one bad batch often makes every gradient bad
FP16_NORMAL = 2.0**-14  # the smallest fp16 number that has all its bits
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIT, OVERFLOW, BAD_LOSS = 0.0, 1.0, 2.0

Agree = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """Fit or not, the norm of the unscaled gradients, whether the loss was finite, and what was to blame.

    peak: the largest magnitude of the gradients as they were, still scaled; share: the share of them that are subnormal in
    fp16. Both are None when they were not measured. persists: it is bad at the lowest scale too, which is not the scale's fault.
    nonfinite: the names of all gradients with inf or NaN (where they are gone when the verdict is read: with a norm that is not finite).
    """

    fit: bool
    norm: float
    loss_finite: bool = True
    culprits: tuple[Culprit, ...] = ()
    peak: float | None = None
    share: float | None = None
    persists: bool = False
    nonfinite: tuple[str, ...] = ()

    @property
    def blames_scale(self) -> bool:
        """Whether the scale should follow: not after a non-finite loss, and not when a lower scale does not help."""
        return self.loss_finite and not self.persists

    def not_the_scale(self) -> Verdict:
        """The same, found bad at the lowest scale too."""
        return replace(self, persists=True)


@dataclass(frozen=True)
class Evidence:
    """What was measured, still on the device.

    values: [norm (scaled), loss, badness, peak, share], fp32; badness is 0 fit, 1 overflow, 2 loss not finite.
    norms: the norm of each gradient, fp32.  sensed: peak and share were measured.
    final: the badness stands (ranks have agreed on it); without it a second look may find that only a sum overflowed.
    peaks: the largest magnitude of each gradient, fp32; share: as in `values`. None where they were not measured.
    """

    values: Tensor
    norms: Tensor
    scale: float
    sensed: bool
    final: bool
    peaks: Tensor | None = None
    share: Tensor | None = None

    @property
    def bad(self) -> Tensor:
        """1 when the gradients must not be used, else 0: what torch's fused optimizers take as `found_inf`."""
        return (self.values[2] > FIT).to(torch.float32)


def gather(
    gradients: Sequence[Tensor],
    scale: float,
    loss: Tensor | None,
    agree: Agree | None = None,
    sense: bool = False,
    compiled: bool = False,
    *,
    watch: bool = False,
) -> Evidence:
    """Measure `gradients` (made under loss scale `scale`) and the `loss` (unscaled, or None) on the device of the first gradient.

    One pass for the norm; `sense` adds one for the largest magnitude and a sample for the subnormal share. `agree` makes the
    largest badness, peak and share over all ranks everybody's. Nothing is read to the host. watch: measure the largest magnitude of each, and
    the share where a scale or the dtype makes it fp16's, though the loss scale has no use for them. compiled: by the device's kernel where there is
    one, whose sums are fp64 and which gives the largest magnitudes too; torch's own norms otherwise, those of its clip_grad_norm_ bit for bit.
    """
    device = gradients[0].device
    values = [numerics.stored(g) for g in gradients]
    kernels = kernels_for(device) if compiled and all(v.device == device and v.dtype in KERNEL_DTYPES for v in values) else None
    if kernels is not None:
        sums, peaks = kernels.squares(values)
        norms, norm = sums.sqrt().float(), sums.sum().sqrt().float()
    else:
        peaks = numerics.largest_of_each(values, device) if sense or watch else None
        norms = numerics.norms(values, device)
        norm = torch.linalg.vector_norm(norms)
    seen = torch.zeros((), device=device, dtype=torch.float32) if loss is None else loss.detach().to(device, torch.float32)
    overflow = ~(norm <= LARGEST_GRADIENT * scale)
    badness = torch.where(torch.isfinite(seen), overflow.float() * OVERFLOW, BAD_LOSS)
    nothing = torch.zeros((), device=device, dtype=torch.float32)
    peak = nothing if not sense or peaks is None else peaks.amax()
    narrow = sense or (watch and (scale != 1.0 or any(v.dtype == torch.float16 for v in values)))
    share = numerics.subnormal_share(values, FP16_NORMAL, device) if narrow else nothing
    shared = torch.stack((badness, peak, share))
    if agree is not None:
        shared = agree(shared)
    all_of_it = torch.cat((torch.stack((norm, seen)), shared))
    return Evidence(all_of_it, norms, scale, sense, agree is not None, peaks, all_of_it[4] if narrow else None)


def decide(evidence: Evidence, numbers: Sequence[float], name: Callable[[int], str], gradients: Sequence[Tensor] | None = None) -> Verdict:
    """The verdict on evidence whose values were read to the host as `numbers`; `name(i)` is the name of gradient i.

    gradients: as they were measured, if they are still there. When the norm says that something is wrong, a second look at
    them tells an element that is inf, NaN or above 2^60 (unscaled) from a mere overflow of the sum.
    """
    norm, loss, badness, peak, share = numbers
    scale, about = evidence.scale, (peak, share) if evidence.sensed else (None, None)
    if badness == FIT:
        return Verdict(True, norm / scale, True, (), *about)
    loss_finite = math.isfinite(loss)
    if gradients is None:
        worst = [n / scale for n in evidence.norms.tolist()]
    else:
        values = [numerics.stored(g) for g in gradients]
        worst = [float(numerics.largest([v], v.device)) / scale for v in values]
        norm = float(numerics.wide_norm(values, values[0].device))
    bad = [] if loss_finite else [Culprit("loss", "forward", loss)]
    blamed = [(i, value) for i, value in enumerate(worst) if not value <= LARGEST_GRADIENT]
    blamed.sort(key=lambda found: -math.inf if math.isnan(found[1]) else -found[1])  # worst first, NaN and inf before any number
    nonfinite = tuple(name(i) for i, value in blamed if not math.isfinite(value))
    bad += [Culprit(name(i), "backward", value) for i, value in blamed[: NAMED - len(bad)]]
    if not bad and (evidence.final or gradients is None):
        elsewhere = norm <= LARGEST_GRADIENT * scale
        bad = [Culprit("another rank" if elsewhere else "norm of all gradients", "backward", math.nan if elsewhere else norm / scale)]
    return Verdict(not bad, norm / scale, loss_finite and badness < BAD_LOSS, tuple(bad), about[0], about[1], nonfinite=nonfinite)


def judge(
    gradients: Sequence[Tensor], scale: float, loss: Tensor | None, name: Callable[[int], str], agree: Agree | None = None, sense: bool = False
) -> Verdict:
    """`gather` and `decide` at once: one read from the device when the gradients are good."""
    evidence = gather(gradients, scale, loss, agree, sense)
    return decide(evidence, evidence.values.tolist(), name, gradients)
