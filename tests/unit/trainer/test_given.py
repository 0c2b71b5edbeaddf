"""What a trainer is given of a wrong kind is refused when it is made, by the name of the argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from halfstep import EarlyStoppingCallback, Trainer, TrainingArguments
from halfstep.errors import ConfigError, DataError

DATA = [{"x": torch.randn(4), "labels": i % 2} for i in range(8)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.line(x)
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return DATA[i]

    def __len__(self) -> int:
        return len(DATA)


class Frame:
    iloc = columns = ()

    def __getitem__(self, name: str) -> Any:
        return name

    def __len__(self) -> int:
        return 3


def make(folder: Path, **given: Any) -> Trainer:
    args = TrainingArguments(str(folder), use_cpu=True, max_steps=1, disable_tqdm=True, save_strategy="no")
    return Trainer(**{"model": Net(), "args": args, "train_dataset": DATA, **given})


WRONG_DATA = {
    "a number": ({"train_dataset": 5}, r"train_dataset is 5, of which no sample can be read. Give a list, a Dataset"),
    "a text": ({"train_dataset": "squad"}, r"train_dataset is 'squad', of which no sample"),
    "a class": ({"train_dataset": Rows}, r"train_dataset is the class Rows. Give it an instance, Rows\(...\)"),
    "splits": (
        {"train_dataset": {"train": DATA, "test": DATA}},
        r"a dict with the keys train, test, and no dataset. .*train_dataset=data\['train'\]",
    ),
    "a table": ({"train_dataset": Frame()}, r"train_dataset is a Frame, which is read by columns. Pass data.to_dict\('records'\)"),
    "a loader": ({"train_dataset": DataLoader(DATA)}, r"train_dataset is a DataLoader.*override get_train_dataloader"),
    "an iterator": ({"train_dataset": iter(DATA)}, r"train_dataset is a list_iterator, which is spent after one pass"),
    "evaluation": ({"eval_dataset": 5}, r"eval_dataset is 5, of which no sample"),
    "a loader to evaluate": ({"eval_dataset": DataLoader(DATA)}, r"override get_eval_dataloader"),
    "one of several": ({"eval_dataset": {"a": DATA, "b": 7}}, r"eval_dataset\['b'\] is 7, of which no sample"),
    "none of several": ({"eval_dataset": {}}, r"eval_dataset is an empty dict"),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_data_of_a_wrong_kind(case: str, tmp_path: Path) -> None:
    given, told = WRONG_DATA[case]
    with pytest.raises(DataError, match=told):
        make(tmp_path, **given)


class Collator:
    """A collator that is made once and then called."""

    def __call__(self, rows: list[Any]) -> Any:
        return rows


OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
WRONG_PARTS = {
    "no collator": ({"data_collator": "pad"}, r"data_collator='pad' is a str. Give it a function of a list of samples"),
    "a class of collators": ({"data_collator": Collator}, r"data_collator is the class Collator. Give it an instance, Collator\(...\)"),
    "no metric": ({"compute_metrics": {"accuracy": 1}}, r"compute_metrics=\{'accuracy': 1\} is a dict. Give it a function of an EvalPrediction"),
    "no preprocessing": ({"preprocess_logits_for_metrics": 1}, r"preprocess_logits_for_metrics=1 is an int"),
    "a class of losses": ({"compute_loss_func": nn.CrossEntropyLoss}, r"compute_loss_func is the class CrossEntropyLoss. Give it an instance"),
    "one callback": ({"callbacks": EarlyStoppingCallback()}, r"callbacks is an EarlyStoppingCallback and not a list. Write callbacks=\[...\]"),
    "one class of callbacks": ({"callbacks": EarlyStoppingCallback}, r"callbacks is the class EarlyStoppingCallback and not a list"),
    "no callback": ({"callbacks": [3]}, r"a int is no callback: it has no method named as an event"),
    "no model": ({"model": "gpt2"}, r"model is a str. Give the Trainer a module"),
    "a class of models": ({"model": Net}, r"model is the class Net. Give the Trainer a module, or a function"),
    "a model as model_init": ({"model": None, "model_init": 3}, r"model_init=3 is an int. Give it a function of nothing, or a trial"),
    "model_init of two": ({"model": None, "model_init": lambda a, b: Net()}, r"model_init takes a, b. Let it take nothing"),
    "an optimizer": ({"optimizers": OPTIMIZER}, r"optimizers is a SGD. Give it the pair \(optimizer, scheduler\)"),
    "a class of optimizers": ({"optimizers": (torch.optim.SGD, None)}, r"the first of optimizers is the class SGD, and no optimizer"),
    "three of them": ({"optimizers": (None, None, None)}, r"optimizers has 3 members"),
    "no schedule": ({"optimizers": (None, "linear")}, r"the second of optimizers is a str, and no schedule"),
    "no class": ({"optimizer_cls_and_kwargs": (OPTIMIZER, {})}, r"optimizer_cls_and_kwargs is \(a SGD, a dict\). Give it a class of optimizers"),
    "a class alone": ({"optimizer_cls_and_kwargs": torch.optim.SGD}, r"optimizer_cls_and_kwargs is the class SGD"),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_parts_of_a_wrong_kind(case: str, tmp_path: Path) -> None:
    given, told = WRONG_PARTS[case]
    with pytest.raises(ConfigError, match=told):
        make(tmp_path, **given)


@pytest.mark.parametrize("data", [Rows(), tuple(DATA), dict(enumerate(DATA))], ids=["Dataset", "tuple", "numbered dict"])
def test_what_samples_can_be_read_from_is_taken(data: Any, tmp_path: Path) -> None:
    assert make(tmp_path, train_dataset=data, eval_dataset={"one": data} if not isinstance(data, dict) else DATA).train().global_step == 1


def test_data_that_is_predicted_on_is_looked_at_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the dataset is 5, of which no sample can be read"):
        make(tmp_path).predict(5)


@pytest.mark.parametrize("epochs", [float("nan"), float("inf"), -1])
def test_passes_out_of_range_are_refused_where_steps_are_given_too(epochs: float) -> None:
    with pytest.raises(ConfigError, match=f"num_train_epochs={epochs}"):
        TrainingArguments(num_train_epochs=epochs, max_steps=5)


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "per_device_train_batch_size", "max_steps", "ddp_timeout", "save_total_limit"])
def test_numbers_that_no_counter_holds_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=1{'0' * 30} is too large. Use less than \d"):
        TrainingArguments(**{name: 10**30})
