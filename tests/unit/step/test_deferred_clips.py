"""Clipping, pinning and replays where verdicts are read after the step: as where they are read at once."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Accelerator, StepResult
from halfstep.amp import GradScaler, pins
from halfstep.errors import ConfigError, DivergedError
from halfstep.optim import FusedAdamW

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "halfstep": lambda params: FusedAdamW(params, lr=0.01),
}


def told(result: StepResult) -> tuple[Any, ...]:
    norm = result.grad_norm
    return (
        bool(result),
        result.reason,
        result.clipped,
        norm if norm is None else pytest.approx(norm, rel=1e-5, nan_ok=True),
        result.scale,
        result.next_scale,
        result.pinned,
        result.replays,
    )


def hand_loop(make: str, deferred: bool, max_norm: float | None, enabled: bool = True) -> tuple[list[StepResult], list[Tensor], list[float]]:
    """Six steps, the fourth with data that is inf; the gradients of each step as they were left."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer, scaler = MAKERS[make](model.parameters()), GradScaler(init_scale=64.0, growth_interval=3, deferred=deferred, enabled=enabled)
    scaler.watch(model)
    results, left = [], []
    for i in range(6):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) * (math.inf if i == 3 else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        results.append(scaler.step(optimizer, max_norm=max_norm))
        scaler.update()
        left += [p.grad.clone() for p in model.parameters()] if i != 3 else []
        optimizer.zero_grad()
    scaler.get_scale()
    return results, [p.detach().clone() for p in model.parameters()] + left, [float(optimizer.state[p]["step"]) for p in model.parameters()]


@pytest.mark.parametrize("enabled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("max_norm", [None, 0.0, 0.05, 0.9, 1e9, math.inf])
@pytest.mark.parametrize("make", MAKERS)
def test_a_clip_on_the_device_is_the_clip_at_once(make: str, max_norm: float | None, enabled: bool) -> None:
    at_once, later = hand_loop(make, False, max_norm, enabled), hand_loop(make, True, max_norm, enabled)
    assert type(later[0][2]) is not type(at_once[0][2]), "nothing was deferred"
    for a, b in zip(at_once[0], later[0], strict=True):
        assert told(a) == told(b.settled())
    for p, q in zip(at_once[1], later[1], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert at_once[2] == later[2] == [5.0, 5.0]


def test_a_clip_on_the_device_is_torchs_clip_and_step() -> None:
    _, ours, _ = hand_loop("halfstep", True, 0.05, True)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for i in (0, 1, 2, 4, 5):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), ours[:2], strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
@pytest.mark.parametrize("make", MAKERS)
def test_a_norm_that_is_none_is_refused_where_verdicts_are_read_later_too(make: str, max_norm: float) -> None:
    model = nn.Linear(4, 3)
    optimizer, scaler = MAKERS[make](model.parameters()), GradScaler(init_scale=64.0, deferred=True)
    for i in range(2):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if i:
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ConfigError, match="max_norm"):
                scaler.step(optimizer, max_norm=max_norm)
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            assert scaler.step(optimizer, max_norm=1.0)
            return
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Overflows(nn.Module):
    """`wide` passes fp16's range where `size` is large, its output is normed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.norm, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.wide(self.first(x))))  # type: ignore[no-any-return]


def run_steps(make: str, deferred: bool, heal: Any, *, grow: float = 1e6, loss: float = 1.0, overflow: bool = True, **more: Any) -> dict[str, Any]:
    """Four steps through `run_step`; `wide` grows beyond fp16 before the third, whose loss is also multiplied."""
    torch.manual_seed(0)
    accelerator = Accelerator(precision="fp16-mixed", cpu=True, heal=heal, **more)
    accelerator.scaler._engine.state.deferred = deferred
    model = Overflows()
    model, optimizer = accelerator.prepare(model, MAKERS[make](model.parameters()))
    results: list[Any] = []
    counts = []
    for i in range(4):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(i))
        if i == 2:
            with torch.no_grad():
                model.wide.weight.mul_(grow)

        def compute(x: Tensor = x, times: float = loss if i == 2 else 1.0) -> None:
            accelerator.backward(model(x).float().square().mean() * times)

        try:
            results.append(told(accelerator.run_step(optimizer, compute, max_norm=0.5, on_overflow=overflow)))
        except DivergedError:
            results.append("diverged")
        counts.append(accelerator.scaler._engine.bad_steps)
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    return {
        "results": results,
        "bad": counts,
        "pins": tuple(p.module for p in pins(model)),
        "weights": weights,
        "scale": accelerator.scaler.get_scale(),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"heal": "pin"},
        {"heal": "pin", "overflow": False},
        {"heal": "pin", "patience": 1},
        {"heal": "skip"},
        {"heal": "skip", "grow": 1.0, "loss": 1e5},
        {"heal": "skip", "grow": 1.0, "loss": 1e5, "patience": 1},
        {"heal": "pin", "loss": 1e5, "patience": 1},
        {"heal": "pin", "grow": 1.0, "loss": math.nan},
        {"heal": "skip", "grow": 1.0, "loss": 1e5, "overflow": False, "patience": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_pinned_and_replayed_later_is_what_is_pinned_and_replayed_at_once(make: str, settings: dict[str, Any]) -> None:
    at_once, later = run_steps(make, False, **settings), run_steps(make, True, **settings)
    for key in ("results", "bad", "pins", "scale"):
        assert at_once[key] == later[key], key
    for p, q in zip(at_once["weights"], later["weights"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", MAKERS)
def test_under_deferral_a_module_that_overflows_is_pinned_and_its_step_applied(make: str) -> None:
    run = run_steps(make, True, "pin")
    assert run["pins"] == ("wide",)
    assert [r[0] for r in run["results"]] == [True] * 4
    assert run["results"][2][6:] == (("wide",), 1)
    assert run["bad"] == [0] * 4


@pytest.mark.parametrize("make", MAKERS)
def test_under_deferral_a_try_that_is_replayed_is_no_bad_step(make: str) -> None:
    run = run_steps(make, True, "skip", grow=1.0, loss=1e5, patience=1)
    assert [r[0] for r in run["results"]] == [True] * 4
    assert run["results"][2][7] >= 1
    assert run["bad"] == [0] * 4


def test_a_loop_by_hand_pins_under_deferral_too() -> None:
    outcomes = []
    for deferred in (False, True):
        torch.manual_seed(0)
        accelerator = Accelerator(precision="fp16-mixed", cpu=True, heal="pin")
        accelerator.scaler._engine.state.deferred = deferred
        model = Overflows()
        model, optimizer = accelerator.prepare(model, MAKERS["halfstep"](model.parameters()))
        results = []
        for i in range(5):
            if i == 2:
                with torch.no_grad():
                    model.wide.weight.mul_(1e6)
            accelerator.backward(model(torch.randn(6, 8, generator=torch.Generator().manual_seed(i))).float().square().mean())
            results.append(optimizer.step())
            optimizer.zero_grad()
        outcomes.append(([told(r.settled()) for r in results], tuple(p.module for p in pins(model))))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][1] == ("wide",)
