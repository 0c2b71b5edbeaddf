"""What is given to scale() and update(), and several scalers (kind D)."""

from __future__ import annotations

import math
from typing import Any

from conformance.adapter import Library, Record, collector
from conformance.tools import F16, near, overflowing, pair, read

RECORDS: list[Record] = []
record = collector(RECORDS, "D")


@record(
    "a-list-of-losses",
    "scale() of a list of losses",
    today="right",
    right="a list of scaled losses whose gradients add up",
    check=lambda v: v[0] is list and near(v[1], 1.0 - 0.5 * 5),
    stock="right",
)
def list_of_losses(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(256.0)
    scaled = scaler.scale([(w * 2).sum(), (w * 3).sum()])
    (scaled[0] + scaled[1]).backward()
    scaler.step(optimizer)
    return type(scaled), read(w)[0]


@record(
    "an-integer-loss",
    "the loss is a count: an integer tensor without a graph",
    today="scaled to a float; backward() then says that element 0 does not require grad",
    right="refused with a remedy",
    check=lambda v: False,
    refused=("loss",),
)
def integer_loss(library: Library) -> Any:
    (w, _), scaler = pair(), library.scaler()
    scaler.scale((w > 0).sum()).backward()


@record(
    "a-detached-loss",
    "the loss was detached, or made of .item() values",
    today="backward() says that element 0 does not require grad, and not what to look for",
    right="refused with a remedy",
    check=lambda v: False,
    refused=("loss",),
)
def detached_loss(library: Library) -> Any:
    (w, _), scaler = pair(), library.scaler()
    scaler.scale(w.sum().detach()).backward()


@record(
    "a-16-bit-loss-overflows-when-scaled",
    "an fp16 loss of shape (1,) times 65536",
    today="the product stays fp16 and is inf, and so is the gradient: the step is lost",
    calibrated=True,
    right="the step is taken and subtracts 0.5",
    check=lambda v: near(v, 0.5, 1e-3),
)
def half_loss_overflows(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    loss = w.to(F16).sum(0, keepdim=True)
    scaler.scale(loss).sum().backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "update-called-twice",
    "update() once by the loop and once by a helper",
    today="AssertionError about inf checks",
    right="the second call changes nothing",
    check=lambda v: v[0] == v[1] and near(v[2], 0.5),
    refused=("update",),
)
def update_twice(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(growth_interval=2)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    first = scaler.get_scale()
    scaler.update()
    return first, scaler.get_scale(), read(w)[0]


@record(
    "the-scale-is-set-inside-a-window",
    "update(new_scale) between two micro-batches",
    today="gradients made under the old scale are divided by the new one",
    right="the update is 0.5 x (1 + 1), or a refusal",
    check=lambda v: near(v, 0.0) if v == 0 else abs(v) < 1e-6,
    refused=("scale",),
)
def scale_set_inside_a_window(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    scaler.scale(w.sum()).backward()
    scaler.update(16.0)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "two-scalers-one-optimizer",
    "two scalers of different scale, one per loss, and one step",
    today="gradients of the second loss are divided by the scale of the first: 64 times too large",
    right="the update is 0.5 x (1 + 1), or a refusal",
    check=lambda v: abs(v) < 1e-5,
    refused=("scale",),
)
def two_scalers(library: Library) -> Any:
    (w, optimizer), one, other = pair(), library.scaler(16.0), library.scaler(1024.0)
    one.scale(w.sum()).backward()
    other.scale(w.sum()).backward()
    one.step(optimizer)
    return read(w)[0]


@record(
    "a-scaler-that-is-off",
    "enabled=False: the same loop in fp32",
    today="right",
    right="the update of an unscaled loop, and a NaN gradient does not reach the weights",
    check=lambda v: near(v, [0.5, 0.5]),
    refs=("case 71",),
)
def scaler_off(library: Library) -> Any:
    (w, optimizer), scaler, seen = pair(), library.scaler(enabled=False), []
    for factor in (1.0, math.nan):
        optimizer.zero_grad()
        scaler.scale(w.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += read(w)
    return seen


@record(
    "one-overflow-costs-one-halving",
    "one overflow in two optimizers that share the scaler, update() after each step",
    today="the scale is halved once: right in value, and nobody is told which optimizer held still",
    right="the next two steps of both are taken, and the scale is neither 0 nor more than it was",
    check=lambda v: v["scale"] <= v["before"] and v["scale"] >= 1 and near(v["weights"], [0.0, 0.0]) and v["said"] == [False, False],
)
def one_overflow(library: Library) -> Any:
    (a, first), (b, second), scaler, said = pair(), pair(), library.scaler(1024.0), []
    before = 0.0
    for i in range(3):
        first.zero_grad()
        second.zero_grad()
        loss = a.sum() + b.sum()
        scaled = scaler.scale(overflowing(loss) if i == 0 else loss)
        before = before or scaler.get_scale()
        scaled.backward()
        for optimizer in (first, second):
            answer = library.told(scaler.step(optimizer))
            if i == 0:
                said.append(answer)
            scaler.update()
    return {"scale": scaler.get_scale(), "before": before, "weights": read(a, b), "said": said}
