"""Steps: scale, unscale, clip, edit and step in every order that people write (kind E)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD

from conformance.adapter import Library, Record, collector
from conformance.tools import near, overflowing, pair, read

RECORDS: list[Record] = []
record = collector(RECORDS, "E")


@record(
    "clip-before-unscale",
    "torch's clip_grad_norm_(1.0) straight after the backward pass",
    today="clips scaled gradients: the update's norm is 1.5e-5 instead of 1",
    right="an update of norm 1, or an error at the line that steps",
    check=lambda v: near(v, 1.0, 1e-4),
    refused=("unscale",),
    refs=("F2", "case 19"),
)
def clip_before_unscale(library: Library) -> Any:
    (w, optimizer), scaler = pair(lr=1.0), library.scaler()
    scaler.scale((w * 3).sum()).backward()
    clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    return float((1.0 - w.detach()).norm())


@record(
    "clip-before-unscale-by-the-librarys-function",
    "the library's own clip straight after the backward pass",
    today="the only function there is clips scaled gradients",
    right="a reported norm of 6 and an update of norm 1",
    check=lambda v: near(v, [6.0, 1.0], 1e-4),
    refs=("F2", "case 19"),
)
def clip_by_library(library: Library) -> Any:
    (w, optimizer), scaler = pair(lr=1.0), library.scaler()
    library.watch(scaler, optimizer)
    scaler.scale((w * 3).sum()).backward()
    norm = library.clip(scaler, optimizer, [w], 1.0)
    scaler.step(optimizer)
    return norm, float((1.0 - w.detach()).norm())


@record(
    "clip-by-the-manual",
    "the order of the manual: backward, unscale, clip, step",
    today="right",
    right="a reported norm of 0.75 and an update of norm 0.25",
    check=lambda v: near(v, [0.75, 0.25], 1e-3),
    refs=("case 19",),
    stock="right",
    doors=("loop", "accelerator"),
)
def clip_by_manual(library: Library) -> Any:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(layer.weight)
    run = library.run(layer, [SGD(layer.parameters(), lr=1.0)])
    run.backward(run.forward(torch.full((1, 4), 3.0)).float().sum() / 8)
    norm = run.clip(0.25)
    run.step()
    return norm, float((1.0 - layer.weight.detach()).norm())


@record(
    "clip-values-before-unscale",
    "clip_grad_value_(1.0) straight after the backward pass",
    today="every scaled gradient is cut to 1, then divided by the scale",
    right="an update of 0.5 in every weight, or an error at the line that steps",
    check=lambda v: near(v, 0.5),
    refused=("unscale",),
    refs=("case 19",),
)
def clip_values(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale((w * 3).sum()).backward()
    clip_grad_value_([w], 1.0)
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "decay-added-before-unscale",
    "an L2 term added to p.grad by hand between backward and step",
    today="the term is divided by the scale: no decay at all",
    right="an update of 0.5 x (1 + 0.5), or an error",
    check=lambda v: near(v, 0.25),
    refused=("unscale",),
)
def decay_added(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    assert w.grad is not None
    w.grad.add_(w.detach(), alpha=0.5)
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "gradient-replaced-before-unscale",
    "p.grad is set to a new tensor of true size (a centred, projected or noisy gradient)",
    today="the new gradient is divided by a scale it never had",
    right="an update of 0.5, or an error",
    check=lambda v: near(v, 0.5),
    refused=("unscale",),
)
def gradient_replaced(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    w.grad = torch.ones_like(w)
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "unscaled-by-hand",
    "p.grad /= scaler.get_scale(), then scaler.step",
    today="divided by the scale twice",
    right="an update of 0.5, or an error",
    check=lambda v: near(v, 0.5),
    refused=("unscale",),
)
def unscaled_by_hand(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    assert w.grad is not None
    w.grad.div_(scaler.get_scale())
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "divided-by-the-window",
    "p.grad.div_(4) after four micro-batches, in the block for such edits where the library has one",
    today="right",
    right="an update of 0.5, the mean of the four",
    check=lambda v: near(v, 0.5),
    stock="right",
)
def divided_by_window(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    library.watch(scaler, optimizer)
    for _ in range(4):
        scaler.scale(w.sum()).backward()
    with library.edits(scaler):
        assert w.grad is not None
        w.grad.div_(4.0)
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "unscaled-in-every-micro-batch",
    "unscale_ and clip in each micro-batch of a window of two",
    today="RuntimeError that does not say what to do",
    right="clipped once at the end, or an error with the remedy",
    check=lambda v: near(v, 0.5),
    refused=("unscale", "once"),
    refs=("case 20",),
)
def unscaled_each_micro_batch(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    for _ in range(2):
        scaler.scale(w.sum() / 2).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_([w], 10.0)
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "backward-after-unscale",
    "unscale_, then another micro-batch's backward pass, then step",
    today="scaled gradients are added to unscaled ones and used as they are",
    right="an update of 0.5 x (1 + 1), or an error",
    check=lambda v: abs(v) < 1e-6,
    refused=("unscale",),
)
def backward_after_unscale(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "sam-by-hand",
    "unscale_ to climb, zero_grad, a second backward pass, step (SAM in two passes)",
    today="the second gradient is taken for unscaled: an update 65536 times too large",
    right="an update of 0.5, or an error",
    check=lambda v: near(v, 0.5),
    refused=("unscale",),
)
def sam_by_hand(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "a-bad-batch-thrown-away-by-the-loop",
    "the loop reads the norm after unscale_, clears the gradients of a bad batch and goes on",
    today="RuntimeError in the next batch: unscale_() has already been called",
    right="the next batch is trained on: an update of 0.5",
    check=lambda v: near(v, 0.5),
)
def thrown_away(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    for bad in (True, False):
        loss = w.sum()
        scaler.scale(overflowing(loss) if bad else loss).backward()
        scaler.unscale_(optimizer)
        if not math.isfinite(float(clip_grad_norm_([w], 10.0))):
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]


@record(
    "no-update",
    "update() is forgotten, two steps",
    today="RuntimeError that does not name the missing line's place",
    right="both steps are taken, or an error that names update()",
    check=lambda v: abs(v) < 1e-6,
    refused=("update()",),
)
def no_update(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
    return read(w)[0]


@record(
    "stepped-twice-for-one-backward",
    "step() and update() twice after one backward pass",
    today="the second step divides the same gradients by the scale again and is taken",
    right="an update of 0.5 per step, or an error",
    check=lambda v: abs(v) < 1e-6,
    refused=("backward",),
)
def stepped_twice(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]
