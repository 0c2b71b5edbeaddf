"""Steps: calls that are missing, too many or on the wrong object; gradient penalties; what a bad step tells (kind E)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from conformance.adapter import Library, Record, collector
from conformance.tools import Said, finite, near, overflowing, pair, read

RECORDS: list[Record] = []
record = collector(RECORDS, "E")


@record(
    "plain-step-on-scaled-gradients-sgd",
    "optimizer.step() instead of scaler.step(optimizer), SGD",
    today="an update 1024 times too large",
    right="an error at that line, or an update of 0.5",
    check=lambda v: near(v, 0.5),
    refused=("scaler",),
    refs=("case 24",),
)
def plain_step_sgd(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    scaler.scale(w.sum()).backward()
    optimizer.step()
    return read(w)[0]


@record(
    "plain-step-on-scaled-gradients-adamw",
    "optimizer.step() instead of scaler.step(optimizer), AdamW",
    today="the update looks right, and the second moment is 2^20 times too large",
    right="an error at that line, or a second moment of 1e-3",
    check=lambda v: near(v, 1e-3),
    refused=("scaler",),
    refs=("case 24",),
)
def plain_step_adamw(library: Library) -> Any:
    (w, optimizer), scaler = pair(make=AdamW), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    scaler.scale(w.sum()).backward()
    optimizer.step()
    return read(optimizer.state[w]["exp_avg_sq"])[0]


@record(
    "backward-of-the-unscaled-loss",
    "scaler.scale(loss) is called and its result thrown away: loss.backward()",
    today="unscaled gradients are divided by the scale: no training, no message",
    right="an error, or an update of 0.5",
    check=lambda v: near(v, 0.5),
    refused=("scale(",),
)
def backward_of_the_loss(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    library.watch(scaler, optimizer)
    loss = w.sum()
    scaler.scale(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "one-iteration-without-scale",
    "the second of two iterations calls loss.backward() without scale()",
    today="that step is 65536 times too small",
    right="an error, or an update of 0.5 in each",
    check=lambda v: abs(v) < 1e-6,
    refused=("scale(",),
)
def iteration_without_scale(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    library.watch(scaler, optimizer)
    for scaled in (True, False):
        optimizer.zero_grad()
        loss = w.sum()
        (scaler.scale(loss) if scaled else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]


@record(
    "never-scaled",
    "step() and no loss was ever scaled",
    today="AssertionError that reads like an internal one",
    right="an error that says what to call, or an update of 0.5",
    check=lambda v: near(v, 0.5),
    refused=("scale(",),
)
def never_scaled(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    w.sum().backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "nan-written-after-unscale",
    "p.grad gets a NaN between unscale_ and step (a division by a norm of 0, say)",
    today="the verdict is older than the NaN: the weights become NaN",
    right="not applied, and the weights are finite",
    check=lambda v: v["finite"] and v["said"] is False,
)
def nan_after_unscale(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    assert w.grad is not None
    w.grad.mul_(math.nan)
    said = library.told(scaler.step(optimizer))
    return {"finite": finite([w]), "said": said}


@record(
    "edited-after-unscale",
    "p.grad is edited between unscale_ and step, as the manual allows",
    today="right",
    right="an update of 0.5 x 3",
    check=lambda v: near(v, -0.5),
    stock="right",
)
def edited_after_unscale(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    assert w.grad is not None
    w.grad.mul_(3.0)
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "clip-an-overflow",
    "unscale_ and clip_grad_norm_ of a gradient with inf in it, then step",
    today="right: the step is skipped (nobody is told)",
    right="not applied and said so; the next step subtracts 0.5",
    check=lambda v: v["said"] is False and near(v["weight"], 0.5),
)
def clip_an_overflow(library: Library) -> Any:
    (w, optimizer), scaler, said = pair(), library.scaler(), []
    for bad in (True, False):
        optimizer.zero_grad()
        loss = w.sum()
        scaler.scale(overflowing(loss) if bad else loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_([w], 10.0)
        said.append(library.told(scaler.step(optimizer)))
        scaler.update()
    return {"said": said[0], "weight": read(w)[0]}


@record(
    "retained-graph",
    "two backward passes over one scaled loss, retain_graph=True",
    today="right",
    right="an update of 0.5 x 2",
    check=lambda v: abs(v) < 1e-6,
    stock="right",
)
def retained_graph(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaled = scaler.scale(w.sum())
    scaled.backward(retain_graph=True)
    scaled.backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "gradient-penalty-without-unscaling",
    "the inner gradient of a penalty is taken of the scaled output and used as it is",
    today="the penalty is about 10^6 times too large, and so is the update",
    right="the update of an unscaled run: 1 - 0.5 x (1 + 1) = 0, or an error",
    check=lambda v: abs(v) < 1e-5,
    refused=("scale",),
    refs=("case 26",),
)
def penalty_without_unscaling(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    x = torch.ones(4, requires_grad=True)
    loss = (w * x).sum()
    (inner,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
    scaler.scale(loss + (inner.norm() - 1.0) ** 2).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "gradient-penalty-by-the-manual",
    "the inner gradient is divided by get_scale(), then the whole loss is scaled",
    today="right",
    right="gradients of loss + penalty as in an unscaled run: 1 + (2 - 1) x 2 x 1 / 2 = 2 in every weight",
    check=lambda v: near(v, 0.0) or abs(v) < 1e-5,
    refs=("case 26",),
    stock="right",
)
def penalty_by_manual(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    x = torch.ones(4, requires_grad=True)
    loss = (w * x).sum()
    (inner,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
    penalty = ((inner / scaler.get_scale()).norm() - 1.0) ** 2
    scaler.scale(loss + penalty).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "gradient-penalty-of-the-plain-loss",
    "the inner gradient is taken of the unscaled output with create_graph, then the whole loss is scaled",
    today="right in fp32",
    right="gradients of loss + penalty as in an unscaled run",
    check=lambda v: abs(v) < 1e-5,
    refs=("case 26",),
    stock="right",
)
def penalty_of_plain_loss(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    x = torch.ones(4, requires_grad=True)
    loss = (w * x).sum()
    (inner,) = torch.autograd.grad(loss, x, create_graph=True)
    scaler.scale(loss + (inner.norm() - 1.0) ** 2).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "a-bad-step-is-told",
    "the gradient overflows; what does the caller learn?",
    today="None, as after a good step",
    right="a result that is false for the bad step and true for the good one",
    check=lambda v: v == [False, True],
    refs=("F5",),
    doors=("loop", "accelerator"),
)
def bad_step_is_told(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    run = library.run(layer, [SGD(layer.parameters(), lr=0.1)])
    said = []
    for bad in (True, False):
        loss = run.forward(torch.ones(2, 4)).float().sum() / 16
        run.backward(overflowing(loss) if bad else loss)
        said += run.step()
    return said


@record(
    "wrong-order-leaves-weights-alone",
    "clip before unscale, and the error is caught by the loop",
    today="no error; the update is tiny",
    right="the weights are as before, and the next iteration, in order, subtracts 0.5",
    check=lambda v: v[0] == 1.0 and near(v[1], 0.5),
)
def wrong_order_leaves_weights(library: Library) -> Any:
    (w, optimizer), scaler, said, seen = pair(), library.scaler(), Said(library), []
    for wrong in (True, False):
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        if wrong:
            clip_grad_norm_([w], 0.1)
        said(scaler.step, optimizer)
        scaler.update()
        seen += read(w)
    return seen
