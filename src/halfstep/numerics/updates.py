"""Update rules of optimizers, spelled out: what a faster twin must equal bit for bit. In place, on fp32 tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep.numerics.slices import ranges

AdamWScalars = tuple[float, float, float, float, float, float, float]


def adamw_scalars(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> AdamWScalars:
    """The seven numbers of one AdamW step, as Python floats.

    1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^step), eps, lr / (1 - beta1^step);
    step counts from 1. An update rule rounds each of them to fp32 once, when it is used.
    """
    decay, rise1, rise2 = 1 - lr * weight_decay, 1 - beta1, 1 - beta2
    return decay, rise1, beta2, rise2, 1 / math.sqrt(1 - beta2**step), eps, lr / (1 - beta1**step)


def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool = False,
) -> None:
    """One AdamW step (Loshchilov and Hutter, 2019) in place on `p`, `m` and `v`; `g` is only read.

    p, g, m, v: fp32, one shape: weight, gradient, first and second moment. step counts from 1. maximize goes up the gradient.
    Each line rounds to fp32 after every operation, and no two operations are fused, so that any device can give equal bits.
    Temporary memory: up to 16 bytes per element.
    """
    decay, rise1, keep2, rise2, root2, floor, size = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step)
    if maximize:
        g = -g
    p.mul_(decay)  # decoupled weight decay
    m.add_((g - m).mul_(rise1))  # first moment: a moving average of the gradient
    v.mul_(keep2).add_((g * g).mul_(rise2))  # second moment: a moving average of its square
    denominator = square_root(v).mul_(root2).add_(floor)  # corrected for the zeros it began with, kept away from 0
    p.sub_((m / denominator).mul_(size))  # the step, its size corrected for the first moment's zeros


def average_(average: Tensor, value: Tensor, share: float) -> None:
    """average += share * (value - average), in place on `average`; `value`, of the same shape and dtype, is only read.

    Rounded after every operation and none fused (torch's own lerp fuses two of them, on some elements of a tensor), so that any device can give
    equal bits. An average that equals the value stays as it is. Temporary memory: 1 MB on a CPU (64 MB elsewhere), of a tensor in another order of
    memory than the usual one as much as it has.
    """
    if not (average.is_contiguous() and value.is_contiguous()):
        average.add_(torch.sub(value, average).mul_(share))
        return
    old, new = average.view(-1), value.view(-1)
    for part in ranges(old.numel(), old.device):
        old[part].add_(torch.sub(new[part], old[part]).mul_(share))


def square_root(x: Tensor) -> Tensor:
    """The square root of `x`, rounded to nearest even: a new tensor. fp64 as torch takes it.

    By way of fp64, which is exact here (Figueroa, When is double rounding innocuous?, 1995): torch's own root of an fp32 tensor comes
    from a vector library on some CPUs and is one ulp off for one number in six. Temporary memory: 16 bytes per element.
    """
    return x.sqrt() if x.dtype == torch.float64 else x.to(torch.float64).sqrt_().to(torch.float32)
