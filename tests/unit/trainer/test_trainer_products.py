"""The trainer on machines with other rates: a resumed run keeps its products, and precision="auto" is chosen for the model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Trainer, TrainingArguments
from halfstep.accelerator import decided
from halfstep.amp.emulation import is_active
from halfstep.hardware import FAMILIES, probe, rates
from halfstep.hardware.race import Race
from halfstep.hardware.rates import Book
from halfstep.optim import AdamW

DATA = [{"x": torch.randn(16, generator=torch.Generator().manual_seed(i)), "labels": torch.tensor(float(i % 3))} for i in range(24)]
Machine = Callable[[float], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Moves this process to a machine whose native 16-bit products run at so many times fp32's rate, and emulated ones at 0.9."""

    def move(native: float) -> None:
        book = Book(tmp_path / f"cache {native}", lambda form: {family: Race((1.0, native, 0.9)) for family in FAMILIES})
        monkeypatch.setattr(rates, "_book", book)

    return move


class Net(nn.Module):
    """A regression that notes whether its products were emulated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        self.seen = set[bool]()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.add(is_active())
        return {"loss": (self.layers(x)[:, 0].float() - labels).square().mean()}


def trainer(folder: Path, steps: int, **settings: Any) -> Trainer:
    defaults = {"max_steps": steps, "save_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "use_cpu": True, "disable_tqdm": True}
    return Trainer(Net(), TrainingArguments(str(folder), logging_strategy="no", **(defaults | settings)), train_dataset=DATA)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-true"])
def test_a_run_resumed_on_another_machine_is_the_same_to_the_bit(machine: Machine, tmp_path: Path, precision: str) -> None:
    machine(5.0)
    whole, first = trainer(tmp_path / "whole", 5, precision=precision), trainer(tmp_path / "run", 2, precision=precision)
    whole.train()
    first.train()
    machine(0.1)
    resumed = trainer(tmp_path / "run", 5, precision=precision)
    resumed.train(resume_from_checkpoint=True)
    assert whole.model.seen == resumed.model.seen == {False}
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    anew = trainer(tmp_path / "anew", 1, precision=precision, save_strategy="no")
    anew.train()
    assert anew.model.seen == {True}


def test_where_memory_is_short_auto_makes_the_optimizer_of_lean_weights(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(0.1)  # 577 weights: 9232 bytes in fp32, about half of that in bf16-lean
    monkeypatch.setattr(decided, "probe", lambda device: dataclasses.replace(probe(device), memory_bytes=2 * 9000))
    auto = trainer(tmp_path / "auto", 3, precision="auto")
    assert str(auto.accelerator.policy) == "bf16-lean"
    assert type(auto.create_optimizer()) is AdamW


@pytest.mark.parametrize(("native", "chosen"), [(5.0, "bf16-mixed"), (0.1, "fp32")])
def test_auto_trains_as_the_precision_that_it_chooses(machine: Machine, tmp_path: Path, native: float, chosen: str) -> None:
    machine(native)
    auto, twin = trainer(tmp_path / "auto", 3, precision="auto"), trainer(tmp_path / "twin", 3, precision=chosen)
    auto.train()
    twin.train()
    assert str(auto.accelerator.policy) == chosen
    assert all(map(torch.equal, auto.model.parameters(), twin.model.parameters()))
    assert type(auto.optimizer_in_use.optimizer) is type(twin.optimizer_in_use.optimizer)
    assert auto.run.path.joinpath("config.yaml").read_text().count("precision: auto") == 1
    resumed = trainer(tmp_path / "auto", 4, precision="auto")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
