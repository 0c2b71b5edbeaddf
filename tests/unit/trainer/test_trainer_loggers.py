"""report_to: every record reaches the trackers that were named, under the names that dashboards know."""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import Trainer, TrainingArguments
from halfstep.errors import ConfigError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


DATA = [{"x": torch.tensor([float(i), 1.0]), "labels": math.nan if i == 5 else float(i)} for i in range(8)]


def trainer(place: Path, **settings: Any) -> Trainer:
    defaults = {"output_dir": str(place), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 1}
    defaults |= {"num_train_epochs": 1, "logging_steps": 1, "eval_strategy": "epoch", "learning_rate": 1e-3}
    return Trainer(Model(), TrainingArguments(**{**defaults, **settings}), train_dataset=DATA, eval_dataset=DATA[:4])


def test_tensorboard_has_every_number_and_shows_the_step_that_was_not_applied(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path, report_to="tensorboard").train()
    read = EventAccumulator(str(tmp_path / "runs"))
    read.Reload()
    assert {"train/loss", "train/learning_rate", "train/skipped", "train/replayed", "eval/loss", "train/train_runtime"} <= set(read.Tags()["scalars"])
    assert any(math.isnan(e.value) for e in read.Scalars("train/loss"))
    assert read.Scalars("train/skipped")[-1].value == 1


def test_wandb_is_given_every_record_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    run = SimpleNamespace(
        config=SimpleNamespace(update=lambda values, **kwargs: calls.append(("config", values["learning_rate"]))),
        log=lambda values, step=None: calls.append((step, values)),
        finish=lambda: calls.append(("finish",)),
    )
    stand_in = ModuleType("wandb")
    stand_in.init = lambda **settings: calls.append(("init", settings)) or run
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    made = trainer(tmp_path, report_to=["wandb"], run_name="mine")
    made.train()
    assert calls[:2] == [("init", {"project": "halfstep", "name": "mine"}), ("config", 1e-3)]
    assert [step for step, _ in calls[2:]] == [r["step"] for r in made.state.log_history]
    made.evaluate()
    assert "eval/loss" in calls[-1][1], "the run stays open for what is evaluated afterwards"


def test_a_missing_package_is_refused_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.tracking.choose.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        trainer(tmp_path, report_to="mlflow")
