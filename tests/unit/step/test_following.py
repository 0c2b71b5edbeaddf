"""The scale follows the gradients: up where they underflow, down before they overflow, head room kept, resumed as it was."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler

from halfstep import StepResult
from halfstep.amp import GradScaler
from halfstep.errors import CheckpointError, ConfigError
from halfstep.step import FollowingScaling
from halfstep.step.scaling import HEAD_ROOM, SETTLING, Seen


class Run:
    """One weight; each step's gradient is given, and goes through fp16."""

    def __init__(self, **options: Any) -> None:
        self.p = nn.Parameter(torch.zeros(8))
        self.optimizer = SGD([self.p], lr=0.0)
        self.scaler = GradScaler(**options)

    def step(self, slope: float | Tensor) -> StepResult:
        self.optimizer.zero_grad()
        self.scaler.scale((self.p.half().float() * slope).sum()).backward()
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        return result

    def steps(self, slope: float | Tensor, count: int) -> list[StepResult]:
        return [self.step(slope) for _ in range(count)]


def test_gradients_that_grow_slowly_lower_the_scale_before_anything_overflows() -> None:
    run = Run()
    results = [run.step(2.0 ** (i / 8)) for i in range(120)]
    assert all(results)
    assert results[-1].scale < results[0].scale
    for result in results:
        assert result.grad_norm * result.scale / math.sqrt(8) <= 65504.0


def test_gradients_that_shrink_raise_the_scale_until_they_are_normal_again() -> None:
    run = Run()
    run.steps(1.0, 20)
    before = run.scaler.get_scale()
    small = 2.0**-26
    results = run.steps(small, 400)
    assert all(results)
    assert run.scaler.get_scale() > before
    assert run.scaler.get_scale() * small >= 2.0**-14, "no longer subnormal in fp16"


def test_the_scale_is_not_raised_into_an_overflow_by_a_few_small_gradients() -> None:
    """Half of the gradients are subnormal at any scale that the other half can stand."""
    slopes = torch.tensor([1.0] * 4 + [2.0**-40] * 4)
    results = Run(growth_interval=20).steps(slopes, 200)
    assert all(results)
    assert max(r.scale for r in results) <= 65504.0 / 4


def test_good_steps_raise_the_scale_after_their_window_only_while_head_room_is_left() -> None:
    run = Run(init_scale=16.0, growth_interval=4)
    results = run.steps(1.0, 100)
    assert all(results)
    assert results[-1].scale * HEAD_ROOM <= 65536.0 * 2
    assert {round(math.log2(b.scale / a.scale)) for a, b in itertools.pairwise(results)} <= {0, 1}


def test_next_scale_is_the_scale_of_the_next_step() -> None:
    run = Run(growth_interval=5)
    slopes = [1.0, 4.0, 300.0, 1.0, 2.0**-30, 5e4, math.inf, 1.0, math.nan, 2.0] * 6
    results = [run.step(s) for s in slopes]
    assert [r.next_scale for r in results[:-1]] == [r.scale for r in results[1:]]


def test_after_an_overflow_the_scale_and_its_limit_are_halved() -> None:
    scaling = FollowingScaling(scale=4096.0, limit=32768.0, calibrated=True)
    scaling.update(True)
    assert (scaling.scale, scaling.limit, scaling.good) == (2048.0, 16384.0, 0)
    scaling.update(False, Seen(1024.0, 0.0, 2048.0))
    assert scaling.scale == 2048.0


def test_what_would_follow_is_what_follows() -> None:
    for scale in (1.0, 64.0, 2.0**20, 2.0**32):
        for peak in (0.0, 1e-6, 3.0, 16000.0, 65504.0):
            for share in (0.0, 0.5):
                for overflow in (False, True):
                    for good in (0, 3, SETTLING, 19):
                        scaling = FollowingScaling(scale=scale, window=20, good=good, calibrated=True)
                        seen = Seen(peak, share, scale)
                        expected = scaling.after(overflow, seen)
                        assert scaling.after(overflow, seen) == expected, "asking changes nothing"
                        scaling.update(overflow, seen)
                        assert scaling.scale >= expected
                        scaling.begin()  # at the next loss
                        assert scaling.scale == expected
                        assert 1.0 <= scaling.scale <= 2.0**32
                        assert math.frexp(scaling.scale)[0] == 0.5


def test_after_a_set_scale_and_hopeless_steps_it_is_calibrated_anew() -> None:
    run = Run(init_scale=4.0)
    run.step(1.0)
    run.scaler.update(2.0)
    handle = run.p.register_hook(lambda g: g * math.inf)
    run.steps(1.0, 3)
    assert run.scaler.get_scale() == 2.0, "bad at every scale: not the fault of this one"
    handle.remove()
    assert run.step(2.0**-24).scale >= 2.0**10


def slopes_of(count: int) -> list[float]:
    generator = torch.Generator().manual_seed(4)
    return [float(2.0 ** (12 * torch.randn((), generator=generator))) for _ in range(count)]


@pytest.mark.parametrize("strategy", ["follow", "stock"])
def test_a_run_that_goes_on_from_a_saved_state_is_the_run_that_never_stopped(strategy: str) -> None:
    whole, slopes = Run(strategy=strategy, growth_interval=6), slopes_of(24)
    expected, states = [], []
    for s in slopes:
        states.append(copy.deepcopy(whole.scaler.state_dict()))
        expected.append(whole.step(s))
    for at in range(1, 24):
        second = Run(strategy=strategy, init_scale=2.0)
        second.scaler.load_state_dict(states[at])
        results = [second.step(s) for s in slopes[at:]]
        assert [(r.reason, r.scale, r.next_scale) for r in results] == [(r.reason, r.scale, r.next_scale) for r in expected[at:]], at
        assert second.scaler.state_dict() == whole.scaler.state_dict()


def test_a_state_of_torchs_loads_and_its_scale_is_taken_as_found() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    for strategy in ("follow", "stock"):
        run = Run(strategy=strategy)
        run.scaler.load_state_dict({"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3})
        assert run.step(1.0).scale == 512.0
        assert run.scaler.get_growth_interval() == 7
        assert set(theirs.state_dict()) <= set(run.scaler.state_dict())


def test_an_empty_state_is_announced_and_the_next_loss_calibrates() -> None:
    run = Run(init_scale=2.0**30)
    with pytest.warns(UserWarning, match="holds no loss scale; the next loss calibrates it anew"):
        run.scaler.load_state_dict({})
    assert all(run.steps(1.0, 3))


@pytest.mark.parametrize("state", [{"scale": 0.0}, {"scale": -4.0}, {"scale": math.nan}, {"growth_factor": 2.0}], ids=str)
def test_a_state_that_no_run_can_go_on_from_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    run = Run()
    run.step(1.0)
    before = run.scaler.state_dict()
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        run.scaler.load_state_dict(state)
    assert caught.value.remedy
    assert run.scaler.state_dict() == before


def test_a_scheduler_that_follows_holds_still_with_refused_steps() -> None:
    run = Run()
    schedule = run.scaler.follow(lr_scheduler.LambdaLR(run.optimizer, lambda n: 0.5**n))
    for slope in (1.0, math.nan, 1.0, math.inf, 1.0):
        run.step(slope)
        schedule.step()
    assert schedule.last_epoch == 3
    schedule.step()
    assert schedule.last_epoch == 3, "no step since"


def test_what_is_run_after_applied_steps_is_run_after_those_only() -> None:
    run, calls = Run(), []
    run.scaler.on_applied(run.optimizer, lambda: calls.append(run.scaler.applied_steps(run.optimizer)))
    for slope in (1.0, math.nan, 1.0):
        run.step(slope)
    assert calls == [1, 2]
