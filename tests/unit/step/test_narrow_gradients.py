"""Gradients of 16-bit weights: 16-bit from one backward pass, fp32 where they are added up or divided, and steps that are put back whole."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep.amp
from halfstep.amp import GradScaler
from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import HALF, AdamW, attach, full_values, master_of, wrap

FIXED: dict[str, Any] = {"strategy": "stock", "init_scale": 1024.0}


def net(dtype: torch.dtype, storage: str = "split") -> nn.Sequential:
    made = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    for p in made.parameters():
        attach(p, storage, dtype)
    return made


def scaler(dtype: torch.dtype, **settings: Any) -> GradScaler:
    return GradScaler(**(FIXED | settings)) if dtype == torch.float16 else GradScaler(enabled=False)


def loss_of(model: nn.Module, seed: int = 0, size: float = 1.0) -> Tensor:
    p = next(model.parameters())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return (model(x.to(p.dtype)).float() * size).square().mean()


def weight_of(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All bits of weights, residuals and states."""
    found = []
    for p in model.parameters():
        master = master_of(p)
        found += [p.detach(), *([] if master is None or master.residual is None else [master.residual])]
        found += [t for _, t in sorted(optimizer.state[p].items())] if p in optimizer.state else []
    return [t.clone() for t in found]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def micro(model: nn.Module, seed: int, scale: float) -> list[Tensor]:
    """The 16-bit gradients of one micro-batch, as a backward pass of its scaled loss makes them."""
    return list(torch.autograd.grad(loss_of(model, seed) * scale, list(model.parameters())))


# --- one backward pass, and several


@pytest.mark.parametrize("dtype", HALF)
def test_one_backward_pass_leaves_16_bit_gradients_and_later_ones_fp32(dtype: torch.dtype) -> None:
    model, found = net(dtype), []
    optimizer, s = AdamW(model.parameters()), scaler(dtype)
    for _ in range(2):
        for number in range(3):
            s.scale(loss_of(model, number)).backward()
            found.append({p.grad.dtype for p in model.parameters() if p.grad is not None})
        s.step(optimizer)
        s.update()
        optimizer.zero_grad()
    assert found == [{dtype}, {torch.float32}, {torch.float32}] * 2


@pytest.mark.parametrize("dtype", HALF)
def test_64_micro_batches_add_up_as_in_fp64(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer, s = AdamW(model.parameters()), scaler(dtype)
    scale, twin = s.get_scale(), copy.deepcopy(model)  # the same 16 bits, and gradients of its own
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    naive = [torch.zeros(p.shape, dtype=dtype) for p in model.parameters()]
    for number in range(64):
        for total, rough, g in zip(exact, naive, micro(twin, number, scale), strict=True):
            assert g.dtype == dtype
            total.add_(g.double())
            rough.add_(g)
        s.scale(loss_of(model, number)).backward()
    s.step(optimizer)
    s.update()
    worst = 0.0
    for p, total, rough in zip(model.parameters(), exact, naive, strict=True):
        assert p.grad is not None
        by = scale if torch.allclose(p.grad.double() * scale, total, rtol=1e-3) else 1.0  # divided in the step, or on the way in
        size = float(total.abs().max())
        assert float((p.grad.double() * by - total).abs().max()) <= 1e-5 * size
        worst = max(worst, float((rough.double() - total).abs().max()) / size)
    assert worst > 1e-4  # added up in 16 bits they would be off


@pytest.mark.parametrize("dtype", HALF)
def test_accumulated_steps_are_steps_on_the_fp32_sum(dtype: torch.dtype) -> None:
    model, twin = net(dtype), net(dtype)
    twin.load_state_dict(model.state_dict())
    model.load_state_dict(twin.state_dict())  # both without residuals
    s, scale = scaler(dtype), 1024.0 if dtype == torch.float16 else 1.0
    optimizer, other = AdamW(model.parameters(), lr=1e-2), AdamW(twin.parameters(), lr=1e-2)
    for first in (0, 4):
        sums = [torch.zeros(p.shape) for p in twin.parameters()]
        for number in range(first, first + 4):
            for total, g in zip(sums, micro(twin, number, scale), strict=True):
                total.add_(g.float())
            s.scale(loss_of(model, number)).backward()
        s.step(optimizer)
        s.update()
        optimizer.zero_grad()
        for p, total in zip(twin.parameters(), sums, strict=True):
            p.grad, p.grad_dtype = None, torch.float32
            p.grad = total / scale
        other.step()
        other.zero_grad()
        for p in twin.parameters():
            p.grad_dtype = dtype
    assert equal(kept(model, optimizer), kept(twin, other))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_begin_anew(set_to_none: bool) -> None:
    model = net(torch.bfloat16)
    optimizer, s = AdamW(model.parameters()), GradScaler(enabled=False)
    for _ in range(3):
        for number in range(2):
            s.scale(loss_of(model, number)).backward()
        s.step(optimizer)
        optimizer.zero_grad(set_to_none)
    s.scale(loss_of(model, 5)).backward()
    expected = micro(model, 5, 1.0)
    for p, g in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad.float(), g.float())
        assert p.grad.dtype == (torch.bfloat16 if set_to_none else torch.float32)


# --- dividing


def test_unscaling_fp16_gradients_gives_true_fp32_ones() -> None:
    p = nn.Parameter(torch.ones(64))
    attach(p, "split", torch.float16)
    slope = torch.logspace(-11, -1, 64)  # far below fp16's smallest number
    optimizer, s = AdamW([p]), GradScaler(strategy="stock", init_scale=2.0**14)
    s.scale((p.float() * slope).sum()).backward()
    assert p.grad is not None
    assert p.grad.dtype == torch.float16
    scaled = p.grad.double()
    s.unscale_(optimizer)
    assert p.grad.dtype == torch.float32
    assert torch.equal(p.grad.double() * 2.0**14, scaled)
    assert int((p.grad != 0).sum()) > int((slope.half() != 0).sum())
    with pytest.raises(StepOrderError, match="twice"):
        s.unscale_(optimizer)


def test_gradients_that_were_unscaled_are_stepped_with_as_they_are() -> None:
    results = []
    for early in (True, False):
        torch.manual_seed(3)
        model = net(torch.float16)
        optimizer, s = AdamW(model.parameters(), lr=1e-2), GradScaler(**FIXED)
        for number in range(3):
            s.scale(loss_of(model, number)).backward()
            if early:
                s.unscale_(optimizer)
            assert s.step(optimizer)
            s.update()
            optimizer.zero_grad()
        results.append(kept(model, optimizer))
    assert equal(*results)


@pytest.mark.parametrize("way", ["scaler", "halfstep", "torch"])
def test_clipping_after_unscaling_is_torchs_on_true_gradients(way: str) -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(**FIXED)
    s.watch(optimizer)
    s.scale(loss_of(model, size=3.0)).backward()
    true = [nn.Parameter(torch.zeros(p.shape)) for p in model.parameters()]
    for p, q in zip(model.parameters(), true, strict=True):
        assert p.grad is not None
        q.grad = p.grad.float() / 1024.0
    if way == "scaler":
        total = s.clip_grad_norm_(model.parameters(), 0.1)
    elif way == "halfstep":
        total = halfstep.amp.clip_grad_norm_(model.parameters(), 0.1)
    else:
        s.unscale_(optimizer)
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(true, 0.1)
    torch.testing.assert_close(total.float(), expected, rtol=2.0**-22, atol=0.0)
    for p, q in zip(model.parameters(), true, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=2.0**-22, atol=0.0)
    assert s.step(optimizer).clipped


def test_a_hook_before_the_step_sees_true_gradients() -> None:
    model, seen = net(torch.float16), []
    optimizer, s = AdamW(model.parameters()), GradScaler(**FIXED)
    s.scale(loss_of(model)).backward()
    scaled = weight_of(model).grad
    assert scaled is not None
    expected = scaled.float() / 1024.0
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight_of(model).grad.clone()))  # type: ignore[union-attr]
    s.step(optimizer)
    assert torch.equal(seen[0], expected)


# --- refused steps and closures


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("storage", ["split", "split24", "kahan", "stochastic"])
@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_a_refused_step_changes_no_bit(bad: float, storage: str, max_norm: float | None) -> None:
    model = net(torch.float16, storage)
    optimizer, s = AdamW(model.parameters(), lr=1e-2, states="int8"), GradScaler(strategy="stock", init_scale=2.0**16)
    for number in range(2):
        s.scale(loss_of(model, number)).backward()
        s.step(optimizer)
        s.update()
        optimizer.zero_grad()
    before, about = kept(model, optimizer), optimizer.state_dict()["format"]
    versions = [p._version for p in model.parameters()]
    s.scale(loss_of(model) * bad).backward()
    result = s.step(optimizer, max_norm=max_norm)
    assert not result
    assert result.reason == ("overflow" if math.isfinite(bad) else "nonfinite-loss")
    assert equal(kept(model, optimizer), before)
    assert [p._version for p in model.parameters()] == versions
    assert optimizer.state_dict()["format"] == about
    s.update()
    optimizer.zero_grad()
    s.scale(loss_of(model)).backward()
    assert s.step(optimizer, max_norm=max_norm)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_closure_whose_evaluation_is_bad_puts_everything_back(begun: bool, states: str, kind: torch.dtype) -> None:
    model = net(kind, "split24") if begun else nn.Linear(8, 4).to(kind)
    optimizer, s = AdamW(model.parameters(), lr=1e-2, states=states), scaler(kind)

    def closure(factor: float) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model) * factor
        s.scale(loss).backward()
        return loss

    if begun:
        assert s.step(optimizer, lambda: closure(1.0))
        s.update()
    before, about = kept(model, optimizer), optimizer.state_dict()["format"]
    result = s.step(optimizer, lambda: closure(math.nan))
    assert not result
    assert result.reason == "nonfinite-loss"
    assert equal(kept(model, optimizer), before)
    assert optimizer.state_dict()["format"] == about
    s.update()
    assert s.step(optimizer, lambda: closure(1.0))
    assert not equal(kept(model, optimizer), before)


def test_a_closure_that_fails_after_a_write_of_its_own_puts_residuals_back() -> None:
    model = net(torch.bfloat16)
    optimizer, s = AdamW(model.parameters(), lr=1e-2), GradScaler(enabled=False)
    s.scale(loss_of(model)).backward()
    s.step(optimizer)
    optimizer.zero_grad()
    before = kept(model, optimizer)

    def closure() -> Tensor:
        with torch.no_grad():
            weight_of(model).fill_(3.0)
        raise KeyError("a loader")

    with pytest.raises(KeyError):
        s.step(optimizer, closure)
    assert equal(kept(model, optimizer), before)
    assert torch.equal(full_values(weight_of(model)), full_values(weight_of(model)))


# --- optimizers that know no masters


def test_a_stock_optimizer_on_16_bit_weights_is_refused_under_scaling() -> None:
    model = nn.Linear(8, 4).half()
    optimizer, s = torch.optim.AdamW(model.parameters()), GradScaler(**FIXED)
    s.name_parameters(model.named_parameters())
    before = model.weight.detach().clone()
    s.scale(loss_of(model)).backward()
    with pytest.raises(ConfigError, match=r"weight is float16.*AdamW.*halfstep.optim.wrap"):
        s.step(optimizer)
    assert torch.equal(model.weight.detach(), before)


def test_a_stock_optimizer_on_16_bit_weights_is_warned_about_once_without_scaling() -> None:
    model = nn.Linear(8, 4).bfloat16()
    optimizer, s = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler(enabled=False)

    def steps(count: int) -> None:
        for number in range(count):
            s.scale(loss_of(model, number)).backward()
            assert s.step(optimizer)
            s.update()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"bfloat16.*SGD.*wrap") as caught:
        steps(3)
    assert len(caught) == 1


@pytest.mark.parametrize("kind", HALF)
def test_16_bit_weights_without_masters_are_taken_in_silence_where_that_is_said(kind: torch.dtype) -> None:
    model = nn.Linear(8, 4).to(kind)
    optimizer, s = wrap(torch.optim.SGD(model.parameters(), lr=0.1), weights="plain"), scaler(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s.scale(loss_of(model)).backward()
        assert s.step(optimizer)
    assert all(master is None or master.nbytes() == 0 for master in map(master_of, model.parameters()))


def test_fp32_and_frozen_16_bit_weights_need_no_master() -> None:
    model = nn.Sequential(nn.Linear(8, 4).half().requires_grad_(False), nn.Linear(4, 4))
    optimizer, s = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler(**FIXED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s.scale(model[1](torch.ones(2, 4)).square().mean()).backward()
        assert s.step(optimizer)


def test_scaled_gradients_are_not_stepped_with_by_hand() -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(**FIXED)
    before = copy.deepcopy(model.state_dict())
    s.scale(loss_of(model)).backward()
    with pytest.raises(StepOrderError, match=r"scaler\.step"):
        optimizer.step()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
