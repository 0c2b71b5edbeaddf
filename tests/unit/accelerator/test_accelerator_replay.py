"""The accelerator replays an overflow: the backward passes alone (on_overflow), or a whole step (run_step). Both end as a run at that scale."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from halfstep import Accelerator, StepResult
from halfstep.errors import DivergedError, StepRefusedError

STOCK = "fp16-mixed,scale=dynamic:65536,scale_strategy=stock"


class Run:
    """A prepared net with dropout and BatchNorm; `factor` makes the gradients of a step larger."""

    def __init__(self, precision: str = STOCK, window: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.accelerator = Accelerator(precision=precision, cpu=True, **options)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.net, self.optimizer = self.accelerator.prepare(net, AdamW(net.parameters(), lr=0.01))
        self.window, self.computed = window, 0

    def compute(self, factor: float = 30.0, clip: float | None = None) -> None:
        self.computed += 1
        for _ in range(self.window):
            y = self.net(torch.randn(8, 3)).float() + 0.1 * random.random()
            self.accelerator.backward((y * factor).square().mean() / self.window)
        if clip is not None:
            self.accelerator.clip_grad_norm_(self.net.parameters(), clip)

    def run_step(self, factor: float = 30.0, clip: float | None = None) -> StepResult:
        result = self.accelerator.run_step(self.optimizer, lambda: self.compute(factor, clip))
        self.optimizer.zero_grad()
        return result

    def plain_step(self, factor: float = 30.0, clip: float | None = None) -> StepResult:
        self.compute(factor, clip)
        result = self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def everything(self) -> list[Tensor]:
        states = [v for values in self.optimizer.state.values() for v in values.values()]
        return [t.detach().clone() for t in (*self.net.state_dict().values(), *states, torch.get_rng_state())] + [torch.tensor(random.getstate()[1])]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("door", ["run_step", "on_overflow"])
def test_a_replayed_step_is_the_step_first_taken_at_that_scale(door: str, window: int, clip: float | None) -> None:
    replayed = Run(window=window, **({"on_overflow": "replay"} if door == "on_overflow" else {}))
    factors, results, states = (30.0, 1.0, 8.0), [], []
    for factor in factors:
        results.append((replayed.run_step if door == "run_step" else replayed.plain_step)(factor, clip))
        states.append(replayed.everything())
    assert all(results)
    assert sum(r.replays > 0 for r in results) >= 1
    told = Run(window=window)
    for factor, result, state in zip(factors, results, states, strict=True):
        told.accelerator.scaler.update(result.scale)
        again = told.plain_step(factor, clip)
        assert (again.applied, again.replays, again.scale, again.clipped) == (True, 0, result.scale, result.clipped)
        assert again.grad_norm == result.grad_norm
        assert again.loss == result.loss
        assert all(torch.equal(a, b) for a, b in zip(state, told.everything(), strict=True)), factor


def test_the_result_counts_and_is_the_last_step() -> None:
    run = Run()
    result = run.run_step()
    assert result.replays == run.computed - 1 >= 1
    assert run.accelerator.last_step == result
    assert not run.accelerator.optimizer_step_was_skipped
    assert run.accelerator.scaler.get_scale() == result.scale == result.next_scale
    assert run.optimizer.applied == 1
    assert run.accelerator.scaler.bad_steps == 0


@pytest.mark.parametrize("precision", [STOCK, "fp16-mixed", "fp16-mixed,scale=static:1024", "bf16-mixed", "fp32"])
def test_what_no_scale_mends_changes_nothing_and_keeps_the_scale(precision: str) -> None:
    run, undisturbed = Run(precision), Run(precision)
    for i in range(4):
        torch.manual_seed(i)
        if i == 1:
            handle = run.net[0].weight.register_hook(lambda g: g * math.inf)
            before = run.everything()[:-2]
            result = run.run_step(1e-3)
            handle.remove()
            assert (result.applied, result.reason) == (False, "overflow")
            assert result.culprits[0].name == "0.weight"
            assert all(torch.equal(a, b) for a, b in zip(before, run.everything(), strict=False))
            assert run.accelerator.scaler.bad_steps == 1, "counted once, however often it was replayed"
            continue
        random.seed(i)
        result = run.run_step(1e-3)
        torch.manual_seed(i)
        random.seed(i)
        expected = undisturbed.run_step(1e-3)
        assert (result.applied, result.scale, result.next_scale) == (expected.applied, expected.scale, expected.next_scale), i
        assert result.applied


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_loss_is_computed_once(value: float) -> None:
    run = Run()
    result = run.run_step(value)
    assert (result.reason, result.replays, run.computed) == ("nonfinite-loss", 0, 1)
    assert run.accelerator.scaler.get_scale() == 65536.0


def test_raise_is_for_what_no_replay_mends() -> None:
    run = Run(on_overflow="raise")
    assert run.run_step().replays >= 1
    run.net[0].weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(StepRefusedError):
        run.run_step()


def test_patience_counts_steps_and_not_replays() -> None:
    run = Run(patience=3)
    run.net[0].weight.register_hook(lambda g: g * math.inf)
    for _ in range(2):
        assert run.run_step(1e-3).reason == "overflow"
    with pytest.raises(DivergedError, match="3 steps in a row"):
        run.run_step(1e-3)


class Stop(Exception):  # noqa: N818  ends a loop that would not end by itself
    pass


def adversaries(**options: Any) -> tuple[Accelerator, list[nn.Module], list[Any]]:
    torch.manual_seed(0)
    accelerator = Accelerator(precision=STOCK, cpu=True, **options)
    judge, maker = nn.Linear(2, 1), nn.Linear(2, 2)
    judge, maker, one, two = accelerator.prepare(judge, maker, SGD(judge.parameters(), lr=1e-9), SGD(maker.parameters(), lr=1e-9))
    return accelerator, [judge, maker], [one, two]


def limited(compute: Callable[[], None]) -> Callable[[], None]:
    count = [0]

    def counted() -> None:
        count[0] += 1
        if count[0] > 40:
            raise Stop
        compute()

    return counted


def test_gradients_that_a_replayed_step_gives_to_another_optimizer_are_those_of_one_pass() -> None:
    """As in adversarial training: the maker's loss gives the judge gradients too, however often it was computed."""
    accelerator, (judge, maker), (_, two) = adversaries()
    x = torch.randn(4, 2)
    result = accelerator.run_step(two, limited(lambda: accelerator.backward((judge(maker(x)).float() * 1e4).mean())))
    assert result.applied
    assert result.replays >= 1
    expected = torch.autograd.grad((nn.functional.linear(maker(x).float(), judge.weight, judge.bias) * 1e4).mean(), list(judge.parameters()))
    for p, gradient in zip(judge.parameters(), expected, strict=True):
        assert torch.allclose(p.grad / accelerator.scaler.scale_at_hand, gradient, rtol=0.02)


def test_run_step_ends_when_another_optimizer_holds_gradients_so_that_the_scale_cannot_fall() -> None:
    accelerator, (judge, maker), (_, two) = adversaries()
    x = torch.randn(4, 2)
    accelerator.backward(judge(x).float().mean() * 1e-3)
    before = maker.weight.detach().clone()
    result = accelerator.run_step(two, limited(lambda: accelerator.backward((judge(maker(x)).float() * 1e4).mean())))
    assert result.reason in ("applied", "overflow")
    assert torch.equal(before, maker.weight) != result.applied


def test_a_whole_adversarial_loop_with_run_step_trains() -> None:
    accelerator, (judge, maker), (one, two) = adversaries()
    for _ in range(4):
        x = torch.randn(4, 2)
        one.zero_grad()
        first = accelerator.run_step(one, limited(lambda x=x: accelerator.backward((judge(x).float() * 1e4).mean())))
        two.zero_grad()
        second = accelerator.run_step(two, limited(lambda x=x: accelerator.backward((judge(maker(x)).float() * 1e4).mean())))
        assert first.applied
        assert second.applied


def test_run_step_inside_a_window_computes_once() -> None:
    run = Run(gradient_accumulation_steps=2)
    with run.accelerator.accumulate(run.net):
        result = run.run_step()
    assert (result.reason, run.computed) == ("accumulating", 1)


def test_an_error_of_the_users_in_compute_comes_through() -> None:
    run = Run()

    def broken() -> None:
        run.compute()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run.accelerator.run_step(run.optimizer, broken)
    run.optimizer.zero_grad()
    assert run.run_step().applied


def test_schedules_and_what_runs_after_steps_see_one_step() -> None:
    run, calls = Run(), []
    run.accelerator.on_applied(run.optimizer, lambda: calls.append(1))
    schedule = run.accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(run.optimizer.optimizer, 0.5))
    assert run.run_step().replays >= 1
    schedule.step()
    assert calls == [1]
    assert schedule.last_epoch == 1
