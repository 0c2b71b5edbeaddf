"""Activations in 8 bits through the doors: the same losses, steps that are replayed to the same bits, and settings that reach the model."""

import pytest
import torch
from torch import nn

from halfstep import Accelerator, TrainingArguments
from halfstep.amp import bound_policy, saved


def run(precision, **settings):
    """Three steps of a small network: losses, weights and results of the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.1), nn.Linear(128, 64))
    accelerator = Accelerator(precision=precision, cpu=True, **settings)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x, losses, results = torch.randn(64, 64), [], []
    for _ in range(3):
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        results.append(accelerator.last_step)
    return losses, [p.detach().clone() for p in model.parameters()], results


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean"])
def test_the_accelerator_trains_so_and_two_runs_give_the_same_bits(precision, monkeypatch):
    count, stock = [], saved.Packed.__init__
    monkeypatch.setattr(saved.Packed, "__init__", lambda self, *args: (count.append(1), stock(self, *args))[1])
    exact, weights, _ = run(precision)
    assert not count
    losses, ours, results = run(f"{precision},activations=int8")
    assert len(count) >= 9
    assert losses[0] == exact[0]  # the forward pass is the same
    assert all(r.applied for r in results)
    assert losses[-1] == pytest.approx(exact[-1], rel=0.02)
    assert any(not torch.equal(a, b) for a, b in zip(ours, weights, strict=True))
    again = run(f"{precision},activations=int8")
    assert again[0] == losses
    assert all(torch.equal(a, b) for a, b in zip(again[1], ours, strict=True))


def test_a_replayed_step_is_the_step_first_taken_at_that_scale():
    settings = "fp16-mixed,scale_strategy=stock,activations=int8,scale=dynamic:"
    _, high, results = run(f"{settings}2^30", on_overflow="replay")
    assert results[0].replays > 0
    assert results[0].applied
    _, low, plain = run(f"{settings}{results[0].scale:.0f}", on_overflow="replay")
    assert plain[0].replays == 0
    assert all(torch.equal(a, b) for a, b in zip(high, low, strict=True))


def test_the_field_and_the_text_say_the_same():
    assert str(TrainingArguments(bf16=True, activations="fp8").policy) == "bf16-mixed,activations=fp8"
    model = Accelerator(precision="fp32,activations=int8", cpu=True).prepare(nn.Linear(8, 8))
    assert bound_policy(model).activations == "int8"
