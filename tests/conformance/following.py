"""What must follow the truth of a step: schedules, averages, counters, hooks (kind E)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conformance.adapter import Library, Record, collector
from conformance.tools import near, overflowing, pair, read

RECORDS: list[Record] = []
record = collector(RECORDS, "E")
BAD = (True, False, True, False, False)


def _scheduled(library: Library, scheduler: Any, run: Any, optimizer: Optimizer, bad: tuple[bool, ...]) -> list[float]:
    """Learning rates that the steps were taken (or would have been taken) with."""
    rates = []
    for overflow in bad:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = run.forward(torch.ones(2, 4)).float().sum() / 16
        run.backward(overflowing(loss) if overflow else loss)
        run.step()
    return rates


@record(
    "schedule-during-skips",
    "a warm-up that rises with each step; the first and third of five steps overflow",
    today="the schedule runs on: the first real step has the second rate",
    right="rates 0.1, 0.1, 0.2, 0.2, 0.3: the schedule counts steps that were taken",
    check=lambda v: near(v, [0.1, 0.1, 0.2, 0.2, 0.3]),
    refs=("case 18",),
    doors=("loop", "accelerator"),
)
def schedule_during_skips(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    optimizer = SGD(layer.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda epoch: (epoch + 1) / 10)
    return _scheduled(library, scheduler, library.run(layer, [optimizer], scheduler), optimizer, BAD)


@record(
    "schedule-under-a-fused-optimizer",
    "the same with fused AdamW, whose step() is called although it changes nothing",
    today="the schedule runs on, and nothing could tell it",
    right="rates 0.1, 0.1, 0.2, 0.2, 0.3",
    check=lambda v: near(v, [0.1, 0.1, 0.2, 0.2, 0.3]),
    refs=("F5", "case 18"),
    doors=("loop", "accelerator"),
)
def schedule_under_fused(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    optimizer = AdamW(layer.parameters(), lr=1.0, fused=True)
    scheduler = LambdaLR(optimizer, lambda epoch: (epoch + 1) / 10)
    return _scheduled(library, scheduler, library.run(layer, [optimizer], scheduler), optimizer, BAD)


@record(
    "one-cycle-ends-too-early",
    "OneCycleLR of ten steps; three overflows, then ten good steps",
    today="ValueError in the eleventh iteration: one step more than the schedule has",
    right="the tenth good step has the rate that the tenth step of a run without overflows has",
    check=lambda v: near(v[0], v[1]),
    refs=("case 18",),
)
def one_cycle(library: Library) -> Any:
    last = []
    for bad in ((True,) * 3 + (False,) * 10, (False,) * 10):
        layer = nn.Linear(4, 1)
        optimizer = SGD(layer.parameters(), lr=1.0)
        scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
        last.append(_scheduled(library, scheduler, library.run(layer, [optimizer], scheduler), optimizer, bad)[-1])
    return last


@record(
    "sequential-schedule",
    "SequentialLR whose second part begins after two steps; two overflows first",
    today="the second part begins before any step was taken",
    right="rates 0.1 while nothing is taken, then 0.1, 0.1, 1.0",
    check=lambda v: near(v, [0.1] * 4 + [1.0]),
    refs=("case 18",),
)
def sequential(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    optimizer = SGD(layer.parameters(), lr=1.0)
    parts: list[Any] = [LambdaLR(optimizer, lambda epoch: 0.1), LambdaLR(optimizer, lambda epoch: 1.0)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The epoch parameter", category=UserWarning)
        scheduler = SequentialLR(optimizer, parts, milestones=[2])
        return _scheduled(library, scheduler, library.run(layer, [optimizer], scheduler), optimizer, (True, True, False, False, False))


@record(
    "plateau-counts-skipped-steps",
    "ReduceLROnPlateau(patience=2) is given the loss in each iteration; four iterations overflow",
    today="four losses without progress: the rate falls although nothing was tried",
    right="the rate is still 1",
    check=lambda rate: rate == 1.0,
    refs=("case 18",),
)
def plateau(library: Library) -> Any:
    (w, optimizer), scaler = pair(lr=1.0), library.scaler()
    library.watch(scaler, optimizer)
    scheduler = library.follow(scaler, ReduceLROnPlateau(optimizer, patience=2, factor=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        loss = w.sum()
        scaler.scale(overflowing(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(float(loss.detach()))
    return float(optimizer.param_groups[0]["lr"])


@record(
    "warning-of-a-wrong-order-that-is-right",
    "the first step is skipped, then scheduler.step()",
    today="warns that lr_scheduler.step() was called before optimizer.step()",
    right="no warning",
    check=lambda said: said == [],
    refs=("case 18",),
)
def warning_of_order(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    optimizer = SGD(layer.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    run = library.run(layer, [optimizer], scheduler)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _scheduled(library, scheduler, run, optimizer, (True, False))
    return [str(w.message) for w in said]


@record(
    "resumed-schedule-state",
    "state_dict() of the schedule after two overflows and two good steps",
    today="it says that four steps were taken",
    right="last_epoch is 2, and a schedule that loads it has the rate of the third step",
    check=lambda v: v["epoch"] == 2 and near(v["rate"], 0.3),
    refs=("case 18",),
)
def resumed_schedule(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    optimizer = SGD(layer.parameters(), lr=1.0)
    run = library.run(layer, [optimizer], LambdaLR(optimizer, lambda epoch: (epoch + 1) / 10))
    scheduler = run.scheduler  # type: ignore[attr-defined]
    _scheduled(library, scheduler, run, optimizer, (True, True, False, False))
    state, other = scheduler.state_dict(), SGD(layer.parameters(), lr=1.0)
    fresh = LambdaLR(other, lambda epoch: (epoch + 1) / 10)
    fresh.load_state_dict(state)
    return {"epoch": state["last_epoch"], "rate": fresh.get_last_lr()[0]}


@record(
    "average-counts-skipped-steps",
    "AveragedModel (equal weights) updated in each iteration; two of three iterations overflow",
    today="the average holds the start three times",
    right="it was updated once, with the weights after the good step",
    check=lambda v: v["count"] == 1 and near(v["average"], 0.5),
    refs=("F5",),
)
def average_counts(library: Library) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer, scaler, average = SGD(layer.parameters(), lr=0.5), library.scaler(), AveragedModel(layer)
    follow = library.after_step(scaler, optimizer, lambda: average.update_parameters(layer))
    for bad in (True, False, True):
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 1)).sum()
        scaler.scale(overflowing(loss) if bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        follow()
    return {"count": int(average.n_averaged), "average": read(*average.parameters())[0]}


@record(
    "ema-through-skips",
    "an EMA with decay 0.5; two good steps, then ten overflows",
    today="the average moves on during the skips: 2^-12",
    right="0.25: the mean of the weights after the good steps, 0.5 and 0",
    check=lambda v: near(v, 0.25),
)
def ema_through_skips(library: Library) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer, scaler = SGD(layer.parameters(), lr=0.5), library.scaler()
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    follow = library.after_step(scaler, optimizer, lambda: average.update_parameters(layer))
    for i in range(12):
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 1)).sum()
        scaler.scale(overflowing(loss) if i > 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        follow()
    return read(*average.parameters())[0]


@record(
    "step-hooks-on-a-skipped-fused-step",
    "a post hook of a fused optimizer (which averages or counts); one of two steps overflows",
    today="the hook runs for the skipped step too: fused optimizers are called and told not to",
    right="the hook ran once",
    check=lambda calls: calls == 1,
    refs=("F5",),
)
def hooks_on_fused(library: Library) -> Any:
    (w, optimizer), scaler, calls = pair(make=AdamW, fused=True), library.scaler(), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for bad in (True, False):
        optimizer.zero_grad()
        loss = w.sum()
        scaler.scale(overflowing(loss) if bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return len(calls)


@record(
    "step-hooks-on-good-steps",
    "pre and post hooks of an optimizer, three good steps",
    today="right",
    right="each ran three times, on unscaled gradients",
    check=lambda v: near(v, [1.0] * 6),
    stock="right",
)
def hooks_on_good_steps(library: Library) -> Any:
    (w, optimizer), scaler, seen = pair(), library.scaler(), []

    def look(*_: Any) -> None:
        assert w.grad is not None
        seen.append(float(w.grad[0]))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return seen


@record(
    "two-schedules-two-optimizers",
    "each optimizer has a schedule; only the first overflows",
    today="both schedules run on",
    right="rates after the step: 1 for the first, 0.5 for the second",
    check=lambda v: near(v, [1.0, 0.5]),
    refs=("F4", "case 18"),
)
def two_schedules(library: Library) -> Any:
    (a, first), (b, second), scaler = pair(lr=1.0), pair(lr=1.0), library.scaler()
    library.watch(scaler, first, second)
    schedules = [library.follow(scaler, LambdaLR(o, lambda epoch: 0.5**epoch)) for o in (first, second)]
    scaler.scale(overflowing(a).sum() + b.sum()).backward()
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    for schedule in schedules:
        schedule.step()
    return [float(o.param_groups[0]["lr"]) for o in (first, second)]


@record(
    "schedule-inside-a-window",
    "scheduler.step() in each of two micro-batches, step() only in the second",
    today="the schedule moves twice per step",
    right="the rate after the window is that of one step, 0.5",
    check=lambda rate: near(rate, 0.5),
    refs=("case 18",),
)
def schedule_inside_window(library: Library) -> Any:
    (w, optimizer), scaler = pair(lr=1.0), library.scaler()
    library.watch(scaler, optimizer)
    schedule = library.follow(scaler, LambdaLR(optimizer, lambda epoch: 0.5**epoch))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of", category=UserWarning)
        for micro in range(2):
            scaler.scale(w.sum()).backward()
            if micro == 1:
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
    return float(optimizer.param_groups[0]["lr"])


@record(
    "norm-of-a-good-step",
    "what the norm of a good step is said to be",
    today="torch's step says nothing",
    right="2, the norm of four ones, unscaled",
    check=lambda v: v is not None and near(v, 2.0),
)
def norm_of_step(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    return getattr(scaler.step(optimizer), "grad_norm", None)


@record(
    "culprit-of-a-bad-step",
    "one of two named parameters overflows; what does the caller learn?",
    today="nothing",
    right="the name of that parameter and not the other's",
    check=lambda names: names == ["0.weight"],
)
def culprit(library: Library) -> Any:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    optimizer, scaler = SGD(net.parameters(), lr=0.1), library.scaler(1024.0)
    library.watch(scaler, net, optimizer)
    hidden = overflowing(net[0](torch.ones(1, 2)))
    scaler.scale(net[1](hidden).sum()).backward()
    return [c.name for c in getattr(scaler.step(optimizer), "culprits", ())]


@record(
    "counter-of-applied-steps",
    "AdamW's own step counter after one overflow and two good steps, foreach and fused",
    today="right: 2 in both",
    right="2 in both: bias correction counts applied steps",
    check=lambda v: v == [2.0, 2.0],
    stock="right",
)
def counter(library: Library) -> Any:
    counts = []
    for fused in (False, True):
        (w, optimizer), scaler = pair(make=AdamW, fused=fused), library.scaler()
        for bad in (True, False, False):
            optimizer.zero_grad()
            loss = w.sum()
            scaler.scale(overflowing(loss) if bad else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        counts += read(optimizer.state[w]["step"])
    return counts
