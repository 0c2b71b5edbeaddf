"""Gradient release through the accelerator: windows, loss scales, several optimizers, checkpoints, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Accelerator
from halfstep.amp import recycled
from halfstep.errors import ConfigError
from halfstep.optim import AdamW, release


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 140), nn.Tanh(), nn.Linear(140, 5))


def batch(step: int) -> Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(step))


def run(released: str, precision: str, window: int, steps: int = 7) -> tuple[list[Tensor], list[Any]]:
    accelerator, model = Accelerator(precision=precision, cpu=True, gradient_accumulation_steps=window), net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if released == "before":
        release(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if released == "after":
        accelerator.release(optimizer)
    results = []
    for step in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(step)).square().mean())
            gone = all(p.grad is None for p in model.parameters())
            assert gone == (released != "" and accelerator.sync_gradients)
            result = optimizer.step()
            optimizer.zero_grad()
        results.append((result.reason, result.grad_norm, result.loss, result.scale, result.next_scale))
    return [t.detach().clone() for p in model.parameters() for t in (p, *optimizer.state[p].values())], results


@pytest.mark.parametrize("released", ["before", "after"])
@pytest.mark.parametrize(("precision", "window"), [("bf16-lean,weights=split24", 1), ("fp16-lean", 3), ("fp16-mixed", 1), ("bf16-true", 2)])
def test_a_run_with_release_is_the_run_without(precision: str, window: int, released: str) -> None:
    """Weights, states, results and the loss scale, which is calibrated in the first backward pass and follows the gradients."""
    plain, ours = run("", precision, window), run(released, precision, window)
    assert plain[1] == ours[1]
    assert sum(r[0] == "applied" for r in ours[1]) == 7 // window
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))


def test_an_overflow_lowers_the_scale_and_leaves_out_what_it_reached() -> None:
    accelerator, model = Accelerator(precision="fp16-mixed,scale=dynamic:4", cpu=True), net()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
    accelerator.release(optimizer)
    accelerator.backward(model(batch(0)).square().mean())
    assert optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    hook = model[1].register_full_backward_hook(lambda _, found, __: (torch.full_like(found[0], float("inf")),))
    accelerator.backward(model(batch(1)).square().mean())
    hook.remove()
    result = optimizer.step()
    assert (result.reason, bool(result)) == ("partly", True)
    assert {c.name for c in result.culprits} == {"0.weight", "0.bias"}
    assert result.next_scale < result.scale
    assert not optimizer.step_was_skipped
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]
    accelerator.backward(model(batch(2)).square().mean())
    assert optimizer.step().reason == "applied"


def test_checkpoints_go_on_with_the_last_norm(tmp_path: Path) -> None:
    def steps(begin: int, end: int, load: bool = False, save: bool = False) -> list[Tensor]:
        accelerator, model = Accelerator(precision="bf16-lean", cpu=True), net()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
        if load:
            accelerator.load_state(tmp_path / "checkpoint-2")
        accelerator.release(optimizer, clip="last", max_norm=0.05)
        for step in range(begin, end):
            accelerator.backward(model(batch(step)).square().mean())
            assert optimizer.step().clipped
        if save:
            accelerator.save_state(tmp_path / "checkpoint-2")
        return [p.detach().clone() for p in model.parameters()]

    whole = steps(0, 4)
    steps(0, 2, save=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, steps(2, 4, load=True), strict=True))


def test_what_cannot_work_is_refused() -> None:
    accelerator, model = Accelerator(precision="fp16-mixed", cpu=True, on_overflow="replay"), net()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="half applied"):
        accelerator.release(optimizer)
    with pytest.raises(ConfigError, match="not prepared"):
        accelerator.release(AdamW(net().parameters()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"accelerator\.release"):
        release(optimizer)
    other, second = Accelerator(precision="bf16-mixed", cpu=True), net()
    second, its_optimizer = other.prepare(second, AdamW(second.parameters()))
    other.release(its_optimizer)
    other.backward(second(batch(0)).square().mean())
    with pytest.raises(ConfigError, match="used them up"):
        other.clip_grad_norm_(second.parameters(), 1.0)
    assert its_optimizer.step()


class Tied(nn.Module):
    """A table so large that its gradient is made in parts, and its memory kept for the next step where gradients are not released."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(recycled.LEAST // 16, 16), nn.Linear(16, recycled.LEAST // 16, bias=False)
        self.head.weight = self.table.weight
        self.middle = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.middle(self.table(tokens))).float(), tokens)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-lean,weights=split24"])
def test_a_large_tied_table_is_updated_once_and_its_gradient_is_not_kept(precision: str) -> None:
    def trained(released: bool) -> list[Tensor]:
        recycled.clear()
        accelerator, model = Accelerator(precision=precision, cpu=True), Tied()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
        if released:
            accelerator.release(optimizer)
        for step in range(2):
            accelerator.backward(model(torch.arange(5) * 1000 + step))
            assert (model.table.weight.grad is None) == released
            assert optimizer.step()
            optimizer.zero_grad()
        kept = [key for key in recycled._spare.blocks if key == (id(model.table.weight), recycled.GRADIENT)]
        assert not (released and kept)
        return [model.table.weight.detach().clone(), *(t.clone() for t in optimizer.state[model.table.weight].values())]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))
