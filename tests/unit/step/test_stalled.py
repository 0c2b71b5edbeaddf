"""The share of updates that rounded away, as a step tells it when it is asked."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.amp import GradScaler
from halfstep.errors import ConfigError
from halfstep.optim import HALF, AdamW, attach, wrap

HOLDING = ["split", "split24", "kahan"]


def made(dtype: torch.dtype, storage: str | None, count: int = 500) -> nn.Parameter:
    start = torch.empty(count).uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(start.to(dtype))
    if storage is not None:
        attach(p, storage)
    return p


def stepped(p: nn.Parameter, optimizer: Any, s: GradScaler, slope: Tensor | float = 1.0, **asked: Any) -> float | None:
    optimizer.zero_grad()
    s.scale((p.float() * slope).sum()).backward()
    result = s.step(optimizer, **asked)
    s.update()
    assert result
    return result.stalled


def off() -> GradScaler:
    return GradScaler(enabled=False)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("way", ["AdamW", "wrapped"])
def test_without_masters_tiny_updates_all_stall_and_with_them_none(way: str, dtype: torch.dtype) -> None:
    for storage in ("plain", *HOLDING):
        p = made(dtype, storage)
        lr = 1e-4 if dtype == torch.bfloat16 else 2e-5
        optimizer = AdamW([p], lr=lr, weight_decay=0.0) if way == "AdamW" else wrap(torch.optim.AdamW([p], lr=lr, weight_decay=0.0))
        found = [stepped(p, optimizer, off_scaler, stalled=True) for off_scaler in [off()] for _ in range(4)]
        assert found == ([1.0] * 4 if storage == "plain" else [0.0] * 4), storage


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("way", ["AdamW", "wrapped"])
def test_masters_that_are_made_in_the_first_step_count_in_it(way: str, dtype: torch.dtype) -> None:
    p = made(dtype, None)
    lr = 1e-4 if dtype == torch.bfloat16 else 2e-5
    optimizer = AdamW([p], lr=lr, weight_decay=0.0) if way == "AdamW" else wrap(torch.optim.AdamW([p], lr=lr, weight_decay=0.0))
    assert stepped(p, optimizer, off(), stalled=True) == 0.0


def test_fp32_weights_stall_where_updates_are_below_half_an_ulp() -> None:
    p = nn.Parameter(torch.cat((torch.full((300,), 1.0), torch.full((100,), 1e-3))))
    optimizer = AdamW([p], lr=1e-8, weight_decay=0.0)
    s = off()
    assert stepped(p, optimizer, s, stalled=True) == 0.75  # 1e-8 is below 2^-24, and above what 1e-3 is spaced by
    optimizer.param_groups[0]["lr"] = 1e-3
    assert stepped(p, optimizer, s, stalled=True) == 0.0


def test_stock_optimizers_are_measured_too() -> None:
    p = nn.Parameter(torch.ones(8))
    assert stepped(p, torch.optim.SGD([p], lr=1e-9), off(), stalled=True) == 1.0
    assert stepped(p, torch.optim.SGD([p], lr=1e-3), off(), stalled=True) == 0.0


def test_it_is_none_unless_it_was_asked_for() -> None:
    p = made(torch.bfloat16, "plain")
    optimizer, s = AdamW([p], lr=1e-6), off()
    assert stepped(p, optimizer, s) is None
    assert stepped(p, optimizer, s, stalled=False) is None
    assert stepped(p, optimizer, s, stalled=True) == 1.0
    assert stepped(p, optimizer, s) is None


def test_only_elements_with_a_gradient_count() -> None:
    p = made(torch.bfloat16, "plain", 8)
    slope = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    optimizer, s = AdamW([p], lr=0.5, weight_decay=0.0), off()
    assert stepped(p, optimizer, s, slope, stalled=True) == 0.0
    other, resting = made(torch.bfloat16, "split", 8), nn.Parameter(torch.ones(3).bfloat16())
    assert stepped(other, AdamW([other, resting], lr=1e-5), off(), slope, stalled=True) == 0.0


def test_it_is_none_where_no_gradient_is_other_than_zero_and_where_the_step_is_refused() -> None:
    p = made(torch.float16, "split")
    optimizer, s = AdamW([p]), GradScaler(strategy="stock", init_scale=1024.0)
    assert stepped(p, optimizer, s, 0.0, stalled=True) is None
    optimizer.zero_grad()
    s.scale((p.float() * math.inf).sum()).backward()
    result = s.step(optimizer, stalled=True)
    assert not result
    assert result.stalled is None


@pytest.mark.parametrize("asked", [{}, {"max_norm": 0.1}])
def test_it_is_measured_under_scaling_with_a_late_clip_and_with_a_closure(asked: dict[str, Any]) -> None:
    for storage, expected in (("plain", 1.0), ("split", 0.0)):
        p = made(torch.float16, storage)
        optimizer, s = AdamW([p], lr=2e-5, weight_decay=0.0), GradScaler(strategy="stock", init_scale=1024.0)
        assert stepped(p, optimizer, s, stalled=True, **asked) == expected

        def closure(p: nn.Parameter = p, optimizer: AdamW = optimizer, s: GradScaler = s) -> Tensor:
            optimizer.zero_grad()
            loss = p.float().sum()
            s.scale(loss).backward()
            return loss

        assert s.step(optimizer, closure, stalled=True).stalled == expected


def test_asking_changes_nothing() -> None:
    found = []
    for stalled in (True, False):
        p = made(torch.bfloat16, "split24")
        optimizer, s = AdamW([p], lr=1e-4, states="int8"), off()
        for _ in range(3):
            stepped(p, optimizer, s, stalled=stalled)
        found.append(p.detach().clone())
    assert torch.equal(*found)


def test_what_was_written_by_others_before_is_no_update() -> None:
    p = made(torch.bfloat16, "split")
    optimizer, s = AdamW([p], lr=0.0, weight_decay=0.0), off()
    stepped(p, optimizer, s)
    with torch.no_grad():
        p.mul_(0.5)
    assert stepped(p, optimizer, s, stalled=True) == 1.0


def test_an_error_of_the_step_is_the_steps() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="no effect"):
        stepped(p, AdamW([p], weights="split"), off(), stalled=True)


@pytest.mark.parametrize(("lr", "share"), [(1e-2, 0.0), (1e-12, 1.0)])
def test_it_is_measured_too_where_the_verdict_is_read_later(lr: float, share: float) -> None:
    p = nn.Parameter(torch.ones(64))
    optimizer, scaler = torch.optim.AdamW([p], lr=lr, weight_decay=0.0, fused=True), GradScaler(deferred=True)
    for factor in (1.0, 1.0, math.inf):  # the first step makes the states, and is judged at once
        scaler.scale((p * factor).sum()).backward()
        result = scaler.step(optimizer, stalled=True)
        scaler.update()
        optimizer.zero_grad()
        assert result.stalled == (share if result else None)
    assert not result
