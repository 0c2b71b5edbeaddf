"""Backward passes that are run again at a lower scale: they must make the gradients that the user made (kind D)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.tools import above, near, pair, read

RECORDS: list[Record] = []
record = collector(RECORDS, "D")


def _scaler(library: Library) -> Any:
    """A scaler whose first scale is too high for an fp16-like range, and that replays."""
    if library.name != "halfstep":
        raise NotOffered("no replay")
    return library.scaler(2.0**20, on_overflow="replay")


def _ways() -> dict[str, tuple[str, Callable[[Any, Any, Tensor], Any]]]:
    """Backward passes whose gradient is 1 in every weight, and overflows at 2^20."""
    narrow = above(65504.0)

    def plain(scaler: Any, optimizer: Any, w: Tensor) -> None:
        scaler.scale(narrow(w).sum()).backward()

    def accumulated(scaler: Any, optimizer: Any, w: Tensor) -> None:
        for _ in range(4):
            scaler.scale(narrow(w).sum() / 4).backward()

    def divided(scaler: Any, optimizer: Any, w: Tensor) -> None:
        (scaler.scale(narrow(w).sum()) / 4).backward()
        (scaler.scale(narrow(w).sum()) * 0.75).backward()

    def gradient(scaler: Any, optimizer: Any, w: Tensor) -> None:
        scaler.scale(narrow(w)).backward(gradient=torch.ones(4))

    def cleared(scaler: Any, optimizer: Any, w: Tensor) -> None:
        scaler.scale((w * 7).sum()).backward()
        optimizer.zero_grad()
        scaler.scale(narrow(w).sum()).backward()

    def unused(scaler: Any, optimizer: Any, w: Tensor) -> None:
        scaler.scale((w * 7).sum())
        scaler.scale(narrow(w).sum()).backward()

    def twice(scaler: Any, optimizer: Any, w: Tensor) -> None:
        scaled = scaler.scale(narrow(w).sum() / 2)
        scaled.backward(retain_graph=True)
        scaled.backward()

    def inputs(scaler: Any, optimizer: Any, w: Tensor) -> None:
        scaler.scale(narrow(w).sum()).backward(inputs=[w])

    def summed(scaler: Any, optimizer: Any, w: Tensor) -> None:
        (scaler.scale(narrow(w).sum() * 0.25) + scaler.scale(narrow(w).sum() * 0.75)).backward()

    return {
        "plain": ("scaler.scale(loss).backward()", plain),
        "accumulated": ("four micro-batches", accumulated),
        "divided-after-scaling": ("(scaler.scale(loss) / 4).backward()", divided),
        "gradient-argument": ("scaler.scale(losses).backward(gradient=...)", gradient),
        "cleared-before": ("an earlier backward pass whose gradients were cleared", cleared),
        "scaled-but-not-used": ("a loss that was scaled and not used", unused),
        "same-loss-twice": ("two backward passes over one scaled loss", twice),
        "inputs-argument": ("backward(inputs=[w])", inputs),
        "sum-of-scaled-losses": ("the sum of two scaled losses", summed),
    }


def _way(name: str, how: str, backward: Callable[[Any, Any, Tensor], Any]) -> None:
    @record(
        f"replay-{name}",
        f"a replay of {how}",
        today="there is no replay",
        right="an update of 0.5, as without an overflow; or not applied and told so",
        check=lambda v: (v["weight"] == 0.5 and v["said"]) or (v["weight"] == 1.0 and not v["said"]),
        stock="not offered",
    )
    def way(library: Library) -> Any:
        (w, optimizer), scaler = pair(), _scaler(library)
        library.watch(scaler, optimizer)
        backward(scaler, optimizer, w)
        said = library.told(scaler.step(optimizer))
        return {"weight": read(w)[0], "said": said}


for _name, (_how, _backward) in _ways().items():
    _way(_name, _how, _backward)


@record(
    "replay-after-another-optimizer-stepped",
    "two losses, two optimizers; the first has stepped when the second overflows",
    today="there is no replay",
    right="the first moves by 0.5 once; the second by 0.5, or it is told that it did not",
    check=lambda v: v["first"] == 0.5 and (v["second"] == 0.5) == v["said"],
    stock="not offered",
)
def after_another(library: Library) -> Any:
    (a, first), (b, second), scaler = pair(), pair(), _scaler(library)
    library.watch(scaler, first, second)
    scaler.scale((a * 2.0**-10).sum() * 2.0**10).backward()
    scaler.scale(above(65504.0)(b).sum()).backward()
    scaler.step(first)
    said = library.told(scaler.step(second))
    scaler.update()
    return {"first": read(a)[0], "second": read(b)[0], "said": said}


@record(
    "replay-with-dropout-and-batchnorm",
    "a network with BatchNorm and dropout, whose backward pass overflows at the first scale",
    today="there is no replay",
    right="applied; weights equal those of a run at a low scale with the same dropout mask; one batch counted",
    check=lambda v: v["said"] and v["same"] and v["count"] == 1,
    stock="not offered",
)
def with_dropout(library: Library) -> Any:
    def run(scaler: Any) -> tuple[Any, list[Tensor], int]:
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(4)
        net = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(0.5))
        optimizer = SGD(net.parameters(), lr=0.5)
        library.watch(scaler, net, optimizer)
        scaler.scale(above(65504.0)(net(torch.randn(6, 4))).square().mean() * 64).backward()
        said = library.told(scaler.step(optimizer))
        assert norm.num_batches_tracked is not None
        return said, [p.detach() for p in net.parameters()], int(norm.num_batches_tracked)

    said, weights, count = run(_scaler(library))
    _, wanted, _ = run(library.scaler(1.0, enabled=False))
    return {"said": said, "same": all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(weights, wanted, strict=True)), "count": count}


@record(
    "replay-of-a-nan-loss",
    "on_overflow='replay' and a NaN loss",
    today="there is no replay",
    right="not applied, told so, the weight as before, and the next step is taken",
    check=lambda v: v["said"] == [False, True] and near(v["weight"], 0.5),
    stock="not offered",
)
def nan_loss(library: Library) -> Any:
    (w, optimizer), scaler, said = pair(), _scaler(library), []
    for factor in (math.nan, 1.0):
        optimizer.zero_grad()
        scaler.scale(above(65504.0)(w).sum() * factor).backward()
        said.append(library.told(scaler.step(optimizer)))
        scaler.update()
    return {"said": said, "weight": read(w)[0]}
