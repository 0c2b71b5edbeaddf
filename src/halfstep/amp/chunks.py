"""The arithmetic of a linear layer and its cross entropy without all logits: a few rows of them at a time, the gradients made while they are there.

A chunk is some rows of hidden states against the whole vocabulary. Its logits are made in one buffer, become probabilities and then their own
gradient in it, and go into the gradients of hidden states, weight and bias. Logits, sums over the vocabulary and gradients are in fp32 (fp64 for
fp64 operands) whatever the format of the operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.amp import scratch
from halfstep.amp.scratch import RIGHT

CHUNK = 1 << 23  # logits of a chunk: 32 MiB in fp32
FEWEST = 128  # rows of a chunk, however large the vocabulary: with fewer the products are slow
PIECE = 1 << 20  # elements of the weight that are cast at a time on a CPU: 4 MiB in fp32, which the caches hold
PIECE_ON_GPU = 1 << 25
UNIT = 2.0**14  # a gradient of logits is at most 1: so scaled, fp16 keeps probabilities above 4e-9 in full


@dataclass(frozen=True)
class Form:
    """Which loss, and how its products run.

    dtype: of their operands. wide: 16-bit operands are multiplied in fp32 (CPU); else by the device's 16-bit kernels. logits: scale * (x @ w + b),
    then softcap * tanh(. / softcap) where that is not 0.
    """

    dtype: torch.dtype
    wide: bool
    reduction: str = "mean"
    ignored: int = -100
    smoothing: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0

    @property
    def sums(self) -> torch.dtype:
        """The format of logits, losses and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Found(NamedTuple):
    """losses: of each row, 0 where the label is ignored. The others are gradients of their weighted sum, or None where not asked for."""

    losses: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def rows_at_a_time(rows: int, vocabulary: int) -> int:
    """Rows of a chunk: as many as CHUNK logits have, in multiples of 16, but not under FEWEST."""
    return max(1, min(rows, max(FEWEST, CHUNK // max(vocabulary, 1) // 16 * 16)))


def computed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, above: Tensor | None, needs: tuple[bool, bool, bool], form: Form
) -> Found:
    """Losses of the rows of hidden[n, h] against weight[v, h], bias[v] and labels[n], and gradients of the sum of above[n] * losses[n].

    Without `above` there are losses alone. needs: which gradients, of hidden, weight and bias. On a CPU rows whose label is ignored take no work.
    Memory: a chunk of logits (twice that with a softcap), and the gradients in the format of sums.
    """
    n, v = labels.shape[0], weight.shape[0]
    losses = torch.zeros(n, dtype=form.sums, device=hidden.device)
    wanted = needs if above is not None else (False, False, False)
    found = Found(
        losses,
        torch.zeros(hidden.shape, dtype=form.sums, device=hidden.device) if wanted[0] else None,
        torch.empty(weight.shape, dtype=form.sums, device=weight.device) if wanted[1] else None,
        torch.zeros(v, dtype=form.sums, device=weight.device) if wanted[2] and bias is not None else None,
    )
    # on a GPU, to count the rows that matter would be to wait for it
    places = (labels != form.ignored).nonzero()[:, 0] if hidden.device.type == "cpu" else torch.arange(n, device=hidden.device)
    step = rows_at_a_time(places.shape[0], v)
    buffer = torch.empty(min(step, places.shape[0]), v, dtype=form.sums, device=hidden.device)
    added = None if bias is None else bias.to(form.dtype).to(form.sums)
    for start in range(0, places.shape[0], step):
        rows = places[start : start + step]
        x, logits, chosen = hidden[rows].to(form.dtype), buffer[: rows.shape[0]], labels[rows]
        multiply(x, weight, added, logits, form)
        slope = bend(logits, form)
        losses[rows] = to_probabilities(logits, chosen, form)
        if above is not None:
            to_gradients(logits, chosen, slope, form)
            collect(x, weight, logits, above[rows], rows, found, start == 0, form)
    if not places.shape[0] and found.weight is not None:
        found.weight.zero_()
    return found


def _pieces(weight: Tensor, form: Form) -> list[slice]:
    """Stretches of the vocabulary: one where nothing has to be cast."""
    if weight.device.type == "cpu" and (form.dtype == weight.dtype == form.sums or not form.wide):
        return [slice(0, weight.shape[0])]
    step = max(64, (PIECE if weight.device.type == "cpu" else PIECE_ON_GPU) // max(weight.shape[1], 1) // 64 * 64)
    return [slice(start, start + step) for start in range(0, weight.shape[0], step)]


def _operand(part: Tensor, form: Form) -> Tensor:
    """A part of the weight as an operand: rounded to the format of the products, and cast up again where they are wide."""
    low = part.to(form.dtype)
    return scratch.wide(RIGHT, low) if form.wide and low.dtype != form.sums else low


def _dot(a: Tensor, b: Tensor, form: Form) -> Tensor:
    """A product of operands with the sums' format."""
    if a.dtype == form.sums:
        return torch.mm(a, b)
    if a.device.type == "cpu":
        return torch.mm(a, b).to(form.sums)
    return torch.mm(a, b, out_dtype=form.sums)


def multiply(x: Tensor, weight: Tensor, added: Tensor | None, logits: Tensor, form: Form) -> None:
    """logits = scale * (x @ weight.T + added)."""
    left = x.to(form.sums) if form.wide else x
    for s in _pieces(weight, form):
        right = _operand(weight[s], form).mT
        if right.dtype == form.sums:
            torch.mm(left, right, out=logits[:, s])
        else:
            logits[:, s] = _dot(left, right, form)
    if added is not None:
        logits += added
    if form.scale != 1:
        logits *= form.scale


def bend(logits: Tensor, form: Form) -> Tensor | None:
    """Cap the logits, and give the slope of the cap there."""
    if not form.softcap:
        return None
    logits.div_(form.softcap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(form.softcap)
    return slope


def to_probabilities(logits: Tensor, labels: Tensor, form: Form) -> Tensor:
    """Losses of the rows; the logits become probabilities."""
    counts = labels != form.ignored
    largest = logits.amax(1)
    here = largest - logits.gather(1, labels.where(counts, 0)[:, None])[:, 0]
    mean = largest - logits.mean(1) if form.smoothing else here
    total = logits.sub_(largest[:, None]).exp_().sum(1)
    logits.div_(total[:, None])
    # minus the logarithm of the label's probability, and with smoothing that of the mean over all: the largest term of the sum is 1
    loss = total.log() + here if not form.smoothing else total.log() + (1 - form.smoothing) * here + form.smoothing * mean
    return loss.where(counts, 0)


def to_gradients(probabilities: Tensor, labels: Tensor, slope: Tensor | None, form: Form) -> None:
    """Probabilities become the gradient of the loss of their row with respect to x @ weight.T + bias; that of an ignored row is meaningless."""
    chosen = labels.where(labels != form.ignored, 0)[:, None]
    if form.smoothing:
        probabilities.sub_(form.smoothing / probabilities.shape[1])
    probabilities.scatter_add_(1, chosen, torch.full_like(chosen, form.smoothing - 1, dtype=probabilities.dtype))
    if slope is not None:
        probabilities.mul_(slope)
    if form.scale != 1:
        probabilities.mul_(form.scale)


def collect(x: Tensor, weight: Tensor, gradients: Tensor, above: Tensor, rows: Tensor, found: Found, first: bool, form: Form) -> None:
    """Add what the gradients of a chunk of logits, each row times `above`, give to those of hidden states, weight and bias."""
    factor: Tensor | float = 1.0
    if form.dtype == torch.float16 and not form.wide:  # rows that are ignored weigh nothing, and the largest one counts as 1
        largest = above.abs().amax()
        largest = largest.where(largest > 0, 1.0) * max(abs(form.scale), 1.0)
        above, factor = above * (UNIT / largest), largest / UNIT
    gradients.mul_(above[:, None])
    if found.bias is not None:
        found.bias.add_(gradients.sum(0) * factor)
    g = gradients if form.wide else gradients.to(form.dtype)
    left = x.to(form.sums) if form.wide else x
    total = None
    for s in _pieces(weight, form):
        if found.hidden is not None:
            part = _dot(g[:, s], _operand(weight[s], form), form)
            total = part if total is None else total.add_(part)
        if found.weight is not None:
            _put(found.weight[s], g[:, s].mT, left, factor, first, form)
    if found.hidden is not None and total is not None:
        found.hidden[rows] = total * factor


def _put(into: Tensor, a: Tensor, b: Tensor, factor: Tensor | float, first: bool, form: Form) -> None:
    """Write or add factor * a @ b."""
    if a.dtype == into.dtype and isinstance(factor, float):
        torch.addmm(into, a, b, beta=0 if first else 1, out=into)
        return
    part = _dot(a, b, form) * factor
    into.copy_(part) if first else into.add_(part)


def weights_of(labels: Tensor, form: Form) -> Tensor:
    """What each row counts in the reduced loss: 0 where it is ignored, also where all are and the mean is not a number."""
    counts = (labels != form.ignored).to(form.sums)
    return counts / counts.sum().clamp_min_(1) if form.reduction == "mean" else counts


def reduced(losses: Tensor, labels: Tensor, form: Form) -> Tensor:
    """The loss: NaN for a mean over no row, as torch's."""
    if form.reduction == "none":
        return losses
    total = losses.sum()
    return total / (labels != form.ignored).sum() if form.reduction == "mean" else total
