"""Update rules of optimizers, spelled out: what a faster twin must equal bit for bit. In place, on fp32 tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from halfstep.numerics.slices import ranges

AdamWScalars = tuple[float, float, float, float, float, float, float]
SGDScalars = tuple[float, float, float, float, float]
LionScalars = tuple[float, float, float, float]


class Settings(Protocol):
    """The settings of one step of one weight: hashable, so that weights with equal ones can share a row of a kernel's table."""

    rule: ClassVar[str]

    @property
    def maximize(self) -> bool:
        """Whether the step goes up the gradient."""

    def scalars(self) -> tuple[float, ...]:
        """The numbers that the rule multiplies by, as Python floats. A rule rounds each of them to fp32 once, when it is used."""

    def update_(self, p: Tensor, g: Tensor, *states: Tensor) -> None:
        """The step by its plain definition, in place on `p` and `states`."""


@dataclass(frozen=True)
class AdamWStep:
    """The settings of one AdamW step of one weight. step counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False
    rule: ClassVar[str] = "adamw"

    def scalars(self) -> AdamWScalars:
        """See `adamw_scalars`."""
        return adamw_scalars(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.step)

    def update_(self, p: Tensor, g: Tensor, *states: Tensor) -> None:
        """See `adamw_`; states: first and second moment."""
        m, v = states
        numbers = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, "weight_decay": self.weight_decay}
        adamw_(p, g, m, v, **numbers, step=self.step, maximize=self.maximize)


@dataclass(frozen=True)
class SGDStep:
    """The settings of one SGD step of one weight. first: its buffer is new, and becomes the gradient."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first: bool = False
    maximize: bool = False
    rule: ClassVar[str] = "sgd"

    def scalars(self) -> SGDScalars:
        """See `sgd_scalars`."""
        return sgd_scalars(self.lr, self.momentum, self.dampening, self.weight_decay, self.nesterov, self.first)

    def update_(self, p: Tensor, g: Tensor, *states: Tensor) -> None:
        """See `sgd_`; states: the buffer, or none."""
        numbers = {"lr": self.lr, "momentum": self.momentum, "dampening": self.dampening, "weight_decay": self.weight_decay}
        sgd_(p, g, states[0] if states else None, **numbers, nesterov=self.nesterov, first=self.first, maximize=self.maximize)


@dataclass(frozen=True)
class LionStep:
    """The settings of one Lion step of one weight."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float = 0.0
    maximize: bool = False
    rule: ClassVar[str] = "lion"

    def scalars(self) -> LionScalars:
        """See `lion_scalars`."""
        return lion_scalars(self.lr, self.beta1, self.beta2, self.weight_decay)

    def update_(self, p: Tensor, g: Tensor, *states: Tensor) -> None:
        """See `lion_`; states: the average."""
        lion_(p, g, states[0], lr=self.lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay, maximize=self.maximize)


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


def sgd_scalars(lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, first: bool) -> SGDScalars:
    """The five numbers of one SGD step, as Python floats: weight_decay, momentum and 1 - dampening (0 and 1 in a buffer's first step),
    the share of the buffer that Nesterov's form adds to the gradient (0: another form), lr.
    """
    keep, rise = (0.0, 1.0) if first else (momentum, 1 - dampening)
    return weight_decay, keep, rise, momentum if nesterov else 0.0, lr


def sgd_(
    p: Tensor,
    g: Tensor,
    b: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    maximize: bool = False,
) -> None:
    """One step of stochastic gradient descent, as torch.optim.SGD takes it, in place on `p` and `b`; `g` is only read.

    p, g, b: fp32, one shape: weight, gradient, momentum buffer. Without a buffer momentum, dampening and nesterov have no part in it.
    first: the buffer becomes the gradient, with no dampening. maximize goes up the gradient. weight_decay is part of the gradient.
    Rounding as in `adamw_`. Temporary memory: up to 12 bytes per element. Source: Sutskever et al., 2013, in torch's form.
    """
    decay, keep, rise, ahead, size = sgd_scalars(lr, momentum, dampening, weight_decay, nesterov, first)
    if maximize:
        g = -g
    g = (p * decay).add_(g)  # weight decay as a part of the gradient
    if b is not None:
        b.mul_(keep).add_(g * rise)  # momentum: a sum of gradients that fades
        g = (b * ahead).add_(g) if ahead else b  # Nesterov: as seen from where the momentum leads
    p.sub_(g * size)


def lion_scalars(lr: float, beta1: float, beta2: float, weight_decay: float) -> LionScalars:
    """The four numbers of one Lion step, as Python floats: 1 - lr * weight_decay, 1 - beta1, 1 - beta2, lr."""
    return 1 - lr * weight_decay, 1 - beta1, 1 - beta2, lr


def lion_(p: Tensor, g: Tensor, m: Tensor, *, lr: float, beta1: float, beta2: float, weight_decay: float = 0.0, maximize: bool = False) -> None:
    """One step of Lion (Chen et al., arXiv:2302.06675, algorithm 2) in place on `p` and `m`; `g` is only read.

    p, g, m: fp32, one shape: weight, gradient, its moving average. maximize goes up the gradient. A direction that is NaN makes the weight NaN.
    Rounding as in `adamw_`. Temporary memory: up to 16 bytes per element.
    """
    decay, rise1, rise2, size = lion_scalars(lr, beta1, beta2, weight_decay)
    if maximize:
        g = -g
    change = g - m
    direction = (change * rise1).add_(m)  # the average as it would be with the first beta
    p.mul_(decay)  # decoupled weight decay
    p.sub_(torch.where(direction.isnan(), direction, direction.sign()).mul_(size))  # every weight moves by lr, or not at all
    m.add_(change.mul_(rise2))  # the average that is kept, with the second beta


def square_root(x: Tensor) -> Tensor:
    """The square root of `x`, rounded to nearest even: a new tensor. fp64 as torch takes it.

    By way of fp64, which is exact here (Figueroa, When is double rounding innocuous?, 1995): torch's own root of an fp32 tensor comes
    from a vector library on some CPUs and is one ulp off for one number in six. Temporary memory: 16 bytes per element.
    """
    return x.sqrt() if x.dtype == torch.float64 else x.to(torch.float64).sqrt_().to(torch.float32)
