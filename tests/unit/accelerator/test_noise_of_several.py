"""Optimizers of one run that were given the same seed round by different chances; runs stay reproducible, and old checkpoints go on as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import Accelerator
from halfstep.amp import GradScaler
from halfstep.optim import AdamW

PRECISION = "bf16-true,weights=stochastic"


class Run:
    """Two networks with the same weights and gradients, each with an optimizer of the default seed."""

    def __init__(self, make: Any = None) -> None:
        self.accelerator = Accelerator(cpu=True, precision=PRECISION)
        self.models = [nn.Linear(64, 64, bias=False) for _ in range(2)]
        make = make or (lambda p: AdamW(p, lr=1e-3))
        for model in self.models:
            nn.init.constant_(model.weight, 0.3)
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.models, self.optimizers = [self.accelerator.prepare(m) for m in self.models], [self.accelerator.prepare(o) for o in self.optimizers]

    def step(self, count: int = 3) -> None:
        for _ in range(count):
            loss = sum(model(torch.ones(2, 64)).float().square().mean() for model in self.models)
            self.accelerator.backward(loss)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [model.weight.detach().clone() for model in self.models]


@pytest.mark.parametrize("make", [None, lambda p: torch.optim.SGD(p, lr=1e-2)], ids=["AdamW", "wrapped"])
def test_two_optimizers_draw_apart_and_a_second_run_gives_the_same_bits(make: Any) -> None:
    run, again = Run(make), Run(make)
    run.step()
    again.step()
    first, second = run.weights()
    assert not torch.equal(first, second)
    assert 0.2 < float((first == second).float().mean()) < 0.95, "the same mean, by other chances"
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), again.weights(), strict=True))
    assert run.optimizers[0].optimizer.seed == 0, "that of the first, of a run with one, is what was asked for"


def test_it_resumes_and_a_checkpoint_of_before_keeps_its_noise(tmp_path: Path) -> None:
    run = Run()
    run.step()
    run.accelerator.save_state(tmp_path / "now")
    seeds = [o.optimizer.seed for o in run.optimizers]
    for optimizer in run.optimizers:
        optimizer.optimizer.seed = 0  # as it was before: both drew the same
    run.accelerator.save_state(tmp_path / "before")
    run.step()
    old = run.weights()
    for name, expected in (("now", seeds), ("before", [0, 0])):
        other = Run()
        other.accelerator.load_state(tmp_path / name)
        assert [o.optimizer.seed for o in other.optimizers] == expected
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(other.weights(), old, strict=True)) == (name == "before")


def test_in_a_loop_of_ones_own() -> None:
    nets = [nn.Linear(4, 4).bfloat16() for _ in range(3)]
    made = [AdamW(net.parameters(), seed=seed) for net, seed in zip(nets, (7, 7, 8), strict=True)]
    scaler = GradScaler(enabled=False)
    for _ in range(2):
        for net, optimizer in zip(nets, made, strict=True):
            scaler.scale(net(torch.ones(1, 4).bfloat16()).float().sum()).backward()
            scaler.step(optimizer)
    assert (made[0].seed, made[2].seed) == (7, 8)
    assert made[1].seed not in (7, 8)
    later = AdamW(nn.Linear(2, 2).bfloat16().parameters(), seed=7)
    later.load_state_dict(later.state_dict() | {"format": {"seed": 7, "steps": 5}})
    scaler.watch(later)
    assert later.seed == 7, "an optimizer that goes on keeps the noise that it began with"


def test_one_run_after_another_has_the_noise_of_the_first(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.layer(x).float().square().mean()}

    found = []
    for name in "ab":
        args = halfstep.TrainingArguments(str(tmp_path / name), use_cpu=True, disable_tqdm=True, max_steps=4, precision=PRECISION, save_strategy="no")
        run = halfstep.Trainer(Net(), args, train_dataset=[{"x": torch.ones(8)}] * 8)
        run.train()
        found.append(run.model.layer.weight.detach().clone())
    assert torch.equal(*found)
