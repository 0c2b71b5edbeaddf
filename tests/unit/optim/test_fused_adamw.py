"""FusedAdamW is torch's fused AdamW bit for bit, whatever is done with it, and clips and unscales in its own pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_cases import GROUPS, counts, equal, fill, same, torchs, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.errors import ConfigError
from halfstep.numerics import clip_factor
from halfstep.optim import FusedAdamW


@pytest.mark.parametrize("settings", [{}, {"maximize": True, "weight_decay": 0.3}, {"betas": (0.0, 0.5), "eps": 1e-3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", GROUPS)
def test_each_step_is_torchs_bit_for_bit(groups: str, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    a, b = weights(dtype=dtype), weights(dtype=dtype)
    ours, theirs = FusedAdamW(GROUPS[groups](a), lr=0.1, **settings), torchs(GROUPS[groups](b), lr=0.1, **settings)
    for i in range(5):
        for params in (a, b):
            fill(params, i)
        ours.step()
        theirs.step()
        same(ours, a, theirs, b)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(6))
def test_parameters_that_sit_steps_out_keep_their_own_count(seed: int, groups: str) -> None:
    a, b = weights(), weights()
    ours, theirs = FusedAdamW(GROUPS[groups](a), lr=0.1), torchs(GROUPS[groups](b), lr=0.1)
    made = torch.Generator().manual_seed(seed)
    for i in range(9):
        out = tuple(torch.nonzero(torch.rand(len(a), generator=made) < (0.4 if i % 3 else 1.1)).flatten().tolist()) if i % 4 != 1 else ()
        for params in (a, b):
            fill(params, i, left_out=out)
        ours.step()
        theirs.step()
        same(ours, a, theirs, b)


def test_a_group_that_stops_training_and_comes_back_keeps_its_count() -> None:
    a, b = weights(), weights()
    ours, theirs = FusedAdamW(GROUPS["other settings"](a)), torchs(GROUPS["other settings"](b))
    for i, out in enumerate([(), (0, 1), (0, 1, 2), (2, 3, 4, 5), (0, 1, 2, 3, 4, 5), ()]):
        for params in (a, b):
            fill(params, i, left_out=out)
        ours.step()
        theirs.step()
    same(ours, a, theirs, b)
    assert counts(ours, a) == [3, 3, 3, 4, 4, 4]


def test_parameters_and_gradients_that_do_not_lie_in_a_row_are_updated_too() -> None:
    pairs = []
    for make in (FusedAdamW, torchs):
        base = torch.arange(48.0).reshape(6, 8)
        p, q = nn.Parameter(base.clone().t()), nn.Parameter(base.clone().to(memory_format=torch.contiguous_format)[:, ::2])
        optimizer = make([p, q], lr=0.1)
        for i in range(3):
            p.grad = torch.linspace(-1, 1, 48).reshape(6, 8).t() * (i + 1)
            q.grad = torch.linspace(-1, 1, 24).reshape(6, 4)
            optimizer.step()
        pairs.append([p, q])
    assert equal(*pairs)


def test_a_learning_rate_that_is_a_tensor_is_read_at_each_step() -> None:
    a, b = weights(), weights()
    rates = torch.tensor(0.1), torch.tensor(0.1)
    for params, make, rate in ((a, FusedAdamW, rates[0]), (b, torchs, rates[1])):
        optimizer = make([{"params": params[:2]}, {"params": params[2:]}], lr=rate)
        for i in range(4):
            fill(params, i)
            optimizer.step()
            rate.mul_(0.5)
    assert equal(a, b)


def test_groups_that_are_added_in_mid_run_begin_at_step_one() -> None:
    a, b = weights(), weights()
    ours, theirs = FusedAdamW(a[:2]), torchs(b[:2])
    for i in range(6):
        for params, optimizer in ((a, ours), (b, theirs)):
            if i == 2:
                optimizer.add_param_group({"params": params[2:4]})
            if i == 4:
                optimizer.add_param_group({"params": params[4:], "lr": 0.5, "weight_decay": 0.0})
            fill(params, i, left_out=(1,) if i == 3 else ())
            optimizer.step()
        known = len([p for group in ours.param_groups for p in group["params"]])
        same(ours, a[:known], theirs, b[:known])
    assert counts(ours, a) == [6, 5, 4, 4, 2, 2]


def test_settings_that_change_between_steps_are_followed() -> None:
    a, b = weights(), weights()
    for params, make in ((a, FusedAdamW), (b, torchs)):
        optimizer = make([{"params": params[:3]}, {"params": params[3:]}], lr=0.1)
        for i, change in enumerate([{}, {"lr": 0.3}, {"weight_decay": 0.5}, {"betas": (0.5, 0.9)}, {"eps": 1e-2}, {"maximize": True}]):
            optimizer.param_groups[i % 2].update(change)
            fill(params, i)
            optimizer.step()
    assert equal(a, b)


@pytest.mark.parametrize(
    "make_schedule", [lambda o: LambdaLR(o, lambda i: 0.5**i), lambda o: OneCycleLR(o, 0.3, total_steps=8)], ids=["lambda", "cycle"]
)
def test_schedules_that_wrap_the_step_or_move_betas_work(make_schedule: Callable[[Any], Any]) -> None:
    a, b = weights(), weights()
    for params, make in ((a, FusedAdamW), (b, torchs)):
        optimizer = make(params, lr=0.1)
        schedule = make_schedule(optimizer)  # replaces optimizer.step by a wrapper, and warns if it is not called
        for i in range(5):
            fill(params, i)
            optimizer.step()
            schedule.step()
    assert equal(a, b)


def test_a_scheduled_step_still_takes_its_factor() -> None:
    a, b = weights(), weights()
    ours, plain = FusedAdamW(a), FusedAdamW(b)
    LambdaLR(ours, lambda _: 1.0)
    fill(a, 0)
    fill(b, 0, size=0.25)
    ours.step(factor=0.25)
    plain.step()
    assert equal(a, b)


def test_hooks_run_around_each_step_in_torchs_order_and_may_change_gradients() -> None:
    told: dict[str, list[str]] = {}
    pairs = []
    for name, make in (("ours", FusedAdamW), ("theirs", torchs)):
        heard = told.setdefault(name, [])
        params = weights()
        optimizer = make(params)

        def halve(optimizer: Any, args: Any, kwargs: Any, heard: list[str] = heard) -> None:
            heard.append("own pre")
            for p in optimizer.param_groups[0]["params"]:
                p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_, heard=heard: heard.append("own post"))
        handles = [
            register_optimizer_step_pre_hook(lambda *_, heard=heard: heard.append("global pre")),
            register_optimizer_step_post_hook(lambda *_, heard=heard: heard.append("global post")),
        ]
        for i in range(2):
            fill(params, i)
            optimizer.step()
        for handle in handles:
            handle.remove()
        pairs.append(params)
    assert told["ours"] == told["theirs"]
    assert told["ours"][:4] == ["global pre", "own pre", "own post", "global post"]
    assert equal(*pairs)


def test_a_pre_hook_may_give_other_arguments() -> None:
    params = weights()
    optimizer = FusedAdamW(params)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "factor": 0.0 + 0.5}))
    twin = weights()
    plain = FusedAdamW(twin)
    fill(params, 0)
    fill(twin, 0, size=0.5)
    optimizer.step()
    plain.step()
    assert equal(params, twin)


def test_a_closure_runs_once_with_gradients_and_its_loss_comes_back() -> None:
    pairs, losses, times = [], [], []
    for make in (FusedAdamW, torchs):
        params = weights()
        optimizer = make(params, lr=0.1)
        seen: list[bool] = []

        def closure(optimizer: Any = optimizer, params: list[nn.Parameter] = params, seen: list[bool] = seen) -> Tensor:
            seen.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in params)
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append([float(optimizer.step(closure)), float(optimizer.step(closure=closure))])
        pairs.append(params)
        times.append(seen)
    assert losses[0] == losses[1]
    assert times[0] == times[1] == [True, True]
    assert equal(*pairs)


@pytest.mark.parametrize("bad", [0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_it_obeys_torchs_protocol_with_a_grad_scaler(scale: float | None, bad: float) -> None:
    a, b = weights(), weights()
    ours, theirs = FusedAdamW(a, lr=0.1), torchs(b, lr=0.1)
    for i in range(4):
        for params, optimizer in ((a, ours), (b, theirs)):
            fill(params, i, size=scale or 1.0, left_out=(0,) if i == 2 else ())
            if i:
                optimizer.found_inf = torch.tensor(bad if i % 2 else 0.0)
                optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            optimizer.step()
        same(ours, a, theirs, b)
        for p, q in zip(a, b, strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
    refused = 2 if bad else 0
    assert counts(ours, a)[1:] == [4 - refused] * (len(a) - 1)


def test_with_torchs_own_grad_scaler_a_bad_step_moves_and_counts_nothing() -> None:
    params = weights()
    optimizer, scaler = FusedAdamW(params), torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(3):
        loss = sum((p * (float("inf") if i == 1 and p.numel() > 1 else 1.0)).square().sum() for p in params)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        assert equal(params, before) == (i == 1)
    assert set(counts(optimizer, params)) == {2.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-4, 0.37, 5.0])
def test_a_factor_is_a_clip_and_a_step_within_an_ulp(max_norm: float, dtype: torch.dtype) -> None:
    a, b = weights(dtype=dtype), weights(dtype=dtype)
    ours, theirs = FusedAdamW(a, lr=0.1), torchs(b, lr=0.1)
    for i in range(4):
        for params in (a, b):
            fill(params, i, size=3.0)
        norm = torch.nn.utils.clip_grad_norm_(b, max_norm)
        theirs.step()
        ours.step(factor=clip_factor(float(norm), max_norm))
        for p, q in zip(a, b, strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad, q.grad, rtol=2**-22, atol=0)  # it leaves them multiplied
            torch.testing.assert_close(p, q, rtol=2**-21, atol=2**-22)
    assert counts(ours, a) == [4.0] * len(a)


def test_a_factor_of_zero_is_a_step_with_gradients_of_zero() -> None:
    a, b = weights(), weights()
    ours, theirs = FusedAdamW(a, lr=0.1), torchs(b, lr=0.1)
    for i in range(3):
        for params in (a, b):
            fill(params, i)
        if i == 1:
            for q in b:
                q.grad.zero_()
        ours.step(factor=0.0 if i == 1 else 1.0)
        theirs.step()
    same(ours, a, theirs, b)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_sparse_gradients_are_refused_and_nothing_moves(steps_before: int) -> None:
    table, dense = nn.Embedding(4, 3), nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([dense, table.weight])
    for _ in range(steps_before):
        dense.grad = torch.ones(2)
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    table.sparse = True
    dense.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    before = [dense.detach().clone(), table.weight.detach().clone()]
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    assert equal([dense, table.weight], before)
    assert set(counts(optimizer, [dense, table.weight])) <= {float(steps_before), None if not steps_before else 2.0}


@pytest.mark.parametrize("settings", [{}, {"maximize": True, "weight_decay": 0.2}], ids=str)
def test_complex_parameters_beside_real_ones_are_updated_as_torch_does_without_fusing(settings: dict[str, Any]) -> None:
    begun = torch.randn(4, 3, dtype=torch.complex64), torch.randn(5), torch.randn(3, dtype=torch.float64)
    a, b = [nn.Parameter(t.clone()) for t in begun], [nn.Parameter(t.clone()) for t in begun]
    ours, theirs = FusedAdamW(a, lr=0.1, **settings), torch.optim.AdamW(b, lr=0.1, foreach=False, **settings)
    for _ in range(4):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_step_without_gradients_does_nothing_and_makes_no_states() -> None:
    params = weights()
    before = [p.detach().clone() for p in params]
    optimizer = FusedAdamW(params)
    assert optimizer.step() is None
    assert equal(params, before)
    assert counts(optimizer, params) == [None] * len(params)


def test_a_subclass_with_a_step_of_its_own_works() -> None:
    heard: list[str] = []

    class Counting(FusedAdamW):
        def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
            heard.append("step")
            return super().step(closure, factor=factor)

    a, b = weights(), weights()
    ours, plain = Counting(a), FusedAdamW(b)
    for params, optimizer in ((a, ours), (b, plain)):
        fill(params, 0)
        optimizer.step()
    assert heard == ["step"]
    assert equal(a, b)


def test_steps_show_in_a_profile_under_the_optimizers_name() -> None:
    params = weights()
    optimizer = FusedAdamW(params)
    fill(params, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#FusedAdamW.step" in names
    assert "Optimizer.zero_grad#FusedAdamW.zero_grad" in names


@pytest.mark.parametrize("to_none", [True, False])
def test_clearing_is_torchs(to_none: bool) -> None:
    params = weights()
    optimizer = FusedAdamW([{"params": params[:2]}, {"params": params[2:]}])
    fill(params, 0, left_out=(1,))
    optimizer.zero_grad(to_none)
    assert params[1].grad is None
    assert all(p.grad is None if to_none else not bool(p.grad.any()) for i, p in enumerate(params) if i != 1)
