"""Cross entropy of rows of logits and its gradient, as every kernel computes it: fp32 exponentials, fp64 sums, one rounding of each loss.

The exponential of x <= 0 is Cody and Waite's: x = n ln 2 + r with |r| <= ln(2) / 2, ln 2 in two parts of which n times the first is exact, then
1 + r + r^2 q(r) with q of degree 4 (fitted to a relative error of 3.1e-9, a twentieth of an ulp), then two powers of 2, so that subnormal results
are rounded once. Within 1 ulp of the true value, for every x. Sums: 512 exponentials are folded to 64 in fp32, by three
additions each, and these added to 64 sums in fp64, which no vocabulary is too large for.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.numerics.standins import is_shape

BLOCK, LANES = 512, 64  # exponentials that are folded at once, and sums in fp64
PIECE = 1 << 18  # logits that the plain definition works on at once
LEAST = -104.0  # below it e^x is nearer to 0 than to the smallest subnormal number
LOG2E = 1.44269502162933349609375
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860677e-06  # 16 bits and the rest: n of 8 bits times the first is exact
ROUNDER = 12582912.0  # 1.5 * 2^23: a number below 2^22 added to it is rounded to an integer
SERIES = (0.0013814539415761828, 0.00836874544620514, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552)


def exponential(x: Tensor) -> Tensor:
    """e^x of fp32 `x`, of any shape, none of them above 0; -inf gives 0 and NaN gives NaN. A new tensor."""
    x = x.clamp_min(LEAST)  # a NaN stays one
    rounded = (x * LOG2E).add_(ROUNDER)
    n = rounded - ROUNDER
    r = x.sub_(n * LN2_HIGH).sub_(n.mul_(LN2_LOW))
    q = r * SERIES[0]
    for coefficient in SERIES[1:-1]:
        q.add_(coefficient).mul_(r)
    value = q.add_(SERIES[-1]).mul_(r * r).add_(r).add_(1)
    power = rounded.view(torch.int32).sub_(_bits(ROUNDER))
    half = power >> 1
    rest = power.sub_(half)
    return value.mul_(_power_of_two_(half)).mul_(_power_of_two_(rest))


def _bits(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def _power_of_two_(n: Tensor) -> Tensor:
    return n.add_(127).bitwise_left_shift_(23).view(torch.float32)


def losses(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, largest logit, sum of e^(logit - largest)) of each row: fp32, fp32 and fp64, [rows] each.

    logits: [rows, classes] in fp32, bf16 or fp16, taken as fp32. targets: int64 [rows], each `ignored` or a class; a row without one has the loss 0.
    A row with a NaN or +inf gives NaN.
    """
    return _losses(logits, targets, ignored)


def losses_of_copy(logits: Tensor, targets: Tensor, ignored: int, copy: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same; None unless `copy`, in fp32 and of their shape, has the numbers of `logits`. A NaN is no number."""
    return _losses(logits, targets, ignored) if is_shape(logits) or bool((logits == copy).all()) else None


def _losses(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    largest, sums = torch.empty_like(found), torch.empty_like(found, dtype=torch.float64)
    if is_shape(logits):
        return found, largest, sums
    for s in _pieces(logits):
        x = logits[s].float()
        largest[s] = top = x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)  # a NaN shows in the sum
        sums[s] = total = _sums(exponential(x - top[:, None]))
        counted = targets[s] != ignored
        chosen = x.gather(1, targets[s].where(counted, 0)[:, None])[:, 0]
        logarithms = torch.tensor([math.log(t) for t in total.tolist()], dtype=torch.float64)  # the C library's, as in compiled code
        found[s] = torch.where(counted, (logarithms - (chosen.double() - top.double())).float(), 0.0)
    return found, largest, sums


def gradient(logits: Tensor, targets: Tensor, ignored: int, largest: Tensor, sums: Tensor, above: Tensor, form: torch.dtype | None = None) -> Tensor:
    """The gradient of the logits, contiguous, in `form` or their format: of each row `above` * (e^(logit - largest) / sum, less 1 at its class).

    targets, ignored, largest, sums: as given to and by `losses`. above: fp32 [rows], the gradient of each row's loss; 0 is taken for a row without a
    class. `above` is divided by the sum first, in fp64, rounded once.
    """
    found = torch.empty(logits.shape, dtype=form or logits.dtype, device=logits.device)
    if is_shape(logits):
        return found
    for s in _pieces(logits):
        counted = targets[s] != ignored
        given = torch.where(counted, above[s], 0.0)
        x = exponential(logits[s].float() - largest[s, None]) * (given.double() / sums[s]).float()[:, None]
        found[s] = x.scatter_add_(1, targets[s].where(counted, 0)[:, None], -given[:, None])
    return found


def _pieces(logits: Tensor) -> list[slice]:
    step = max(1, PIECE // logits.shape[1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def _sums(x: Tensor) -> Tensor:
    """Of each row, in the one order that there is."""
    x = F.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    while x.shape[2] > LANES:
        x = x[:, :, : x.shape[2] // 2] + x[:, :, x.shape[2] // 2 :]
    lanes = torch.zeros(len(x), LANES, dtype=torch.float64)
    for block in x.unbind(1):
        lanes += block
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]
