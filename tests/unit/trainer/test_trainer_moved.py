"""Scripts written for transformers.Trainer: subclasses that override its parts, its callbacks in its order, and losses counted by items."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import halfstep
from halfstep import Trainer, TrainingArguments
from halfstep.errors import ConfigError, DataError
from halfstep.trainer import EvalLoopOutput

EVENTS = [name for name in vars(transformers.TrainerCallback) if name.startswith("on_") and name != "on_push_begin"]


class Words(nn.Module):
    """Classes for each place of a row; takes num_items_in_batch, and uses it or not."""

    def __init__(self, uses: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.uses = nn.Embedding(11, 8), nn.Linear(8, 11), uses

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        items = kwargs.get("num_items_in_batch") if self.uses else None
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean" if items is None else "sum")
        return {"loss": loss if items is None else loss / items, "logits": logits}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(0, 11, (6,), generator=made)
        found.append({"input_ids": ids, "labels": torch.where(torch.arange(6) < 1 + i % 6, ids, -100)})
    return found


def trainer(place: Path, kind: type[Trainer] = Trainer, model: nn.Module | None = None, **settings: Any) -> Trainer:
    given = {k: settings.pop(k) for k in ("compute_loss_func", "compute_metrics", "callbacks", "eval_dataset") if k in settings}
    defaults = {"output_dir": str(place), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "optim": "sgd", "learning_rate": 0.5}
    args = TrainingArguments(**{**defaults, "max_grad_norm": 0.0, "logging_steps": 1, "num_train_epochs": 1, **settings})
    return kind(model or Words(), args, train_dataset=rows(12), **{"eval_dataset": rows(5), **given})


def weights(made: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


def by_function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("function", [None, by_function])
def test_ragged_micro_batches_make_the_step_of_one_big_batch(tmp_path: Path, function: Any) -> None:
    big = trainer(tmp_path / "big", per_device_train_batch_size=12, compute_loss_func=function)
    small = trainer(tmp_path / "small", per_device_train_batch_size=2, gradient_accumulation_steps=6, compute_loss_func=function)
    for made in (big, small):
        made.train()
    assert torch.allclose(weights(big), weights(small), rtol=1e-5, atol=1e-7)
    assert big.state.log_history[0]["loss"] == pytest.approx(small.state.log_history[0]["loss"], rel=1e-6)


def test_a_model_that_takes_the_items_and_ignores_them_has_its_losses_averaged(tmp_path: Path) -> None:
    """transformers adds them up: three times the loss and the gradient."""
    made = trainer(tmp_path, model=Words(uses=False), per_device_train_batch_size=4, gradient_accumulation_steps=3)
    made.train()
    model = Words(uses=False)
    losses = [model(torch.stack([r["input_ids"] for r in b]), torch.stack([r["labels"] for r in b]))["loss"] for b in _batches(made)]
    assert made.state.log_history[0]["loss"] == pytest.approx(sum(float(loss.detach()) for loss in losses) / 3, rel=1e-6)


def _batches(made: Trainer) -> list[list[dict]]:
    data = rows(12)
    return [[data[i] for i in numbers] for numbers in made.get_train_dataloader().batch_sampler]


def test_an_evaluation_in_batches_is_that_of_one_batch_though_rows_have_unlike_numbers_of_labels(tmp_path: Path) -> None:
    found = [trainer(tmp_path, per_device_eval_batch_size=size).evaluate(rows(11))["eval_loss"] for size in (1, 3, 11)]
    assert found == pytest.approx([found[-1]] * 3, rel=1e-6)


def test_the_events_of_a_run_come_in_transformers_order(tmp_path: Path) -> None:
    def recorder(base: type) -> Any:
        seen: list[str] = []
        methods = {name: (lambda self, *a, _name=name, **k: seen.append(_name)) for name in EVENTS}
        made = type("Recorder", (base,), methods)()
        made.seen = seen
        return made

    seen = []
    shared = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 2, "eval_strategy": "steps"}
    shared |= {"eval_steps": 2, "save_strategy": "epoch", "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    for library in (halfstep, transformers):
        listener = recorder(transformers.TrainerCallback)
        args = library.TrainingArguments(output_dir=str(tmp_path / library.__name__), **shared)
        library.Trainer(Words(), args, train_dataset=rows(12), eval_dataset=rows(5), callbacks=[listener]).train()
        seen.append(listener.seen)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == len(EVENTS) - 1, "all but on_predict"


class Moved(Trainer):
    """Overrides what scripts override, with the signatures and helpers of transformers' Trainer."""

    calls: list[str]

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.calls.append("training_step")
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
        return loss.detach()

    def create_optimizer(self):
        self.calls.append("create_optimizer")
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.calls.append("create_scheduler")
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return self.lr_scheduler

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self.calls.append("prediction_step")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)

    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"):
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        return EvalLoopOutput(output.predictions, output.label_ids, output.metrics | {f"{metric_key_prefix}_mine": 1.0}, output.num_samples)

    def log(self, logs, start_time=None):
        super().log(logs | {"mine": True}, start_time)


def test_a_subclass_that_overrides_everything_runs(tmp_path: Path) -> None:
    made = trainer(tmp_path, Moved, eval_strategy="epoch", per_device_train_batch_size=2, gradient_accumulation_steps=2)
    made.calls = []
    made.train()
    assert made.calls[:2] == ["create_optimizer", "create_scheduler"]
    assert made.calls.count("training_step") == 6
    assert all(r["mine"] for r in made.state.log_history)
    assert [r["eval_mine"] for r in made.state.log_history if "eval_loss" in r] == [1.0]
    assert [r["learning_rate"] for r in made.state.log_history if "learning_rate" in r] == [0.25] * 3


def test_several_evaluation_datasets_have_numbers_of_their_own(tmp_path: Path) -> None:
    found = trainer(tmp_path, eval_dataset={"near": rows(4), "far": rows(7)}).evaluate()
    assert {"eval_near_loss", "eval_far_loss"} <= set(found)
    alone = trainer(tmp_path).evaluate(rows(7))["eval_loss"]
    assert found["eval_far_loss"] == alone
    with pytest.raises(ConfigError, match=r"no evaluation dataset 'fra'. Did you mean 'far'"):
        trainer(tmp_path, eval_dataset={"near": rows(4), "far": rows(7)}).evaluate("fra")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_full_evaluation_in_16_bits_leaves_weights_and_training_as_they_are(tmp_path: Path, kind: str) -> None:
    plain, narrow = trainer(tmp_path / "a"), trainer(tmp_path / "b", **{f"{kind}_full_eval": True})
    before = weights(narrow)
    assert narrow.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=0.02)
    assert narrow.evaluate()["eval_loss"] != plain.evaluate()["eval_loss"]
    assert torch.equal(weights(narrow), before)
    for made in (plain, narrow):
        made.train()
    assert torch.equal(weights(plain), weights(narrow))


def test_metrics_batch_by_batch_are_those_of_the_last_call(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def metric(prediction: Any, compute_result: bool = False) -> dict[str, int] | None:
        seen.append((len(prediction.label_ids), compute_result))
        return {"rows": sum(n for n, _ in seen)} if compute_result else None

    found = trainer(tmp_path, compute_metrics=metric, batch_eval_metrics=True, per_device_eval_batch_size=2).evaluate()
    assert seen == [(2, False), (2, False), (1, True)]
    assert found["eval_rows"] == 5


def test_what_was_given_wrongly_is_told(tmp_path: Path) -> None:
    for given, text in (
        ({}, "neither model nor model_init"),
        ({"model": "bert"}, "model is a str"),
        ({"model": Words(), "args": {}}, "args is a dict"),
    ):
        with pytest.raises(ConfigError, match=text):
            Trainer(**given)
    with pytest.raises(ConfigError, match="is no callback"):
        Trainer(Words(), callbacks=["x"])
    made = trainer(tmp_path, remove_unused_columns=False)
    with pytest.raises(DataError, match=r"needs input_ids, and a batch of the data has labels, other"):
        made.evaluate([{"labels": torch.ones(3).long(), "other": torch.ones(3)}])


def test_speed_and_tokens_are_told(tmp_path: Path) -> None:
    made = trainer(tmp_path, include_num_input_tokens_seen="all")
    output = made.train()
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_tokens_per_second", "train_loss"} <= set(output.metrics)
    assert made.state.log_history[-1]["num_input_tokens_seen"] == 72
    made.save_metrics("train", output.metrics)
    made.save_state()
    assert {"train_results.json", "all_results.json", "trainer_state.json"} <= {p.name for p in tmp_path.iterdir()}


def test_an_optimizer_is_made_of_the_class_that_was_given(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=1, weight_decay=0.1)
    made = Trainer(Words(), args, train_dataset=rows(12), optimizer_cls_and_kwargs=(torch.optim.Adagrad, {"lr": 0.25}))
    made.train()
    assert type(made.optimizer.optimizer) is torch.optim.Adagrad
    assert [g["weight_decay"] for g in made.optimizer.param_groups] == [0.1, 0.0]
    assert made.optimizer.defaults["lr"] == 0.25


@pytest.mark.parametrize("change", [None, "put", "replace"])
def test_inputs_that_an_override_has_changed_are_prepared(tmp_path: Path, change: str | None) -> None:
    """Those of the loop are not prepared twice; a tensor put into them may be on another device, so they are."""
    prepared: list[set[str]] = []

    class Own(Trainer):
        def _prepare_inputs(self, inputs):
            prepared.append(set(inputs))
            return super()._prepare_inputs(inputs)

        def training_step(self, model, inputs, num_items_in_batch=None):
            if change == "put":
                inputs["more"] = torch.ones(2)
            elif change == "replace":
                inputs["labels"] = inputs["labels"].clone()
            return super().training_step(model, inputs, num_items_in_batch)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def forward(self, x, labels=None, more=None):
            return {"loss": (self.line(x) - labels).square().mean()}

    data = [{"x": torch.randn(2), "labels": torch.ones(1)} for _ in range(2)]
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none")
    Own(model=Net(), args=args, train_dataset=data).train()
    assert len(prepared) == (1 if change is None else 2)
