"""Finding the scale inside the first backward pass, following it, and replays (kind D)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import SGD

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.tools import above, copies, finite, moved, near, overflowing, pair, read, weight

RECORDS: list[Record] = []
record = collector(RECORDS, "D")


@record(
    "skip-read-from-the-scale",
    "the old idiom: a step was skipped when the scale after update() is lower than before; fp16-like gradients grow tenfold every 15 steps",
    today="right: the scale falls only after a skip",
    right="the idiom says of each step what happened to the weights, over 60 steps",
    check=lambda v: v["wrong"] == 0 and v["finite"],
    stock="right",
)
def skip_read_from_scale(library: Library) -> Any:
    (w, optimizer), scaler, wrong = pair(lr=1e-6), library.scaler(), 0
    for i in range(60):
        optimizer.zero_grad()
        scaler.scale(above(65504.0)(w).sum() * 10.0 ** (i // 15)).backward()
        before, old = copies([w]), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        wrong += (scaler.get_scale() < old) == moved(before, [w])
    return {"wrong": wrong, "finite": finite([w]) and abs(read(w)[0] - 1.0) < 0.1}


@record(
    "scale-read-before-the-first-loss",
    "the inverse scale is taken from get_scale() before the first scale(), and used on p.grad for a report",
    today="right",
    right="the reported gradient is 1e-9",
    check=lambda v: near(v, 1e-9),
    pending="the scale is found at the first scale(), so the one before it is another",
    pending_under="follow",
    stock="right",
)
def scale_read_before(library: Library) -> Any:
    w, scaler = weight(), library.scaler(1024.0)
    library.watch(scaler, SGD([w], lr=0.5))
    inverse = 1.0 / scaler.get_scale()
    scaler.scale((w * 1e-9).sum()).backward()
    assert w.grad is not None
    return float(w.grad[0]) * inverse if scaler.state_dict() else 0.0


@record(
    "hooks-run-once-per-batch",
    "a full backward hook of a module counts; three batches",
    today="right",
    right="three calls, or the further ones only in the first batch",
    check=lambda v: v["counts"][1:] == [1, 1] and near(v["weight"], -0.5),
    stock="right",
)
def hooks_run_once(library: Library) -> Any:
    layer, calls, counts = nn.Linear(1, 1, bias=False), [], []
    nn.init.ones_(layer.weight)
    optimizer, scaler = SGD(layer.parameters(), lr=0.5), library.scaler()
    layer.register_full_backward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        calls.clear()
        optimizer.zero_grad()
        scaler.scale(layer(torch.ones(1, 1, requires_grad=True)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append(len(calls))
    return {"counts": counts, "weight": float(layer.weight.detach())}


class _Once(torch.autograd.Function):
    """Frees what it saved in its backward pass, as memory-saving functions do."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.kept = value.detach().clone()
        return value * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, ctx.kept = ctx.kept, None
        return grads[0] * 2 * kept / kept


@record(
    "graph-that-can-be-differentiated-once",
    "a custom function that frees what it saved in its backward pass",
    today="right",
    right="an update of 0.5 x 2",
    check=lambda v: abs(v) < 1e-6,
    stock="right",
)
def differentiated_once(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a library may say that it cannot calibrate with this
        scaled = scaler.scale(_Once.apply(w).sum())  # type: ignore[no-untyped-call]
    scaled.backward()
    scaler.step(optimizer)
    return read(w)[0]


@record(
    "loss-that-grows-a-thousandfold",
    "fp16-like gradients that grow a thousandfold from one step to the next, and fall back (a curriculum, a new loss term)",
    today="two or more steps are lost at each rise",
    right="at most one step is lost at each of the two rises, and the weights stay finite",
    check=lambda v: v["lost"] <= 2 and v["finite"],
    calibrated=True,
)
def grows(library: Library) -> Any:
    return _rises(library, {})


@record(
    "replay-when-gradients-rise",
    "the same with on_overflow='replay': the backward pass is run again at a lower scale",
    today="there is no replay",
    right="no step is lost, the weights are those of a run at one low scale bit for bit",
    check=lambda v: v["lost"] == 0 and v["finite"] and v["exact"],
    stock="not offered",
)
def replayed(library: Library) -> Any:
    if library.name != "halfstep":
        raise NotOffered("no replay")
    return _rises(library, {"on_overflow": "replay"})


@record(
    "large-and-small-batches-in-turn",
    "fp16-like gradients of 1 and 3000 in alternate steps, from 2^16",
    today="twelve steps are lost, one for each halving",
    right="at most four of 24 steps are lost: the scale stays where the large ones fit",
    check=lambda v: v["lost"] <= 4 and v["finite"],
    calibrated=True,
)
def in_turn(library: Library) -> Any:
    def backward(scaler: Any, w: Tensor, i: int) -> None:
        scaler.scale((w * (3000.0 if i % 2 else 1.0)).sum()).backward()

    return _lost_at_the_start(library, 2.0**16, backward, 24)


def _rises(library: Library, settings: dict[str, Any]) -> dict[str, Any]:
    (w, optimizer), (low, plain), scaler, lost = pair(lr=1e-9), pair(lr=1e-9), library.scaler(**settings), 0
    for factor in [1.0] * 5 + [3000.0] * 5 + [1.0] * 5 + [3000.0] * 5:
        optimizer.zero_grad()
        plain.zero_grad()
        before = copies([w])
        scaler.scale(above(65504.0)(w * 1e3).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        lost += not moved(before, [w])
        ((low * 1e3).sum() * factor).backward()  # type: ignore[no-untyped-call]
        plain.step()
    return {"lost": lost, "finite": finite([w]), "exact": not moved([low], [w])}


@record(
    "first-batch-bad",
    "the very first loss is NaN, the second overflows, then ordinary ones",
    today="right in value: both are skipped, the scale is halved twice",
    right="told [False, False, True, True]; weight 0",
    check=lambda v: v["said"] == [False, False, True, True] and abs(v["weight"]) < 1e-6,
)
def first_batch_bad(library: Library) -> Any:
    (w, optimizer), scaler, said = pair(), library.scaler(1024.0), []
    for i in range(4):
        optimizer.zero_grad()
        loss = w.sum()
        scaler.scale(loss * math.nan if i == 0 else overflowing(loss) if i == 1 else loss).backward()
        said.append(library.told(scaler.step(optimizer)))
        scaler.update()
    return {"said": said, "weight": read(w)[0]}


def _lost_at_the_start(library: Library, start: float, backward: Any, count: int = 12) -> dict[str, Any]:
    """Steps with fp16-like gradients that left the weights as they were."""
    (w, optimizer), scaler, lost = pair(0.0, lr=1e-9), library.scaler(start), 0
    for i in range(count):
        optimizer.zero_grad()
        before = copies([w])
        backward(scaler, above(65504.0)(w), i)
        scaler.step(optimizer)
        scaler.update()
        lost += not moved(before, [w])
    return {"lost": lost, "finite": finite([w])}


def _starts(into: Any) -> None:
    """First losses that tell little about the ones that follow."""

    def vector(scaler: Any, w: Tensor, i: int) -> None:
        scaler.scale(w * 100.0).mean().backward()

    def small_then_large(scaler: Any, w: Tensor, i: int) -> None:
        scaler.scale((w * 1e-6).sum()).backward(retain_graph=True)
        scaler.scale((w * 100.0).sum()).backward()

    def first_tiny(scaler: Any, w: Tensor, i: int) -> None:
        scaler.scale((w * (1e-9 if i == 0 else 100.0)).sum()).backward()

    def first_zero(scaler: Any, w: Tensor, i: int) -> None:
        scaler.scale((w * (0.0 if i < 3 else 100.0)).sum() + 0.0).backward()

    def later_half(scaler: Any, w: Tensor, i: int) -> None:
        scaler.scale((w[:2] * 1e-3).sum() + (w[2:].sum() * (100.0 if i > 5 else 0.0))).backward()

    cases = {
        "of-a-vector": ("losses of shape (4,), scaled, then averaged (DataParallel), from 2^24", 2.0**24, vector, 0),
        "with-two-losses": ("a small loss, then one with gradients 10^8 times larger, in each step, from 2^16", 2.0**16, small_then_large, 0),
        "with-a-tiny-first-batch": ("a first batch with gradients of 1e-9 (all padding), then of 100", 2.0**16, first_tiny, 1),
        "with-empty-first-batches": ("three batches with zero gradients, then gradients of 100, from 2^24", 2.0**24, first_zero, 3),
        "with-a-part-that-wakes-up": (
            "half of the weights have gradients of 1e-3, the others of 100 after six steps",
            2.0**16,
            later_half,
            1,
        ),
    }
    for name, (how, start, backward, allowed) in cases.items():
        into(
            f"start-{name}",
            how,
            today="steps are lost while the scale is halved into range, one halving a step",
            right=f"at most {allowed} of twelve steps are lost",
            check=lambda v, allowed=allowed: v["lost"] <= allowed and v["finite"],
            refs=("F13",),
            calibrated=True,
        )(lambda library, start=start, backward=backward: _lost_at_the_start(library, start, backward))


_starts(record)


def _together(name: str, how: str, backward: Any) -> None:
    @record(
        f"losses-scaled-before-one-backward-{name}",
        f"{how}, the second with gradients 2048 times larger, fp16-like, from 2^20",
        today="steps are lost while the scale is halved into range",
        right="the first step is taken: an update of 2^-10 x (1 + 2048)",
        check=lambda v: near(v, 1.0 - 2.0**-10 * 2049),
        refs=("F13",),
        calibrated=True,
    )
    def together(library: Library) -> Any:
        (w, optimizer), scaler = pair(lr=2.0**-10), library.scaler(2.0**20)
        library.watch(scaler, optimizer)
        narrow = above(65504.0)(w)
        backward(scaler, narrow.sum(), (narrow * 2048.0).sum())
        scaler.step(optimizer)
        return read(w)[0]


_together("summed", "two losses are scaled and added", lambda scaler, a, b: (scaler.scale(a) + scaler.scale(b)).backward())
_together("as-a-list", "scale() of a list of two losses", lambda scaler, a, b: torch.autograd.backward(scaler.scale([a, b])))
_together("large-first", "the large one is scaled first", lambda scaler, a, b: (scaler.scale(b) + scaler.scale(a)).backward())
_together("one-after-the-other", "both scaled, then two backward passes", lambda scaler, a, b: _in_turn_of(scaler.scale(a), scaler.scale(b)))


def _in_turn_of(one: Tensor, other: Tensor) -> None:
    one.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    other.backward()  # type: ignore[no-untyped-call]
