"""What a second look at a bad step's forward passes tells, and what it leaves alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from halfstep import StepResult, amp
from halfstep.amp import GradScaler
from halfstep.errors import ConfigError


def optimizer_of(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.05)


def step(scaler: GradScaler, optimizer: SGD, loss: Callable[[], Tensor]) -> StepResult:
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def test_two_optimizers_after_one_forward_pass_are_told_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.mul_(1000)
        model[2].weight.mul_(1000)
    parts = [list(model[:3].parameters()), list(model[3:].parameters())]
    optimizers, scaler = [torch.optim.SGD(part, lr=1e-3) for part in parts], GradScaler(heal="pin")
    scaler.watch(model)
    results = []
    for _ in range(2):
        with amp.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        scaler.scale(loss).backward()
        results += [scaler.step(optimizer) for optimizer in optimizers]
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert [r.reason for r in results] == ["forward-overflow", "forward-overflow", "applied", "applied"]
    assert [r.pinned for r in results] == [("2",), ("2",), (), ()]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_not_finite_is_the_data(value: float) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), torch.randn(4, 8)
    x[1, 2] = value
    scaler = GradScaler(heal="pin")
    scaler.watch(model)
    result = step(scaler, optimizer_of(model), lambda: model(x).float().mean())
    assert (result.reason, result.culprits[0].name, result.pinned) == ("nonfinite-loss", "input input", ())


def test_inputs_that_were_changed_since_are_not_run_again() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), torch.full((4, 8), math.nan)
    scaler, optimizer = GradScaler(), optimizer_of(model)
    scaler.watch(model)
    scaler.scale(model(x).mean()).backward()
    x.zero_()  # a batch that is used again
    result = scaler.step(optimizer)
    assert not result
    assert "changed in place" in result.detail


def test_a_look_leaves_counters_and_generators_of_the_model_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls, self.generator = nn.Linear(8, 1), 0, torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x + torch.randn(8, generator=self.generator))  # type: ignore[no-any-return]

    model, twin = Counting(), torch.Generator().manual_seed(1)
    torch.randn(8, generator=twin)
    scaler = GradScaler(enabled=False)
    scaler.watch(model)
    assert not step(scaler, optimizer_of(model), lambda: model(torch.full((4, 8), math.nan)).mean())
    assert model.calls == 1
    assert torch.equal(model.generator.get_state(), twin.get_state())


@pytest.mark.parametrize("thing", ["model", None, 3])
def test_watching_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigError, match="watch"):
        GradScaler().watch(thing)
