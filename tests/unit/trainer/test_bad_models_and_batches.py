"""What a wrong script is told: the cause with its names and numbers, then the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfstep import Trainer, TrainingArguments
from halfstep.errors import ConfigError, DataError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(self.line(x), labels)}


class Plain(nn.Module):
    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        return {"loss": x.sum()}


class Number(Net):
    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        return {"loss": 1.5}


DATA = [{"x": torch.randn(4), "labels": i % 2} for i in range(8)]


def train(model: nn.Module, folder: Path, collate: Any = None) -> None:
    args = TrainingArguments(str(folder), use_cpu=True, max_steps=1, disable_tqdm=True, save_strategy="no")
    Trainer(model, args, collate, DATA).train()


def as_(kind: Any) -> Any:
    return lambda samples: {"x": kind([s["x"] for s in samples]), "labels": torch.tensor([s["labels"] for s in samples])}


def test_a_batch_with_a_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the batch has 'x' as a list, and the model failed on it: .*Let the collator return tensors"):
        train(Net(), tmp_path, as_(list))


def test_a_batch_with_an_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the batch has 'x' as a ndarray"):
        train(Net(), tmp_path, as_(lambda rows: np.stack([row.numpy() for row in rows])))


def test_an_error_of_the_models_own_is_not_blamed_on_the_batch(tmp_path: Path) -> None:
    class Broken(Net):
        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            return x + None

    with pytest.raises(TypeError, match="unsupported operand"):
        train(Broken(), tmp_path)


def test_a_model_without_parameters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model has no parameters, so there is nothing to train"):
        train(Plain(), tmp_path)


def test_a_frozen_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no trainable parameter: all 2 are frozen. Set requires_grad=True"):
        train(Net().requires_grad_(False), tmp_path)


def test_a_loss_that_is_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model's loss is a float. Return a scalar tensor"):
        train(Number(), tmp_path)


def test_a_last_batch_of_one_under_a_batchnorm_is_told_with_its_remedy(tmp_path: Path) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    args = TrainingArguments(str(tmp_path), use_cpu=True, num_train_epochs=1, per_device_train_batch_size=7, disable_tqdm=True)
    with pytest.raises(DataError, match=r"has one sample.*dataloader_drop_last=True"):
        Trainer(Normed(), args, train_dataset=DATA).train()
