"""Clipping by value: on unscaled gradients, and an overflow stays one."""

import pytest
import torch
from torch import nn

from halfstep import Accelerator
from halfstep.amp import GradScaler
from halfstep.errors import ConfigError


def prepared(precision: str, **kwargs):
    torch.manual_seed(0)
    accelerator = Accelerator(precision, cpu=True, **kwargs)
    net = nn.Linear(3, 1, bias=False)
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(("value", "clipped"), [(0.5, True), (100.0, False)])
def test_elements_of_unscaled_gradients_are_clamped(precision: str, value: float, clipped: bool) -> None:
    accelerator, net, optimizer = prepared(precision)
    before = net.weight.detach().clone()
    accelerator.backward((net(torch.tensor([[1.0, -4.0, 0.25]]))).sum())
    accelerator.clip_grad_value_(net.parameters(), value)
    expected = torch.tensor([[1.0, -4.0, 0.25]]).clamp(-value, value)
    assert torch.equal(net.weight.grad, expected)
    result = optimizer.step()
    assert result.applied
    assert result.clipped is clipped
    assert result.grad_norm == pytest.approx(17.0625**0.5)  # before clipping
    assert torch.equal(net.weight, before - expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e30])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_clamp_does_not_make_a_bad_gradient_good(precision: str, bad: float) -> None:
    accelerator, net, optimizer = prepared(precision)
    before = net.weight.detach().clone()
    net.weight.register_hook(lambda g: torch.full_like(g, bad))
    accelerator.backward(net(torch.ones(1, 3)).sum())
    accelerator.clip_grad_value_(net.parameters(), 0.5)
    assert not optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(net.weight, before)


def test_by_value_and_then_by_norm() -> None:
    accelerator, net, optimizer = prepared("fp16")
    accelerator.backward(net(torch.tensor([[3.0, 4.0, 0.0]])).sum())
    accelerator.clip_grad_value_(net.weight, 3.0)
    assert float(accelerator.clip_grad_norm_(net.parameters(), 1.0)) == pytest.approx(18**0.5)
    assert optimizer.step().clipped
    assert float(net.weight.grad.norm()) == pytest.approx(1.0, rel=1e-5)


def test_nothing_happens_inside_a_window_and_without_gradients() -> None:
    accelerator, net, _ = prepared("fp16", gradient_accumulation_steps=2)
    accelerator.clip_grad_value_(net.parameters(), 0.1)
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(1, 3)).sum())
        scaled = net.weight.grad.clone()
        accelerator.clip_grad_value_(net.parameters(), 0.1)
        accelerator.unscale_gradients()
    assert torch.equal(net.weight.grad, scaled)


def test_gradients_are_unscaled_on_request() -> None:
    accelerator, net, optimizer = prepared("fp16")
    accelerator.backward(net(torch.tensor([[1.0, 2.0, 3.0]])).sum())
    accelerator.unscale_gradients(optimizer)
    assert net.weight.grad.tolist() == [[1.0, 2.0, 3.0]]
    assert optimizer.step()


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_value_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="clip_value"):
        GradScaler("cpu").clip_grad_value_([torch.zeros(1)], value)


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    scaler = GradScaler("cpu")
    scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    with pytest.raises(ConfigError, match="sparse"):
        scaler.clip_grad_value_(table.parameters(), 1.0)
