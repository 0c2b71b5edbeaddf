"""A subclass may say in which order samples come, by transformers' hooks, and a run resumes in it bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from halfstep import Trainer, TrainingArguments
from halfstep.errors import ConfigError

DATA = [{"x": torch.tensor([float(i)]), "labels": torch.tensor(float(i))} for i in range(10)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(1, 1)
        self.seen: list[float] = []

    def forward(self, x: Any, labels: Any = None) -> Any:
        self.seen += x.flatten().tolist()
        out = self.line(x / 10).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "out": out}


class Backwards(Sampler[int]):
    """From the last to the first, and turned by one in each pass."""

    epoch = 0

    def __init__(self, data: Any) -> None:
        self.data = data

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(reversed(range(len(self.data))))
        return iter(order[self.epoch :] + order[: self.epoch])

    def __len__(self) -> int:
        return len(self.data)


def settings(folder: Path, **more: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "max_steps": 6, "save_strategy": "no"}
    return TrainingArguments(str(folder), **{**defaults, **more})


class New(Trainer):
    """As transformers 5 has it."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Backwards(train_dataset)


class Old(Trainer):
    """As transformers 4 had it."""

    def _get_train_sampler(self) -> Any:
        return Backwards(self.train_dataset)


@pytest.mark.parametrize("kind", [New, Old])
def test_the_order_of_training_data_is_the_subclasss(kind: type[Trainer], tmp_path: Path) -> None:
    model = Net()
    kind(model, settings(tmp_path), train_dataset=DATA).train()
    assert model.seen == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9]


def test_the_order_of_evaluation_data_is_the_subclasss(tmp_path: Path) -> None:
    class Reversed(Trainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return Backwards(eval_dataset)

    model = Net()
    found = Reversed(model, settings(tmp_path), eval_dataset=DATA, compute_metrics=lambda p: {"first": float(p.label_ids[0])}).evaluate()
    assert model.seen == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert found["eval_first"] == 9.0


@pytest.mark.parametrize("more", [{}, {"train_sampling_strategy": "sequential"}, {"dataloader_drop_last": True}])
def test_the_base_hook_and_none_give_the_order_of_the_settings(more: dict[str, Any], tmp_path: Path) -> None:
    class Base(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset)

    class Nothing(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return None

    seen = []
    for kind in (Trainer, Base, Nothing):
        model = Net()
        kind(model, settings(tmp_path / kind.__name__, **more), train_dataset=DATA).train()
        seen.append(model.seen)
    assert len(seen[0]) == (24 if more.get("dataloader_drop_last") else 20)
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


class Weighted(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler(torch.arange(1.0, 11.0), 10, generator=torch.Generator().manual_seed(5))


class Shuffled(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return RandomSampler(train_dataset)


@pytest.mark.parametrize("kind", [New, Weighted, Shuffled])
@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_in_an_order_of_its_own_resumes_in_the_middle_of_a_pass(kind: type[Trainer], stop: int, tmp_path: Path) -> None:
    whole = Net()
    kind(whole, settings(tmp_path / "whole"), train_dataset=DATA).train()
    kind(Net(), settings(tmp_path / "part", save_strategy="steps", save_steps=stop), train_dataset=DATA).train()
    resumed = Net()
    kind(resumed, settings(tmp_path / "part", save_strategy="steps", save_steps=stop), train_dataset=DATA).train(
        resume_from_checkpoint=str(tmp_path / "part" / f"checkpoint-{stop}")
    )
    used = {2: 8, 4: 14}[stop]
    assert resumed.seen == whole.seen[used:]
    assert torch.equal(resumed.line.weight, whole.line.weight)


def test_no_sampler_is_refused(tmp_path: Path) -> None:
    class Wrong(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return 5

    with pytest.raises(ConfigError, match=r"_get_train_sampler gives an int, and no sampler. Return a torch.utils.data.Sampler"):
        Wrong(Net(), settings(tmp_path), train_dataset=DATA).train()
