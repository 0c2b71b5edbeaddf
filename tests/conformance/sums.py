"""Sums, averages and statistics in 16 bits (kind G), and the sums inside optimizers (kind A)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.diagnosed import Part, net, numbers, train
from conformance.tools import BF16, F16, near, read

RECORDS: list[Record] = []
record = collector(RECORDS, "G")
narrow = collector(RECORDS, "A")


class Scalar(nn.Module):
    """One weight."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _averaged(library: Library, steps: int, lr: float, dtype: torch.dtype = BF16) -> float:
    """A 16-bit weight of 1 that one step of `lr` a time raises by `lr`, and its average after each of them at decay 0.999."""
    model = library.cast_model(Scalar(1.0), dtype)
    (w,) = model.parameters()
    optimizer, scaler = library.masters(SGD([w], lr=lr)), library.scaler(enabled=False)
    library.watch(scaler, model, optimizer)
    average = library.ema(model, 0.999)
    average.update()
    for step in range(50):
        if step < steps:
            scaler.scale(-w.float().sum()).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
        average.update()
    with average.applied():
        return read(library.full(w))[0]


@record(
    "average-of-16-bit-weights",
    "an EMA at decay 0.999 of a bf16 weight that goes from 1 to 1.5 in one step, after 50 updates",
    today="1: the increment of 5e-4 is under half of bf16's spacing",
    right="1 + 0.5 (1 - 0.999^50) = 1.0244",
    check=lambda v: near(v, 1.0244, 2e-3),
    refused=("float32",),
    refs=("case 40",),
)
def average_of_weights(library: Library) -> Any:
    return _averaged(library, 1, 0.5)


@record(
    "average-of-fp16-weights",
    "the same EMA of an fp16 weight that goes from 1 to 1.25, at decay 0.999",
    today="1: the increment of 2.5e-4 is under half of fp16's spacing",
    right="1 + 0.25 (1 - 0.999^50) = 1.0122",
    check=lambda v: near(v, 1.0122, 1e-3),
    refused=("float32",),
    refs=("case 40",),
)
def average_of_fp16_weights(library: Library) -> Any:
    return _averaged(library, 1, 0.25, F16)


@record(
    "average-of-updates-too-small-for-16-bits",
    "an EMA at decay 0.9 of a bf16 weight of 1 that gains 2e-4 at each of 50 steps",
    today="1: the weight never moves, and neither does its average",
    right="the average of fp32: 1 + 2e-4 (50 - 9) = 1.0082",
    check=lambda v: near(v, 1.0082, 1e-3),
    refused=("float32",),
    refs=("case 40", "case 37"),
)
def average_of_small_updates(library: Library) -> Any:
    model = library.cast_model(Scalar(1.0), BF16)
    (w,) = model.parameters()
    optimizer, scaler = library.masters(SGD([w], lr=2e-4)), library.scaler(enabled=False)
    library.watch(scaler, model, optimizer)
    average = library.ema(model, 0.9)
    for _ in range(50):
        scaler.scale(-w.float().sum()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        average.update()
    with average.applied():
        return read(library.full(w))[0]


@record(
    "mean-of-16-bit-losses",
    "the mean of bf16 losses, one of 300 and 50 of 0.9, as the library reports it",
    today="300 / 51 = 5.88: 300.9 rounds to 300 at each of 50 additions",
    right="345 / 51 = 6.76",
    check=lambda v: near(v, 345 / 51, 5e-3),
    refs=("case 44",),
)
def mean_of_losses(library: Library) -> Any:
    return library.mean_of([torch.tensor(value, dtype=BF16) for value in [300.0] + [0.9] * 50])


def _added(library: Library, function: Callable[[Tensor], Tensor], rows: list[Tensor], dtype: torch.dtype = BF16) -> float:
    """What a function of 16-bit values gives for each batch, added up as the loop over the batches goes."""
    model = net(function, 1, "loss")
    run = train(library, model, dtype)
    total: Any = 0
    with torch.no_grad():
        for x in rows:
            total = total + run.forward(x)
    part = model[1]
    if isinstance(part, Part) and part.met is not dtype:
        raise NotOffered(f"{dtype} was asked for, and the layers ran in {part.met}")
    return float(total)


@record(
    "losses-of-a-block-added-up",
    "the sum over batches of losses that a bf16 block returns, (output - target).abs().sum() / n: one of 300, then 50 of 0.9",
    today="300: a bf16 loss added to a bf16 sum",
    right="345",
    check=lambda v: near(v, 345.0, 5e-3),
    doors=("loop", "accelerator"),
    refs=("case 44",),
)
def losses_added(library: Library) -> Any:
    return _added(library, lambda y: y.abs().sum() / y.numel(), [torch.full((1, 1), 300.0)] + [torch.full((1, 1), 0.9)] * 50)


@record(
    "hits-counted-in-the-outputs-dtype",
    "correct answers counted by hits.to(outputs.dtype).sum() in a bf16 block: 300 in the first batch, then one in each of 50",
    today="300: bf16 counts to 256, then in twos",
    right="350",
    check=lambda v: v == 350.0,
    doors=("loop", "accelerator"),
)
def hits_counted(library: Library) -> Any:
    return _added(library, lambda y: (y > 0).to(y.dtype).sum(), [torch.ones(300, 1)] + [torch.ones(1, 1)] * 50)


@record(
    "accuracy-over-many-tokens",
    "hits.to(outputs.dtype).sum() of 70001 hits in an fp16 block",
    today="inf: fp16 ends at 65504",
    right="70001",
    check=lambda v: v == 70001.0,
    doors=("loop", "accelerator"),
)
def many_hits(library: Library) -> Any:
    return _added(library, lambda y: (y > 0).to(y.dtype).sum(), [torch.ones(70001, 1)], F16)


@record(
    "running-sum-along-a-sequence",
    "the cumulative sum of 600 ones in a bf16 block (returns of a rollout, a survival curve)",
    today="bf16: 599 and 601 are the same",
    right="600 different values",
    check=lambda v: v == 600,
    doors=("loop", "accelerator"),
)
def cumulative_sum(library: Library) -> Any:
    run = train(library, net(lambda y: y.cumsum(0), 1, "returns"), BF16)
    with torch.no_grad():
        return run.forward(torch.ones(600, 1)).unique().numel()


@record(
    "counts-by-index",
    "how many of 600 nodes belong to a graph, h.new_zeros(1).index_add(0, index, ones) in a bf16 block",
    today="256: bf16 does not take another one",
    right="600",
    check=lambda v: v == 600.0,
    doors=("loop", "accelerator"),
)
def counted(library: Library) -> Any:
    return _added(library, lambda h: h.new_zeros(1).index_add(0, torch.zeros(600, dtype=torch.long), h.flatten()).sum(), [torch.ones(600, 1)])


@record(
    "statistics-of-a-16-bit-batch-norm",
    "the running mean of a batch norm in a bf16 model, momentum 0.001, from 1 through 50 batches of mean 1.5",
    today="1: the increment of 5e-4 is under half of bf16's spacing",
    right="1 + 0.5 (1 - 0.999^50) = 1.0244",
    check=lambda v: near(v, 1.0244, 2e-3),
    refused=("float32",),
    refs=("case 40",),
)
def batch_norm(library: Library) -> Any:
    norm = nn.BatchNorm1d(4, momentum=0.001)
    norm.running_mean = torch.ones(4)
    model = library.cast_model(nn.Sequential(norm, nn.Linear(4, 4)), BF16)
    batch = torch.tensor([[1.0], [2.0]]).expand(2, 4).to(BF16)
    for _ in range(50):
        model(batch)
    return numbers(norm.running_mean)[0]


def _accumulated(library: Library, make: Callable[[list[nn.Parameter]], Optimizer], gradients: list[float], state: str) -> float:
    """A state of an optimizer on a bf16 weight after steps with given gradients."""
    w = nn.Parameter(torch.zeros(4, dtype=BF16))
    optimizer, scaler = library.masters(make([w])), library.scaler(enabled=False)
    library.watch(scaler, optimizer)
    for g in gradients:
        scaler.scale((w * g).float().sum()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
    return float(optimizer.state[w][state][0])


@narrow(
    "adagrad-sum-is-stuck-in-bf16",
    "Adagrad on a bf16 weight: one gradient of 16, then 40 of 0.5",
    today="256 for good: the sum of squares does not take 0.25, so the step size never falls",
    right="266, or a refusal that says to use float32",
    check=lambda v: near(v, 266.0, 1e-3),
    refused=("float32",),
    refs=("case 39",),
)
def adagrad(library: Library) -> Any:
    return _accumulated(library, lambda ps: Adagrad(ps, lr=0.1), [16.0] + [0.5] * 40, "sum")


@narrow(
    "slow-momentum-is-stuck-in-bf16",
    "SGD with momentum 0.999 on a bf16 weight: one gradient of 1, then 40 of 0",
    today="1 for good: 0.999 rounds back to 1",
    right="0.999^40 = 0.961, or a refusal that says to use float32",
    check=lambda v: near(v, 0.999**40, 1e-3),
    refused=("float32",),
    refs=("case 39",),
)
def momentum(library: Library) -> Any:
    return _accumulated(library, lambda ps: SGD(ps, lr=1e-3, momentum=0.999), [1.0] + [0.0] * 40, "momentum_buffer")
