"""The verdict from the norm alone is the one that a close look gives, and a fit step is never refused for it, nor a bad one taken."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import optim
from halfstep.amp import GradScaler
from halfstep.step import StepResult, judging

BIG = 2.0**60


@contextmanager
def at_leisure(wanted: bool) -> Iterator[None]:
    """wanted: every verdict by the close look."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(judging, "_at_once", lambda *_: None)
        yield


def scale_a_loss(scaler: GradScaler, held: list[nn.Parameter], grads: list[Tensor], loss: float) -> None:
    """A backward pass of a loss of this value that leaves these gradients."""
    hooks = [p.register_hook(lambda _, g=g: g.clone()) for p, g in zip(held, grads, strict=True)]
    reached = torch.stack([(torch.view_as_real(p) if p.is_complex() else p).float().sum() for p in held]).sum()
    scaler.scale(reached * 0.0 + loss).backward()
    for hook in hooks:
        hook.remove()


def judged(
    grads: list[Tensor], loss: float, closely: bool, max_norm: float | None = None, kind: Any = torch.optim.SGD
) -> tuple[StepResult, list[Tensor]]:
    """A step with these gradients under a loss of this value, and what the weights are then."""
    with at_leisure(closely):
        held = [nn.Parameter(torch.ones_like(g)) for g in grads]
        optimizer = kind(held, lr=2.0**-70)
        scaler = GradScaler(enabled=False)
        scaler.watch(optimizer)
        scale_a_loss(scaler, held, [torch.ones_like(g) for g in grads], 1.0)
        assert scaler.step(optimizer)  # the first step is measured closely by the watch in any case
        scaler.update()
        optimizer.zero_grad()
        scale_a_loss(scaler, held, grads, loss)
        result = scaler.step(optimizer, max_norm=max_norm)
        return result, [p.detach() for p in held]


def told(result: StepResult) -> Any:
    loss = None if result.loss is None else str(result.loss)
    norm = None if result.grad_norm is None else str(result.grad_norm)
    return result.reason, bool(result), loss, norm, result.clipped, str(result.culprits), result.detail, result.scale, result.next_scale


def normal(*shape: int, size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * size


CASES: dict[str, list[Tensor]] = {
    "small ones": [normal(5, 3), normal(7)],
    "one": [normal(4)],
    "zeros": [torch.zeros(3), torch.zeros(2, 2)],
    "an empty one": [normal(4), torch.zeros(0)],
    "empty ones only": [torch.zeros(0), torch.zeros(0, 3)],
    "scalars": [torch.tensor(2.0), torch.tensor(-3.0)],
    "subnormal": [torch.full((9,), 1e-42)],
    "squares that underflow": [torch.full((9,), 1e-30)],
    "inf": [normal(4), torch.tensor([1.0, math.inf])],
    "nan": [torch.tensor([1.0, math.nan]), normal(4)],
    "inf and -inf": [torch.tensor([math.inf, -math.inf])],
    "1e30": [normal(3), torch.tensor([1e30])],
    "just fit": [torch.tensor([BIG])],
    "just too large": [torch.tensor([BIG * (1 + 2.0**-22)])],
    "fit ones, a norm that is not": [torch.full((64,), BIG / 2)],
    "squares that overflow": [torch.full((1000,), BIG), normal(3)],
    "one whose own squares overflow": [torch.tensor([3e38]), normal(3)],
    "not in a row": [normal(6, 4).t(), normal(8)[::2]],
    "fp64 beside fp32": [normal(4).double(), normal(3)],
    "bf16 beside fp32": [normal(4).bfloat16(), normal(3)],
    "fp16 beside fp32": [normal(4).half(), normal(3)],
    "complex": [torch.complex(normal(4), normal(4)), normal(3)],
    "bf16, inf": [torch.tensor([math.inf]).bfloat16(), normal(3)],
    "fp64 above fp32": [torch.tensor([1e200], dtype=torch.float64), normal(3)],
    "many": [normal(3, size=float(i)) for i in range(1, 60)],
}


@pytest.mark.filterwarnings("ignore:.*would update it without an fp32 master weight:UserWarning")
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_one_of_a_close_look(case: str, max_norm: float | None) -> None:
    quick, weights = judged(CASES[case], 0.25, False, max_norm)
    close, others = judged(CASES[case], 0.25, True, max_norm)
    assert told(quick) == told(close)
    assert all(torch.equal(v, w) for v, w in zip(weights, others, strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_with_halfsteps_optimizers_it_is_too_and_the_watch_has_seen_as_much(case: str, max_norm: float | None) -> None:
    (quick, weights), (close, others) = (judged(CASES[case], 0.25, closely, max_norm, optim.SGD) for closely in (False, True))
    assert told(quick) == told(close)
    assert all(torch.equal(v, w) for v, w in zip(weights, others, strict=True))
    assert quick.watch is not None
    assert close.watch is not None
    assert str(quick.watch.largest) == str(close.watch.largest)
    assert quick.watch.step == close.watch.step


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 3e38, 0.0])
@pytest.mark.parametrize("case", ["small ones", "inf", "empty ones only"])
def test_a_loss_that_is_not_finite_is_seen_with_any_gradients(case: str, loss: float) -> None:
    quick, close = (judged(CASES[case], loss, closely)[0] for closely in (False, True))
    assert told(quick) == told(close)
    assert (quick.reason == "nonfinite-loss") == (not math.isfinite(loss))


def test_the_quick_way_is_taken_for_fit_gradients_and_only_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    quick: list[Any] = []
    known = judging._at_once
    monkeypatch.setattr(judging, "_at_once", lambda *args: quick.append(known(*args)) or quick[-1])
    for case in CASES:
        if case not in ("bf16 beside fp32", "fp16 beside fp32", "bf16, inf"):
            judged(CASES[case], 0.25, False)
            told_quickly = quick[-1] is not None
            fit = case in ("small ones", "one", "zeros", "an empty one", "empty ones only", "scalars", "subnormal", "squares that underflow")
            assert told_quickly == (fit or case in ("just fit", "not in a row", "many")), case


@pytest.mark.parametrize("seed", range(8))
def test_random_gradients_of_all_sizes(seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    grads = []
    for _ in range(5):
        size = 10.0 ** float(torch.empty(()).uniform_(-44, 21, generator=made))
        grads.append(torch.randn(int(torch.randint(0, 40, (), generator=made)), generator=made) * size)
    results = [judged(grads, 1.0, closely) for closely in (False, True)]
    assert told(results[0][0]) == told(results[1][0])


@pytest.mark.parametrize("scale", ["off", "static:1"])
def test_with_a_scale_of_one_bad_steps_are_refused_too(scale: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = GradScaler(enabled=False) if scale == "off" else GradScaler(init_scale=1.0, growth_interval=10**6)
    for i in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.full((2, 3), 1e30 if i == 2 else 1.0)).sum()).backward()
        result = scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert bool(result) == (i != 2)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)) == (i == 2)
