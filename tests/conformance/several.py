"""Steps: accumulation, several optimizers, several losses, several ranks (kind E)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from conformance.adapter import Library, Record, collector
from conformance.tools import moved, near, overflowing, pair, read, weight

RECORDS: list[Record] = []
record = collector(RECORDS, "E")


@record(
    "two-optimizers-unscaled-together",
    "unscale all, clip all, then step and update for each optimizer (the order that clipping through Accelerate has)",
    today="update() forgets that the second was unscaled: its update is 1024 times too small",
    right="an update of 0.5 in both",
    check=lambda v: near(v, [0.5, 0.5]),
    refs=("F3",),
)
def unscaled_together(library: Library) -> Any:
    (a, first), (b, second), scaler = pair(), pair(), library.scaler(1024.0)
    scaler.scale(a.sum() + b.sum()).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    clip_grad_norm_([a, b], 100.0)
    for optimizer in (first, second):
        scaler.step(optimizer)
        scaler.update()
    return read(a, b)


@record(
    "overflow-in-the-first-of-two",
    "only the first optimizer's gradients overflow; step and update for each",
    today="update() halves the scale before the second step: its update is doubled",
    right="the first holds still, the second moves by 0.5",
    check=lambda v: near(v, [1.0, 0.5]),
    refs=("F4",),
)
def overflow_in_first(library: Library) -> Any:
    (a, first), (b, second), scaler = pair(), pair(), library.scaler(1024.0)
    scaler.scale(overflowing(a).sum() + b.sum()).backward()
    for optimizer in (first, second):
        scaler.step(optimizer)
        scaler.update()
    return read(a, b)


@record(
    "overflow-in-the-first-of-two-through-the-door",
    "the same through the loop of the manual",
    today="right in value; the caller is not told which held still",
    right="told False and True; weights 1 and 0.5",
    check=lambda v: v["said"] == [False, True] and near(v["weights"], [1.0, 0.5], 1e-3),
    refs=("F4", "case 25"),
    doors=("loop", "accelerator"),
)
def overflow_through_door(library: Library) -> Any:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = weight(), weight()

        def forward(self, bad: Tensor) -> Tensor:
            return (overflowing(self.a) if bad else self.a).sum() + self.b.sum()

    net = Two()
    run = library.run(net, [SGD([net.a], lr=0.5), SGD([net.b], lr=0.5)])
    run.backward(run.forward(torch.tensor(True)))
    return {"said": run.step(), "weights": read(net.a, net.b)}


@record(
    "gan-split-step",
    "one scaler, two losses: the generator's gradients overflow, the discriminator's do not",
    today="one of the two steps, and both calls return None",
    right="told False for the generator and True for the discriminator; weights 1 and 0.5",
    check=lambda v: v["said"] == [False, True] and near(v["weights"], [1.0, 0.5]),
    refs=("case 25",),
)
def gan_split(library: Library) -> Any:
    (g, generator), (d, discriminator), scaler = pair(), pair(), library.scaler(1024.0)
    library.watch(scaler, generator, discriminator)
    scaler.scale(d.sum()).backward()
    scaler.scale(overflowing(g).sum()).backward()
    said = [library.told(scaler.step(o)) for o in (generator, discriminator)]
    scaler.update()
    return {"said": said, "weights": read(g, d)}


@record(
    "nan-in-one-of-two-losses",
    "one loss is NaN, the other is not; each has its optimizer",
    today="right in value; nobody is told",
    right="told False and True; weights 1 and 0.5",
    check=lambda v: v["said"] == [False, True] and near(v["weights"], [1.0, 0.5]),
)
def nan_in_one_loss(library: Library) -> Any:
    (a, first), (b, second), scaler = pair(), pair(), library.scaler(1024.0)
    library.watch(scaler, first, second)
    scaler.scale(a.sum() * math.nan).backward()
    scaler.scale(b.sum()).backward()
    said = [library.told(scaler.step(o)) for o in (first, second)]
    scaler.update()
    return {"said": said, "weights": read(a, b)}


@record(
    "loss-scaled-before-an-update",
    "the second loss is scaled, then the first optimizer's overflow lowers the scale, then the second's backward pass runs",
    today="RuntimeError about a tensor that was modified in place; nothing says that it is the scale",
    right="the second moves by 0.5",
    check=lambda v: near(v, [1.0, 0.5]),
    refs=("case 25",),
)
def scaled_before_update(library: Library) -> Any:
    (a, first), (b, second), scaler = pair(), pair(), library.scaler(1024.0)
    library.watch(scaler, first, second)
    later = scaler.scale(b.sum())
    scaler.scale(overflowing(a).sum()).backward()
    scaler.step(first)
    scaler.update()
    later.backward()
    scaler.step(second)
    scaler.update()
    return read(a, b)


@record(
    "accumulating-while-the-other-overflows",
    "one optimizer accumulates two micro-batches; the other steps in each, overflows in the first, and update() follows",
    today="the window holds gradients of two scales, divided by one",
    right="the accumulating one moves by 0.5 x 2, the other by 0.5",
    check=lambda v: abs(v[0]) < 1e-6 and near(v[1], 0.5),
    refs=("F4",),
)
def accumulating_while_other_overflows(library: Library) -> Any:
    (a, slow), (b, quick), scaler = pair(), pair(), library.scaler(1024.0)
    library.watch(scaler, slow, quick)
    for bad in (True, False):
        quick.zero_grad()
        scaler.scale(a.sum() + (overflowing(b) if bad else b).sum()).backward()
        scaler.step(quick)
        scaler.update()
    scaler.step(slow)
    scaler.update()
    return read(a, b)


@record(
    "tied-parameter-in-two-optimizers",
    "one parameter in two optimizers, both unscaled, both stepped",
    today="its gradient is divided by the scale twice",
    right="an update of 0.5 from each, or an error",
    check=lambda v: near(v, [0.0, 0.5]) or (abs(v[0]) < 1e-6 and near(v[1], 0.5)),
    refused=("optimizer",),
)
def tied_parameter(library: Library) -> Any:
    tied, own, scaler = weight(), weight(), library.scaler(1024.0)
    first, second = SGD([tied], lr=0.5), SGD([tied, own], lr=0.5)
    scaler.scale(tied.sum() + own.sum()).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    return read(tied, own)


@record(
    "discriminator-gets-the-generators-gradients",
    "the generator's loss runs through the discriminator, whose gradients are cleared before its own step",
    today="right",
    right="generator and discriminator move by 0.5 each",
    check=lambda v: near(v, [0.5, 0.5]),
    stock="right",
)
def generators_gradients(library: Library) -> Any:
    (g, generator), (d, discriminator), scaler = pair(), pair(), library.scaler(1024.0)
    library.watch(scaler, generator, discriminator)
    scaler.scale((g * d.mean()).sum()).backward()
    scaler.step(generator)
    discriminator.zero_grad()
    scaler.scale((d * g.detach().mean() * 2).sum()).backward()
    scaler.step(discriminator)
    scaler.update()
    return read(g, d)


@record(
    "optimizer-made-in-mid-run",
    "a second optimizer is made and used after ten steps of the first (progressive training)",
    today="right",
    right="the new one moves by 0.5",
    check=lambda v: near(v, 0.5),
    stock="right",
)
def optimizer_in_mid_run(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale((w * 1e-3).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    late, new = pair()
    scaler.scale(late.sum()).backward()
    scaler.step(new)
    return read(late)[0]


@record(
    "adamw-beside-sgd",
    "two kinds of optimizer for two parts of one model; the second part overflows in alternate steps",
    today="right in value; nobody is told",
    right="told [True, False] and [True, True] in turn; the overflowing part moved twice in four steps",
    check=lambda v: v["said"] == [True, False, True, True] * 2 and near(v["second"], 1.0 - 2 * 0.5),
)
def adamw_beside_sgd(library: Library) -> Any:
    (a, first), (b, second), scaler, said = pair(make=AdamW, lr=0.01), pair(), library.scaler(1024.0), []
    for i in range(4):
        first.zero_grad()
        second.zero_grad()
        scaler.scale(a.sum() + (overflowing(b) if i % 2 == 0 else b).sum()).backward()
        said += [library.told(scaler.step(o)) for o in (first, second)]
        scaler.update()
    return {"said": said, "second": read(b)[0]}


class _Ranks:
    """Two ranks as two threads, with an all-reduce of the maximum."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.values: dict[int, Tensor] = {}
        self.names = threading.local()

    def largest(self, value: Tensor) -> Tensor:
        self.values[self.names.rank] = value.detach().clone()
        self.barrier.wait()
        result = torch.maximum(self.values[0], self.values[1])
        self.barrier.wait()
        return result

    def both(self, work: Callable[[int], Any]) -> list[Any]:
        results: dict[int, Any] = {}

        def one(rank: int) -> None:
            self.names.rank = rank
            try:
                results[rank] = work(rank)
            except Exception as error:  # noqa: BLE001  a thread's error must reach the record
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return [results[0], results[1]]


@record(
    "ranks-disagree",
    "each rank owns the shard of one parameter, and only one rank's gradient overflows",
    today="one rank steps and the other does not; their scales drift apart",
    right="neither steps, and both have the same scale",
    check=lambda v: v[0]["moved"] == v[1]["moved"] is False and v[0]["scale"] == v[1]["scale"],
    refs=("case 31",),
)
def ranks_disagree(library: Library) -> Any:
    ranks = _Ranks()

    def rank(number: int) -> dict[str, Any]:
        w, optimizer = pair()
        settings: dict[str, Any] = {} if library.name == "stock" else {"agree": ranks.largest}
        scaler = library.scaler(16.0, **settings)
        scaler.scale(overflowing(w.sum()) if number == 0 else w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return {"moved": moved([torch.ones(4)], [w]), "scale": scaler.get_scale()}

    return ranks.both(rank)
