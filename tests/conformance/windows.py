"""Steps: accumulation windows (kind E)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from conformance.adapter import Library, Record, collector
from conformance.tools import F16, near, overflowing, pair, read

RECORDS: list[Record] = []
record = collector(RECORDS, "E")


@record(
    "overflow-in-the-last-micro-batch",
    "a window of three, whose last micro-batch overflows",
    today="the window is skipped; nobody is told",
    right="told False, weights as before; the next window moves them by 0.5",
    check=lambda v: v["said"] == [False, True] and near(v["weights"], [1.0, 0.5]),
)
def overflow_in_last(library: Library) -> Any:
    return _windows(library, bad_at=2)


@record(
    "overflow-in-the-first-micro-batch",
    "a window of three, whose first micro-batch overflows",
    today="the window is skipped; nobody is told",
    right="told False, weights as before; the next window moves them by 0.5",
    check=lambda v: v["said"] == [False, True] and near(v["weights"], [1.0, 0.5]),
)
def overflow_in_first_micro(library: Library) -> Any:
    return _windows(library, bad_at=0)


def _windows(library: Library, bad_at: int) -> dict[str, Any]:
    (w, optimizer), scaler, said, seen = pair(), library.scaler(1024.0), [], []
    for window in range(2):
        for micro in range(3):
            loss = w.sum() / 3
            scaler.scale(overflowing(loss) if (window, micro) == (0, bad_at) else loss).backward()
        said.append(library.told(scaler.step(optimizer)))
        scaler.update()
        optimizer.zero_grad()
        seen += read(w)
    return {"said": said, "weights": seen}


@record(
    "nan-loss-with-finite-gradients",
    "a micro-batch's loss is NaN and its gradient is finite (a NaN term that does not depend on the weights)",
    today="the step is taken although the loss of the step is NaN",
    right="not applied, and told so",
    check=lambda v: v["said"] is False and v["weight"] == 1.0,
)
def nan_loss_finite_gradient(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum() / 2).backward()
    scaler.scale(w.sum() / 2 + math.nan).backward()
    said = library.told(scaler.step(optimizer))
    return {"said": said, "weight": read(w)[0]}


@record(
    "window-cleared-with-zeros",
    "zero_grad(set_to_none=False) between windows",
    today="right",
    right="an update of 0.5 in each of two windows",
    check=lambda v: abs(v) < 1e-6,
    stock="right",
)
def cleared_with_zeros(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    for _ in range(2):
        for _ in range(2):
            scaler.scale(w.sum() / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    return read(w)[0]


@record(
    "window-before-zero-grad-at-its-start",
    "zero_grad() stands at the start of each iteration, after the last one's step",
    today="right",
    right="an update of 0.5 in each of three steps",
    check=lambda v: near(v, -0.5),
    stock="right",
)
def zero_grad_first(library: Library) -> Any:
    (w, optimizer), scaler = pair(make=SGD), library.scaler()
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]


@record(
    "two-losses-one-of-them-auxiliary",
    "main and auxiliary loss are scaled and run backward one after the other into the same weights",
    today="right",
    right="an update of 0.5 x (1 + 2)",
    check=lambda v: near(v, -0.5),
    stock="right",
)
def auxiliary_loss(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    scaler.scale((w * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return read(w)[0]


@record(
    "accumulation-through-the-accelerator",
    "a window of two through accumulate(), with step and zero_grad in each micro-batch",
    today="right (Accelerate, in fp32)",
    right="the mean of both: 1 - 0.5",
    check=lambda v: near(v, 0.5, 1e-3),
    stock="right",
    doors=("accelerator",),
)
def accumulation_through_accelerator(library: Library) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    accelerator = library.accelerator("fp16", gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(layer, SGD(layer.parameters(), lr=0.5))
    for value in (0.5, 1.5):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), value)).float().sum())
            optimizer.step()
            optimizer.zero_grad()
    return read(layer.weight)[0]


@record(
    "half-precision-window",
    "a window of 64 equal micro-batches of an fp16 model kept in fp32 weights",
    today="right",
    right="the gradient is that of one micro-batch to 1e-6",
    check=lambda v: abs(v) < 1e-6,
    refs=("F14",),
    stock="right",
)
def half_precision_window(library: Library) -> Any:
    layer = nn.Linear(8, 1)
    optimizer, scaler, inputs = SGD(layer.parameters(), lr=1.0), library.scaler(1024.0), torch.randn(4, 8)

    def gradient(count: int) -> Tensor:
        optimizer.zero_grad()
        for _ in range(count):
            with library.autocast(F16):
                out = layer(inputs)
            scaler.scale(out.float().mean() / count).backward()
        scaler.unscale_(optimizer)
        assert layer.weight.grad is not None
        grad = layer.weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        return grad

    one, many = gradient(1), gradient(64)
    return float((one - many).norm() / one.norm()) + float((one.norm() - inputs.mean(0).norm()).abs() > 1e-2)
