"""Without a loss scale a graph is not looked at in each step, and what joins it is met all the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from halfstep.amp import GradScaler


@pytest.mark.parametrize("joins", [4, 7])
def test_a_batch_norm_that_nobody_has_shown_is_put_back_from_its_second_loss_on(joins: int) -> None:
    torch.manual_seed(0)
    shown, late = nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)
    optimizer = torch.optim.SGD(shown.parameters(), lr=0.1)
    scaler = GradScaler(enabled=False)
    scaler.watch(shown)
    scaler.watch(optimizer)
    for i in range(joins + 3):
        y = shown(torch.randn(8, 3))
        before = late.running_mean.clone()
        y = late(y) if i >= joins else y
        bad = i == joins + 2
        scaler.scale((y * (math.nan if bad else 1.0)).square().mean()).backward()
        assert bool(scaler.step(optimizer)) is not bad
        scaler.update()
        optimizer.zero_grad()
        if bad:
            assert torch.equal(late.running_mean, before)


def test_most_graphs_of_a_steady_loop_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(enabled=False)
    scaler.watch(model)
    scaler.watch(optimizer)
    looked = []
    watch = scaler._engine.state.watch
    real = watch.look
    monkeypatch.setattr(watch, "look", lambda loss: looked.append(loss) or real(loss))
    for _ in range(64):
        scaler.scale(model(torch.randn(4, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert 4 <= len(looked) <= 8
