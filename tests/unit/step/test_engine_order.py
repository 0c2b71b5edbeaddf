"""Orders of calls: right ones give the run without scaling, wrong ones are refused, and nothing old is used for something new."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from halfstep.amp import GradScaler
from halfstep.errors import StepOrderError

COEFFICIENTS = torch.tensor([3.0, 4.0])


class Loop:
    """Two weights under two optimizers, with a loss whose gradient is known."""

    def __init__(self, enabled: bool = True, make: Callable[[list[Tensor]], Optimizer] = lambda ps: SGD(ps, lr=1.0), **options: Any) -> None:
        options = {"strategy": "stock"} | options
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.first, self.second = make([self.a]), make([self.b])
        self.scaler = GradScaler(enabled=enabled, **options)

    def zero(self) -> None:
        self.first.zero_grad()
        self.second.zero_grad()

    def loss(self, times: float = 1.0) -> Tensor:
        return (self.a * COEFFICIENTS).sum() * times

    def backward(self, times: float = 1.0) -> None:
        self.scaler.scale(self.loss(times)).backward()


def refused(call: Callable[[], object], cause: str, remedy: str) -> None:
    with pytest.raises(StepOrderError) as caught:
        call()
    assert cause in caught.value.cause
    assert remedy in caught.value.remedy


def test_unscale_twice_is_refused() -> None:
    loop = Loop()
    loop.backward()
    loop.scaler.unscale_(loop.first)
    refused(lambda: loop.scaler.unscale_(loop.first), "unscale_() was already called", "once per step, before clipping")
    assert loop.scaler.step(loop.first)
    assert torch.equal(loop.a.detach(), -COEFFICIENTS)


@pytest.mark.parametrize("watched", [True, False])
def test_unscale_after_a_clip_is_refused_and_the_result_has_the_norm_before_it(watched: bool) -> None:
    loop = Loop()
    if watched:
        loop.scaler.watch(loop.first)
    loop.backward()
    assert float(loop.scaler.clip_grad_norm_([loop.a], 1.0)) == pytest.approx(5.0)
    refused(lambda: loop.scaler.unscale_(loop.first), "or a clip has unscaled its gradients", "once per step, before clipping")
    result = loop.scaler.step(loop.first)
    assert result.grad_norm == pytest.approx(5.0)
    assert result.clipped
    assert torch.allclose(loop.a.detach(), -COEFFICIENTS / 5)


@pytest.mark.parametrize("watched", [True, False])
def test_without_a_scale_the_norm_is_that_before_a_clip_too(watched: bool) -> None:
    loop = Loop(enabled=False)
    if watched:
        loop.scaler.watch(loop.first)
    loop.backward()
    loop.scaler.clip_grad_norm_([loop.a], 1.0)
    loop.scaler.unscale_(loop.first)
    result = loop.scaler.step(loop.first)
    assert result.grad_norm == pytest.approx(5.0)
    assert result.clipped


def test_step_twice_without_update_is_refused() -> None:
    loop = Loop()
    loop.backward()
    loop.scaler.step(loop.first)
    refused(lambda: loop.scaler.step(loop.first), "step() was called twice", "update()")
    loop.zero()
    loop.backward()
    refused(lambda: loop.scaler.step(loop.first), "without update() between", "Call update() once per iteration")
    loop.scaler.update()
    assert loop.scaler.step(loop.first)
    assert torch.equal(loop.a.detach(), -2 * COEFFICIENTS)


def test_step_twice_for_one_backward_is_refused() -> None:
    loop = Loop()
    loop.backward()
    loop.scaler.step(loop.first)
    loop.scaler.update()
    refused(lambda: loop.scaler.step(loop.first), "twice for one backward", "scale(loss).backward()")
    assert torch.equal(loop.a.detach(), -COEFFICIENTS)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_step_without_scale_is_refused(steps_before: int) -> None:
    loop = Loop()
    for _ in range(steps_before):
        loop.backward()
        loop.scaler.step(loop.first)
        loop.scaler.update()
        loop.zero()
    before = loop.a.detach().clone()
    loop.loss().backward()
    refused(lambda: loop.scaler.step(loop.first), "", "scale(loss).backward()")
    assert torch.equal(loop.a.detach(), before)


def test_without_scaling_any_order_is_right() -> None:
    loop = Loop(enabled=False)
    loop.loss().backward()
    loop.scaler.unscale_(loop.first)
    loop.scaler.unscale_(loop.first)
    assert loop.scaler.step(loop.first)
    assert loop.scaler.step(loop.first)
    assert torch.equal(loop.a.detach(), -2 * COEFFICIENTS)


@pytest.mark.parametrize("enabled", [True, False])
def test_an_optimizer_without_gradients_is_told_and_harms_nothing(enabled: bool) -> None:
    loop = Loop(enabled)
    loop.backward()
    result = loop.scaler.step(loop.second)
    assert (result.applied, result.reason, result.grad_norm, result.culprits) == (False, "no-gradients", None, ())
    assert loop.scaler.bad_steps == 0
    assert loop.scaler.step(loop.first)
    loop.scaler.unscale_(loop.second)
    loop.scaler.update()
    assert loop.scaler.get_scale() == (65536.0 if enabled else 1.0)


def test_the_loss_of_a_step_without_gradients_is_not_that_of_the_next() -> None:
    loop = Loop()
    other = nn.Parameter(torch.tensor(math.nan))
    loop.scaler.scale(other * 1.0).backward()
    assert loop.scaler.step(loop.first).reason == "no-gradients"
    loop.scaler.update()
    loop.backward()
    result = loop.scaler.step(loop.first)
    assert result.reason == "applied"
    assert result.loss == 0.0


def both_losses(a: Tensor, b: Tensor, step: int) -> Tensor:
    return ((a - 1.0) ** 2).sum() + ((a * b + step) ** 2).mean()


@pytest.mark.parametrize("make", [lambda ps: SGD(ps, lr=0.05, momentum=0.9), lambda ps: AdamW(ps, lr=0.01)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("before", [0, 1, 2], ids=["none-unscaled-before", "one-unscaled-before", "both-unscaled-before"])
def test_two_optimizers_with_an_update_after_each(make: Callable[[list[Tensor]], Optimizer], before: int) -> None:
    """The scale doubles between the two steps, and each gradient is still divided by the scale it was made under."""
    plain, scaled = Loop(False, make), Loop(True, make, growth_interval=1, init_scale=4.0)
    scaled.scaler.watch(scaled.second)
    for step in range(5):
        plain.zero()
        both_losses(plain.a, plain.b, step).backward()
        plain.first.step()
        plain.second.step()
        scaled.zero()
        scaled.scaler.scale(both_losses(scaled.a, scaled.b, step)).backward()
        for optimizer in (scaled.first, scaled.second)[:before]:
            scaled.scaler.unscale_(optimizer)
        for optimizer in (scaled.first, scaled.second):
            assert scaled.scaler.step(optimizer)
            scaled.scaler.update()
    assert torch.equal(plain.a, scaled.a)
    assert torch.equal(plain.b, scaled.b)
    assert scaled.scaler.get_scale() == 2.0**12


@pytest.mark.parametrize("first_is_bad", [True, False])
def test_an_overflow_in_one_of_two_optimizers_stops_that_one_only(first_is_bad: bool) -> None:
    loop = Loop()
    loop.scaler.scale(loop.a.sum()).backward()
    loop.scaler.scale(loop.b.sum()).backward()
    bad, good = (loop.a, loop.b) if first_is_bad else (loop.b, loop.a)
    assert bad.grad is not None
    with loop.scaler.edits():
        bad.grad[0] = math.inf
    results = loop.scaler.step(loop.first), loop.scaler.step(loop.second)
    loop.scaler.update()
    assert [r.applied for r in results] == [not first_is_bad, first_is_bad]
    assert torch.equal(bad.detach(), torch.zeros(2))
    assert torch.equal(good.detach(), -torch.ones(2))
    assert loop.scaler.get_scale() == 32768.0, "one of them is enough to lower the scale, once"
    assert results[1].next_scale == 32768.0, "the second result knows of the first"


def test_both_overflows_lower_the_scale_once() -> None:
    loop = Loop()
    loop.scaler.scale((loop.a + loop.b).sum()).backward()
    for weight in (loop.a, loop.b):
        assert weight.grad is not None
        with loop.scaler.edits():
            weight.grad[1] = math.nan
    assert not loop.scaler.step(loop.first)
    assert not loop.scaler.step(loop.second)
    loop.scaler.update()
    assert loop.scaler.get_scale() == 32768.0


def test_separate_losses_in_turns_are_separate() -> None:
    """As in adversarial training: each step knows its own loss and its own gradients."""
    loop = Loop()
    for times in (1.0, 2.0):
        loop.zero()
        loop.scaler.scale(loop.a.sum() * times + 7.0).backward()
        assert loop.scaler.step(loop.first).loss == pytest.approx(7.0 + times * 2 * -(times - 1.0))
        loop.zero()
        loop.scaler.scale(loop.b.sum() - 3.0).backward()
        assert loop.scaler.step(loop.second).loss == pytest.approx(-3.0 - 2 * (times - 1.0))
        loop.scaler.update()


def test_accumulated_gradients_equal_those_of_one_batch() -> None:
    loop = Loop()
    for times in (0.25, 0.5, 0.25):
        loop.backward(times)
    assert loop.scaler.step(loop.first).grad_norm == 5.0
    assert torch.equal(loop.a.detach(), -COEFFICIENTS)


@pytest.mark.parametrize("known", ["by a step", "by watch", "not"])
def test_accumulation_across_an_update_keeps_the_scale_of_its_gradients(known: str) -> None:
    loop = Loop()
    if known == "by a step":
        loop.backward()
        loop.scaler.step(loop.first)
        loop.scaler.update()
        loop.zero()
    elif known == "by watch":
        loop.scaler.watch(loop.first)
    before = loop.a.detach().clone()
    loop.backward()
    loop.scaler.update(1024.0)
    loop.backward()
    result = loop.scaler.step(loop.first)
    assert result.grad_norm == 10.0
    assert torch.equal(loop.a.detach(), before - 2 * COEFFICIENTS)
    assert result.scale == 65536.0
    loop.scaler.update()
    loop.zero()
    loop.backward()
    assert loop.scaler.step(loop.first).scale == 1024.0


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("update", [True, False])
def test_gradients_thrown_away_after_unscale_leave_no_trace(enabled: bool, set_to_none: bool, update: bool) -> None:
    """A loop that unscales, sees that the norm is too large, and goes on with the next batch."""
    loop = Loop(enabled)
    loop.backward(100.0)
    loop.scaler.unscale_(loop.first)
    loop.first.zero_grad(set_to_none=set_to_none)
    if update:
        loop.scaler.update()
    loop.backward()
    result = loop.scaler.step(loop.first)
    assert result.applied
    assert result.grad_norm == 5.0
    assert torch.equal(loop.a.detach(), -COEFFICIENTS)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("thrown", [math.nan, math.inf, 7.0])
def test_the_loss_of_gradients_thrown_away_is_not_that_of_the_next_step(enabled: bool, thrown: float) -> None:
    """A loop that skips the batch with the NaN loss must not lose the healthy one after it as well."""
    loop = Loop(enabled)
    loop.scaler.scale(loop.loss() + thrown).backward()
    loop.scaler.unscale_(loop.first)
    loop.first.zero_grad()
    loop.scaler.scale(loop.loss() + 2.0).backward()
    result = loop.scaler.step(loop.first)
    assert result.reason == "applied"
    assert result.loss == 2.0


@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.parametrize("enabled", [True, False])
def test_rescaled_gradients_and_losses_are_those_of_a_rescaled_loss(enabled: bool, factor: float) -> None:
    plain, rescaled = Loop(enabled), Loop(enabled)
    plain.scaler.scale((plain.loss() + 1.0) * factor).backward()
    rescaled.scaler.watch(rescaled.first)
    rescaled.scaler.scale(rescaled.loss() + 1.0).backward()
    rescaled.scaler.rescale_(factor)
    expected, got = plain.scaler.step(plain.first), rescaled.scaler.step(rescaled.first)
    assert got == expected
    assert got.loss == expected.loss == factor
    assert torch.equal(plain.a, rescaled.a)


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_thrown_away_after_unscale_do_not_vouch_for_the_next(enabled: bool) -> None:
    loop = Loop(enabled)
    loop.backward()
    loop.scaler.unscale_(loop.first)
    loop.zero()
    loop.scaler.scale((loop.a * math.nan).nan_to_num().sum()).backward()  # the loss is 0, the gradient NaN
    result = loop.scaler.step(loop.first)
    assert result.reason == "overflow"
    assert torch.equal(loop.a.detach(), torch.zeros(2))


EDITS: dict[str, Callable[[nn.Parameter], None]] = {
    "element": lambda p: p.grad.__setitem__(0, math.nan),  # type: ignore[union-attr]
    "infinity": lambda p: p.grad.fill_(math.inf),  # type: ignore[union-attr]
    "division": lambda p: p.grad.div_(0.0),  # type: ignore[union-attr]
    "replaced": lambda p: setattr(p, "grad", torch.full((2,), math.nan)),
}


@pytest.mark.parametrize("edit", list(EDITS))
@pytest.mark.parametrize("options", [{"init_scale": 65536.0}, {"init_scale": 1.0}, {"enabled": False}], ids=["65536", "1", "off"])
def test_a_nan_that_the_user_makes_after_unscale_is_caught(edit: str, options: dict[str, float]) -> None:
    loop = Loop(**options)  # type: ignore[arg-type]
    loop.backward()
    loop.scaler.unscale_(loop.first)
    EDITS[edit](loop.a)
    result = loop.scaler.step(loop.first)
    assert (result.applied, result.reason) == (False, "overflow")
    assert len(result.culprits) == 1
    assert torch.equal(loop.a.detach(), torch.zeros(2))


@pytest.mark.parametrize("edit", list(EDITS))
@pytest.mark.parametrize("enabled", [True, False])
def test_a_nan_made_between_unscale_and_clip_is_caught(edit: str, enabled: bool) -> None:
    loop = Loop(enabled)
    loop.backward()
    loop.scaler.unscale_(loop.first)
    EDITS[edit](loop.a)
    assert not math.isfinite(float(loop.scaler.clip_grad_norm_([loop.a], 1.0)))
    assert loop.scaler.step(loop.first).reason == "overflow"
    assert torch.equal(loop.a.detach(), torch.zeros(2))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_good_edit_after_unscale_is_used_as_it_is(enabled: bool) -> None:
    loop = Loop(enabled)
    loop.backward()
    loop.scaler.unscale_(loop.first)
    assert loop.a.grad is not None
    loop.a.grad.clamp_(max=3.5)
    assert loop.scaler.step(loop.first)
    assert torch.equal(loop.a.detach(), -torch.tensor([3.0, 3.5]))


def test_update_without_a_step_leaves_the_scale() -> None:
    loop = Loop(growth_interval=1)
    for _ in range(3):
        loop.scaler.update()
    assert loop.scaler.get_scale() == 65536.0


def test_large_gradients_are_used_up_to_2_60() -> None:
    for element, applied in ((2.0**59, True), (1e21, False)):
        for enabled in (True, False):
            loop = Loop(enabled)
            loop.scaler.scale((loop.a * element).sum()).backward()
            assert loop.scaler.step(loop.first).applied == applied
            assert bool(loop.a.detach().any()) == applied
