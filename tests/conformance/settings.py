"""Numbers that ruin weights or states: without a scaler, through settings, inside the optimizer (kind F)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F16, F32, Said, finite, near, overflowing, pair, read, same

RECORDS: list[Record] = []
record = collector(RECORDS, "F")
DTYPES = {"fp16": F16, "bf16": BF16, "fp32": F32}


def _safety_net(dtype: str) -> None:
    @record(
        f"no-safety-net-in-{dtype}",
        f"four batches in {dtype}, AdamW with clipping; the second has inf in it",
        today="there is no scaler to skip: every weight is NaN for good",
        right="told [True, False, True, True]; losses finite again in the third and fourth; weights finite",
        check=lambda v: v["said"] == [True, False, True, True] and v["weights"] and all(map(math.isfinite, v["losses"][2:])),
        refs=("case 71", "F11"),
        doors=("loop", "accelerator"),
    )
    def safety_net(library: Library) -> Any:
        net = nn.Linear(4, 4)
        run = library.run(net, [AdamW(net.parameters(), lr=1e-3)], dtype=DTYPES[dtype])
        said, losses = [], []
        for i in range(4):
            loss = run.forward(torch.ones(2, 4) * (math.inf if i == 1 else 1.0)).float().pow(2).mean()
            run.backward(loss)
            run.clip(1.0)
            said += run.step()
            losses.append(float(loss.detach()))
        return {"said": said, "losses": losses, "weights": finite(net.parameters())}


for _dtype in ("bf16", "fp32"):
    _safety_net(_dtype)


@record(
    "enormous-finite-gradient",
    "one gradient of 1e21 under AdamW, then good ones",
    today="its square is inf in the second moment: the weight is frozen for good, with a finite loss",
    right="not applied; the weights move again in the steps after it",
    check=lambda v: v["said"] is False and v["moved"] and v["finite"],
)
def enormous_gradient(library: Library) -> Any:
    (w, optimizer), scaler, said = pair(make=AdamW, lr=0.01, weight_decay=0.0), library.scaler(enabled=False), []
    for factor in (1.0, 1e21, 1.0):
        optimizer.zero_grad()
        before = read(w)[0]
        scaler.scale(overflowing(w.sum(), factor)).backward()
        said.append(library.told(scaler.step(optimizer)))
        scaler.update()
    states = [v for v in optimizer.state[w].values() if isinstance(v, Tensor)]
    return {"said": said[1], "moved": read(w)[0] != before, "finite": finite(states)}


def _bad_setting(name: str, value: float) -> None:
    @record(
        f"{name.replace('_', '-')}-of-{value}",
        f"a schedule or a typing error sets {name} to {value}",
        today="the weights become NaN or inf, with finite gradients and a finite loss",
        right="not applied, or a refusal that names it; the weights are as before",
        check=lambda v: v["weight"] == 1.0 and v["told"],
    )
    def bad_setting(library: Library) -> Any:
        (w, optimizer), scaler, said = pair(weight_decay=0.1, momentum=0.9), library.scaler(), Said(library)
        optimizer.param_groups[0][name] = value
        answers = []
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(w.sum()).backward()
            answers.append(library.told(said(scaler.step, optimizer)))
            scaler.update()
        return {"weight": read(w)[0], "told": answers == [False, False] or said.names(name)}


for _setting, _value in (("lr", math.inf), ("lr", math.nan), ("weight_decay", math.nan), ("momentum", math.nan)):
    _bad_setting(_setting, _value)


@record(
    "learning-rate-tensor-of-nan",
    "the learning rate is a tensor (capturable) that a schedule made NaN",
    today="the weights become NaN",
    right="not applied, or a refusal that names lr; the weights are finite",
    check=lambda v: v["finite"] and v["said"] is False,
    refused=("lr",),
)
def tensor_lr(library: Library) -> Any:
    (w, optimizer), scaler = pair(make=AdamW, lr=torch.tensor(0.1)), library.scaler()
    optimizer.param_groups[0]["lr"].fill_(math.nan)
    scaler.scale(w.sum()).backward()
    said = library.told(scaler.step(optimizer))
    return {"finite": finite([w]), "said": said}


@record(
    "overflow-inside-the-optimizer",
    "a finite gradient of 2^40 times a finite learning rate of 1e30",
    today="the weights become inf, with nothing non-finite before",
    right="not applied, or a refusal; the weights are finite",
    check=lambda v: v["finite"],
    refused=("lr",),
    pending="weights are not looked at after the update",
)
def overflow_inside_optimizer(library: Library) -> Any:
    (w, optimizer), scaler = pair(lr=1e30), library.scaler(enabled=False)
    scaler.scale((w * 2.0**40).sum()).backward()
    scaler.step(optimizer)
    return {"finite": finite([w])}


@record(
    "clipping-spreads-a-nan",
    "bf16 without scaling: one of two parameters has a NaN gradient, torch's clip_grad_norm_, step",
    today="the norm is NaN and multiplies every gradient: all weights become NaN",
    right="not applied; both weights as before",
    check=lambda v: v["weights"] == [1.0, 1.0] and v["said"] is False,
    refs=("case 71",),
)
def clipping_spreads(library: Library) -> Any:
    (a, _), (b, _), scaler = pair(), pair(), library.scaler(enabled=False)
    optimizer = SGD([a, b], lr=0.5)
    scaler.scale(overflowing(a, math.nan).sum() + b.sum()).backward()
    clip_grad_norm_([a, b], 1.0)
    said = library.told(scaler.step(optimizer))
    return {"weights": read(a, b), "said": said}


@record(
    "moments-after-refused-steps",
    "AdamW: ten overflows between two good steps",
    today="right: moments and weights are those of two good steps",
    right="bit-equal to a run of the two good steps alone",
    check=lambda v: v,
    stock="right",
)
def moments(library: Library) -> Any:
    def train(bad: tuple[bool, ...]) -> list[Tensor]:
        (w, optimizer), scaler = pair(make=AdamW, lr=0.1), library.scaler(1024.0)
        for overflow in bad:
            optimizer.zero_grad()
            loss = (w * w).sum()
            scaler.scale(overflowing(loss) if overflow else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [w, *(v for v in optimizer.state[w].values() if isinstance(v, Tensor))]

    some, others = train((False, *([True] * 10), False)), train((False, False))
    return same(some, others) and near(read(some[0])[0], 0.8, 0.01)
