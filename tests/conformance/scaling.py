"""The life of the loss scale: start, growth, collapse, resume (kind D)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from conformance.adapter import Library, Record, collector
from conformance.tools import F16, Said, above, copies, finite, near, overflowing, pair, read, same, weight

RECORDS: list[Record] = []
record = collector(RECORDS, "D")


def _net(factor: float = 1.0) -> tuple[nn.Module, Tensor, Tensor]:
    """A small regression whose losses and gradients grow with `factor`."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) * factor
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), inputs, inputs.sum(1, keepdim=True)


def _lost(library: Library, scaler: Any, net: nn.Module, inputs: Tensor, targets: Tensor, steps: int, lr: float = 1e-3) -> int:
    """How many of so many fp16 steps left the weights as they were."""
    optimizer, lost = SGD(net.parameters(), lr=lr), 0
    for _ in range(steps):
        optimizer.zero_grad()
        with library.autocast(F16):
            loss = F.mse_loss(net(inputs), targets)
        before = copies(net.parameters())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        lost += same(before, net.parameters())
    return lost


@record(
    "scale-collapses",
    "166 steps whose gradient overflows, then a healthy one",
    today="the scale halves to 0, 1 / scale becomes inf, and the healthy step writes NaN into the weights",
    right="the scale ends at 1 or more, the healthy step subtracts 0.5, and the overflowing parameter was named",
    check=lambda v: v["scale"] >= 1 and near(v["weight"], 0.5) and v["named"],
    refs=("F1", "case 17"),
)
def scale_collapses(library: Library) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer, scaler, said = SGD(layer.parameters(), lr=0.5), library.scaler(), Said(library)
    library.watch(scaler, layer, optimizer)
    for i in range(167):
        optimizer.zero_grad()
        out = layer(torch.ones(1, 1)).sum()
        scaler.scale(overflowing(out) if i < 166 else out).backward()
        said(scaler.step, optimizer)
        scaler.update()
    return {"scale": scaler.get_scale(), "weight": read(layer.weight)[0], "named": said.names("weight")}


@record(
    "endless-skipping",
    "80 batches in a row with a NaN loss",
    today="all are skipped without a word, and the scale sinks to 2^-64",
    right="an error that names the loss, with the weights untouched",
    check=lambda v: v["named"] and v["weight"] == 1.0,
    refs=("case 17",),
)
def endless_skipping(library: Library) -> Any:
    (w, optimizer), scaler, said = pair(), library.scaler(), Said(library)
    for _ in range(80):
        optimizer.zero_grad()
        scaler.scale(w.sum() * math.nan).backward()
        said(scaler.step, optimizer)
        scaler.update()
    return {"weight": read(w)[0], "named": said.names("loss")}


@record(
    "scale-blamed-for-the-forward",
    "ten batches with a NaN loss between good ones",
    today="the scale is halved ten times although no scale could have helped",
    right="the scale after them is the one before them",
    check=lambda v: v[0] == v[1],
)
def scale_blamed(library: Library) -> Any:
    (w, optimizer), scaler, scales = pair(), library.scaler(), []
    for i in range(12):
        optimizer.zero_grad()
        scaler.scale((w * w).sum() * (math.nan if 0 < i < 11 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales[0], scales[10]


@record(
    "init-scale-too-high",
    "init_scale=2^32 and a gentle fp16 loss, 25 steps",
    today="17 of them are lost while the scale is halved into range",
    right="no step is lost",
    check=lambda lost: lost == 0,
    refs=("F13",),
    calibrated=True,
)
def init_scale_too_high(library: Library) -> Any:
    return _lost(library, library.scaler(2.0**32), *_net(), steps=25)


@record(
    "init-scale-too-low",
    "init_scale=1 and fp16 gradients around 1e-8",
    today="almost all gradients are 0, and stay so for 2000 steps",
    right="less than a tenth of the weights stands still in the first step",
    check=lambda share: share < 0.1,
    refs=("case 35",),
    calibrated=True,
)
def init_scale_too_low(library: Library) -> Any:
    net, inputs, targets = _net()
    optimizer, scaler = SGD(net.parameters(), lr=1.0), library.scaler(1.0)
    with library.autocast(F16):
        out = net(inputs)
    scaler.scale(F.mse_loss(out.float(), targets) * 1e-6).backward()
    scaler.step(optimizer)
    grads = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    return float((grads == 0).float().mean())


@record(
    "small-gradients-by-the-manual",
    "a loss of 1e-6 through the fp16 loop of the manual",
    today="right with a scaler (without one every gradient is 0 and nothing says so)",
    right="the update is that of fp32 to 5 %",
    check=lambda error: error < 0.05,
    refs=("case 35",),
    stock="right",
    doors=("loop", "accelerator"),
)
def small_gradients(library: Library) -> Any:
    net, inputs, targets = _net()
    before = copies(net.parameters())
    (F.mse_loss(net(inputs), targets) * 1e-6).backward()  # type: ignore[no-untyped-call]
    wanted = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]) * -1e3
    net.zero_grad()
    run = library.run(net, [SGD(net.parameters(), lr=1e3)])
    run.backward(F.mse_loss(run.forward(inputs).float(), targets) * 1e-6)
    run.step()
    update = torch.cat([(b.double() - a.double()).flatten() for a, b in zip(before, copies(net.parameters()), strict=True)])
    return float((update - wanted).norm() / wanted.norm())


@record(
    "resume-without-the-scale",
    "a run goes on with a new scaler that was given no state",
    today="the scale starts at 65536 again and steps are lost, without a word",
    right="no step is lost in the first ten, or a warning was given",
    check=lambda v: v["lost"] == 0 or v["warned"],
    refs=("F17", "case 32"),
    calibrated=True,
)
def resume_without_scale(library: Library) -> Any:
    net, inputs, targets = _net(64.0)
    _lost(library, library.scaler(), net, inputs, targets * 64, steps=25, lr=1e-7)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lost = _lost(library, library.scaler(), net, inputs, targets * 64, steps=10, lr=1e-7)
    return {"lost": lost, "warned": bool(said)}


@record(
    "resume-with-an-empty-state",
    "load_state_dict({}): the checkpoint was saved with the scaler off",
    today="RuntimeError without a remedy: the run cannot be resumed",
    right="a warning, and the next step is taken; or a refusal that says what to do",
    check=lambda v: v["warned"] and v["moved"],
    refused=("scale",),
    refs=("F17",),
)
def resume_empty(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scaler.load_state_dict({})
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    return {"warned": bool(said), "moved": near(read(w)[0], 0.5)}


@record(
    "resume-with-a-dead-scale",
    "the saved scale is 0: the run had collapsed before it was saved",
    today="accepted; the first clean step makes the weights NaN",
    right="refused, or the step is right",
    check=lambda v: near(v, 0.5),
    refused=("scale",),
    refs=("case 17", "case 32"),
)
def resume_dead_scale(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    scaler.scale(w.sum()).backward()
    state = scaler.state_dict() | {"scale": 0.0}
    optimizer.zero_grad()
    scaler = library.scaler()
    scaler.load_state_dict(state)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "resume-goes-on",
    "the state is saved and loaded: scale and growth counter go on",
    today="right",
    right="the resumed scaler has the scale, and the scale after four more good steps, of the one that never stopped",
    check=lambda v: v[0] == v[1] and len(v[0]) == 4,
    refs=("F17",),
    stock="right",
)
def resume_goes_on(library: Library) -> Any:
    def steps(scaler: Any, count: int) -> list[float]:
        scales = []
        for _ in range(count):
            w, optimizer = pair()
            scaler.scale((w * 1e-3).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    one = library.scaler(64.0, growth_interval=5)
    steps(one, 3)
    other = library.scaler(8.0, growth_interval=5)
    other.load_state_dict(one.state_dict())
    assert library.name == "careless" or other.get_scale() == one.get_scale()
    return steps(one, 4), steps(other, 4)


@record(
    "init-scale-of-zero",
    "GradScaler(init_scale=0)",
    today="accepted; 0 x inf makes the weights NaN in the first step, which is taken as good",
    right="refused, or the step is right",
    check=lambda v: near(v, 0.5),
    refused=("scale",),
)
def init_scale_zero(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(0.0)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "scale-not-a-power-of-two",
    "init_scale=1000 in an fp32 loop",
    today="scaling and unscaling round: gradients differ from those of an unscaled run",
    right="bit-equal gradients, or refused",
    check=lambda v: v,
    refused=("power of two",),
)
def scale_not_power_of_two(library: Library) -> Any:
    values, scaler = torch.randn(1000), library.scaler(1000.0)
    w = weight(size=1000)
    optimizer = SGD([w], lr=0.1)
    scaler.scale((w * values).sum()).backward()
    scaler.unscale_(optimizer)
    return w.grad is not None and same([w.grad], [values])


@record(
    "scale-grows-without-end",
    "loss of 1e-9 and growth_interval=1, 140 steps",
    today="the scale grows to 2^127, where its inverse is subnormal",
    right="the scale is finite and at most 2^32, and every step was taken",
    check=lambda v: v["scale"] <= 2.0**32 and v["lost"] == 0,
)
def scale_grows_without_end(library: Library) -> Any:
    (w, optimizer), scaler, lost = pair(0.0), library.scaler(growth_interval=1), 0
    for _ in range(140):
        optimizer.zero_grad()
        before = copies([w])
        scaler.scale((w * 1e-9).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        lost += same(before, [w])
    return {"scale": scaler.get_scale(), "lost": lost}


@record(
    "all-zero-gradients",
    "a batch that gives only zero gradients between ordinary fp16 ones",
    today="right: the step is taken and the scale stays",
    right="all of the 20 ordinary steps are taken, and the scale is finite",
    check=lambda v: v["lost"] == 0 and math.isfinite(v["scale"]) and v["exact"],
    stock="right",
)
def all_zero_gradients(library: Library) -> Any:
    (w, optimizer), scaler, lost, limit = pair(0.0, lr=0.25), library.scaler(1024.0), 0, 65504.0
    for i in range(24):
        optimizer.zero_grad()
        before = copies([w])
        scaler.scale(above(limit)(w).sum() * (0.0 if i % 6 == 5 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        lost += same(before, [w]) and i % 6 != 5
    return {"lost": lost, "scale": scaler.get_scale(), "exact": near(read(w)[0], -5.0)}


@record(
    "an-overflow-inside-the-network",
    "activation gradients overflow in fp16 before the parameters' gradients do",
    today="the default scale loses the first steps",
    right="no step is lost, and all weights stay finite",
    check=lambda v: v["lost"] == 0 and v["finite"],
    calibrated=True,
)
def overflow_inside(library: Library) -> Any:
    first, last = nn.Linear(8, 8), nn.Linear(8, 1)
    nn.init.constant_(last.weight, 60.0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) * 1e-3)  # type: ignore[no-any-return]

    net, inputs = Net(), torch.randn(4, 8)
    lost = _lost(library, library.scaler(), net, inputs, inputs.sum(1, keepdim=True) * 50, steps=10, lr=1e-6)
    return {"lost": lost, "finite": finite(net.parameters())}
