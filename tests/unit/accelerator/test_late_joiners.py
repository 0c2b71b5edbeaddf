"""Graphs are not walked at each loss where everything is known; what joins late is part of the transaction all the same."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Accelerator
from halfstep.step.backward import BackwardWatch

SETTLES = 40  # steps after which nothing of the start is left


def ready(precision: str = "fp32") -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(precision=precision, cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return accelerator, model, optimizer


def take(accelerator: Accelerator, loss: Tensor, *optimizers: Any) -> list[Any]:
    accelerator.backward(loss)
    results = [optimizer.step() for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    return results


def data(i: int, bad: bool = False) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
    return x * math.inf if bad else x


def test_a_batch_norm_that_is_added_to_a_prepared_model_is_put_back_after_a_bad_step() -> None:
    accelerator, model, optimizer = ready()
    for i in range(20):
        assert take(accelerator, model(data(i)).square().mean(), optimizer)[0]
    model.insert(1, nn.BatchNorm1d(4, affine=False))
    norm = model[1]
    for i in range(2):
        assert take(accelerator, model(data(i)).square().mean(), optimizer)[0]
    before = norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)
    assert not take(accelerator, model(data(5, bad=True)).square().mean(), optimizer)[0]
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])
    assert take(accelerator, model(data(6)).square().mean(), optimizer)[0]
    assert bool(torch.isfinite(norm.running_var).all())


def test_a_batch_norm_nobody_has_shown_is_guarded_after_a_while() -> None:
    accelerator, model, optimizer = ready()
    norm = nn.BatchNorm1d(4, affine=False)
    for i in range(3):
        take(accelerator, model(data(i)).square().mean(), optimizer)
    for i in range(SETTLES):
        assert take(accelerator, model(norm(data(i))).square().mean() + norm(model[0](data(i))).square().mean(), optimizer)[0]
    before = norm.running_mean.clone()
    bad = model(data(1)).square().mean() + norm(model[0](data(7, bad=True))).square().mean()
    assert not take(accelerator, bad, optimizer)[0]
    assert torch.equal(norm.running_mean, before)


def test_a_batch_norm_of_a_model_that_was_not_prepared_is_guarded() -> None:
    """Called from the first step on: a graph that reaches parameters of nobody's is walked each time."""
    accelerator, model, optimizer = ready()
    other = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    for i in range(3):
        take(accelerator, other(model[0](data(i))).square().mean(), optimizer)
    before = other[0].running_mean.clone()
    result = take(accelerator, other(model[0](data(4, bad=True))).square().mean(), optimizer)[0]
    assert not result
    assert torch.equal(other[0].running_mean, before)


def test_parameters_that_are_unfrozen_late_and_their_optimizer_prepared_after_the_backward_pass() -> None:
    accelerator, model, optimizer = ready()
    model[1].requires_grad_(False)
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    for i in range(3):
        take(accelerator, model(data(i)).square().mean(), optimizer)
    model[1].requires_grad_(True)
    loss = model(data(3)).square().mean()
    expected = loss.item()
    accelerator.backward(loss)
    late = accelerator.prepare(torch.optim.AdamW(model[1].parameters(), lr=0.01))
    assert optimizer.step().loss == pytest.approx(expected)
    assert late.step().loss == pytest.approx(expected)


def test_a_loss_that_is_not_finite_is_seen_by_an_optimizer_that_is_prepared_after_the_backward_pass() -> None:
    """Its gradients are finite: only the loss tells."""
    accelerator, model, optimizer = ready()
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    model[1].requires_grad_(False)
    for i in range(3):
        take(accelerator, model(data(i)).square().mean(), optimizer)
    model[1].requires_grad_(True)
    before = model[1].weight.detach().clone()
    accelerator.backward(model(data(3)).square().mean() + math.nan)
    late = accelerator.prepare(torch.optim.AdamW(model[1].parameters(), lr=0.01))
    assert late.step().reason == "nonfinite-loss"
    assert torch.equal(model[1].weight, before)


def test_a_second_optimizer_is_told_its_own_losses_and_names_its_own_gradients() -> None:
    accelerator, model, optimizer = ready()
    other = nn.Linear(4, 1)
    for i in range(3):
        take(accelerator, model(data(i)).square().mean(), optimizer)
    other, late = accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.01))
    for i in range(4):
        one, two = model(data(i)).square().mean(), other(data(i)).square().mean()
        accelerator.backward(one)
        accelerator.backward(two)
        assert optimizer.step().loss == pytest.approx(one.item())
        assert late.step().loss == pytest.approx(two.item())
        optimizer.zero_grad()
        late.zero_grad()
    accelerator.backward(other(data(1) * 1e30).sum())
    result = late.step()
    assert result.reason == "overflow"
    assert "weight" in result.culprits[0].name


def test_an_optimizer_that_steps_with_old_gradients_is_not_judged_by_the_loss_of_another() -> None:
    """Both are stepped each time, as some loops do, and only one had a loss: the other has not seen the NaN."""
    accelerator, model, optimizer = ready()
    other = nn.Linear(4, 1)
    other, second = accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.01))
    for i in range(3):
        take(accelerator, model(data(i)).square().mean() + other(data(i)).square().mean(), optimizer, second)
    accelerator.backward(other(data(3)).square().mean())
    second.step()
    accelerator.backward(model(data(4)).square().mean() + math.nan)
    assert optimizer.step().reason == "nonfinite-loss"
    result = second.step()
    assert result.loss is None
    assert result.reason != "nonfinite-loss"


def test_a_settled_loop_walks_few_graphs_and_a_change_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    look = BackwardWatch.look
    monkeypatch.setattr(BackwardWatch, "look", lambda self, loss: walks.append(1) or look(self, loss))
    accelerator, model, optimizer = ready()
    for i in range(3):
        take(accelerator, model(data(i)).square().mean(), optimizer)
    walks.clear()
    for i in range(SETTLES):
        take(accelerator, model(data(i)).square().mean(), optimizer)
    assert len(walks) <= SETTLES // 8
    walks.clear()
    other = nn.Linear(4, 1)
    other, _ = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    take(accelerator, model(data(1)).square().mean(), optimizer)
    assert walks


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-mixed,scale=static:1"])
def test_under_a_loss_scale_every_graph_is_walked(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    look = BackwardWatch.look
    monkeypatch.setattr(BackwardWatch, "look", lambda self, loss: walks.append(1) or look(self, loss))
    accelerator, model, optimizer = ready(precision)
    for i in range(6):
        take(accelerator, model(data(i)).float().square().mean(), optimizer)
    assert len(walks) == 6
