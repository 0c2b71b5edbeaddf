"""Steps: habits of loops around the scaler, right and wrong (kind E)."""

from __future__ import annotations

import math
import pickle
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from conformance.adapter import Library, Record, collector
from conformance.tools import near, overflowing, pair, read, weight

RECORDS: list[Record] = []
record = collector(RECORDS, "E")


@record(
    "fp32-phase-without-a-scaler",
    "five plain fp32 steps by optimizer.step(), then five scaled ones, then five plain ones again",
    today="right",
    right="fifteen updates of 0.5",
    check=lambda v: near(v, 1.0 - 15 * 0.5),
    stock="right",
)
def fp32_phase(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    library.watch(scaler, optimizer)
    for i in range(15):
        optimizer.zero_grad()
        if 5 <= i < 10:
            scaler.scale(w.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            w.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return read(w)[0]


@record(
    "second-optimizer-without-the-scaler",
    "one optimizer is scaled; a second one (a learned temperature in fp32) steps by itself on its own loss",
    today="right",
    right="an update of 0.5 in both",
    check=lambda v: near(v, [0.5, 0.5]),
    stock="right",
)
def second_without_scaler(library: Library) -> Any:
    (a, first), (b, second), scaler = pair(), pair(), library.scaler(1024.0)
    library.watch(scaler, first)
    scaler.scale(a.sum()).backward()
    b.sum().backward()  # type: ignore[no-untyped-call]
    second.step()
    scaler.step(first)
    scaler.update()
    return read(a, b)


@record(
    "plain-step-after-unscale",
    "unscale_, the loop's own check, then optimizer.step() (a plain call on true gradients), update",
    today="right",
    right="two updates of 0.5, or a refusal that says which step to call",
    check=lambda v: abs(v) < 1e-6,
    refused=("scaler",),
    stock="right",
)
def plain_step_after_unscale(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
    return read(w)[0]


@record(
    "model-copied-in-mid-run",
    "weights are restored from a copy in mid-run (a restart at the best point), in place and with the optimizer's state",
    today="right",
    right="two updates of 0.5 from the restored weight 3",
    check=lambda v: near(v, 2.0),
    stock="right",
)
def restored(library: Library) -> Any:
    (w, optimizer), scaler = pair(3.0), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    start, state = w.detach().clone(), optimizer.state_dict()
    for i in range(4):
        if i == 2:
            with torch.no_grad():
                w.copy_(start)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]


@record(
    "optimizer-with-two-groups-and-lr-zero",
    "one parameter group has lr 0 (a warm-up, a frozen backbone)",
    today="right",
    right="told applied where the library tells; weights 1 and 0.5",
    check=lambda v: near(v, [1.0, 0.5]),
    stock="right",
)
def lr_zero(library: Library) -> Any:
    a, b, scaler = weight(), weight(), library.scaler(1024.0)
    optimizer = SGD([{"params": [a], "lr": 0.0}, {"params": [b], "lr": 0.5}], lr=0.1)
    scaler.scale(a.sum() + b.sum()).backward()
    scaler.step(optimizer)
    return read(a, b)


@record(
    "maximize-and-negative-loss",
    "a negative loss under maximize=True with AdamW, foreach",
    today="right",
    right="an update of +0.1 (AdamW's first step), without decay",
    check=lambda v: near(v, 1.1, 1e-4),
    stock="wrong",
)
def maximize(library: Library) -> Any:
    (w, optimizer), scaler = pair(make=AdamW, lr=0.1, weight_decay=0.0, maximize=True), library.scaler(1024.0)
    scaler.scale(w.sum() - 100.0).backward()
    answer = library.told(scaler.step(optimizer))
    return read(w)[0] if answer else 0.0


@record(
    "zero-grad-between-scale-and-backward",
    "scaled = scaler.scale(loss); optimizer.zero_grad(); scaled.backward(), three steps",
    today="right",
    right="three updates of 0.5",
    check=lambda v: near(v, -0.5),
    stock="right",
)
def zero_between(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    for _ in range(3):
        scaled = scaler.scale(w.sum())
        optimizer.zero_grad()
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]


@record(
    "gradients-not-cleared",
    "zero_grad() is forgotten",
    today="scaled gradients are added to unscaled ones",
    right="updates of 0.5 and 0.5 x 2, or a refusal that says zero_grad",
    check=lambda v: near(v, -0.5),
    refused=("zero_grad",),
)
def not_cleared(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    for _ in range(2):
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]


@record(
    "clip-without-unscale-when-scaling-is-off",
    "the bf16 loop: enabled=False, torch's clip_grad_norm_, step",
    today="right",
    right="an update of norm 1",
    check=lambda v: near(v, 1.0, 1e-4),
    refs=("case 71",),
    stock="right",
)
def clip_when_off(library: Library) -> Any:
    w, scaler = weight(), library.scaler(enabled=False)
    optimizer = SGD([w], lr=1.0)
    scaler.scale((w * 3).sum()).backward()
    clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return float((1.0 - w.detach()).norm()) if library.name != "careless" else 0.0


@record(
    "a-nan-loss-that-is-left-out",
    "the loop scales a NaN loss, looks at it, and goes on to the next batch without a backward pass",
    today="right",
    right="the next batch is trained on",
    check=lambda v: near(v, 0.5),
    stock="right",
)
def nan_left_out(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    for factor in (math.nan, 1.0):
        optimizer.zero_grad()
        scaled = scaler.scale(w.sum() * factor)
        if not bool(scaled.isfinite()):
            continue
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
    return read(w)[0]


class _Wrapper:
    """Not a torch optimizer: has its param_groups, step and zero_grad (Lookahead, a learning-rate adapter)."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups, self.state, self.steps = inner, inner.param_groups, inner.state, 0

    def step(self) -> None:
        self.inner.step()
        self.steps += 1

    def zero_grad(self) -> None:
        self.inner.zero_grad()


@record(
    "an-optimizer-in-a-wrapper",
    "scaler.step(wrapper), where the wrapper is no torch optimizer; an overflow and a good step",
    today="right",
    right="one update of 0.5",
    check=lambda v: near(v["weight"], 0.5) and v["steps"] == 1,
    stock="right",
)
def in_a_wrapper(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    wrapper = _Wrapper(optimizer)
    for bad in (True, False):
        wrapper.zero_grad()
        loss = w.sum()
        scaler.scale(overflowing(loss) if bad else loss).backward()
        scaler.step(wrapper)
        scaler.update()
    return {"weight": read(w)[0], "steps": wrapper.steps}


@record(
    "a-scaler-in-a-pickle",
    "pickle.dumps of a scaler that has stepped, and a step with what comes back",
    today="right",
    right="the same scale, and an update of 0.5",
    check=lambda v: v["scale"] and near(v["weight"], 0.5),
    stock="right",
)
def pickled(library: Library) -> Any:
    (w, optimizer), scaler = pair(2.0), library.scaler(1024.0)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    other = pickle.loads(pickle.dumps(scaler))  # noqa: S301  made two lines above
    (late, new) = pair()
    other.scale(late.sum()).backward()
    other.step(new)
    return {"scale": other.get_scale() == scaler.get_scale(), "weight": read(late)[0]}
