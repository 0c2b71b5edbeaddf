"""Training: the loss falls, every step is logged as it was, and lengths, windows and columns mean what they say."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

from halfstep import Trainer, TrainingArguments
from halfstep.demo import GPT, GPTConfig, split
from halfstep.errors import ConfigError, DataError

PRECISIONS = ["fp32", "bf16-mixed", "fp16-mixed"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def dataset(count: int = 16, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, 4, generator=generator)
    return [{"x": x, "labels": int(x[:3].argmax()), "idx": i, "text": "no column of the model"} for i, x in enumerate(xs)]


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def trainer(place: Path, model: nn.Module | None = None, data: object = None, **settings: object) -> Trainer:
    kinds = ("callbacks", "compute_loss_func", "data_collator", "optimizers", "eval_dataset", "compute_metrics")
    others = {k: settings.pop(k) for k in kinds if k in settings}
    defaults = {
        "output_dir": str(place / "run"),
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 0.05,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    args = TrainingArguments(**{**defaults, "per_device_train_batch_size": 4, **settings})
    return Trainer(model if model is not None else classifier(), args, train_dataset=data if data is not None else dataset(), **others)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_falls(tmp_path: Path, precision: str) -> None:
    text = b"the quick brown fox jumps over the lazy dog. " * 20
    train_set, _ = split(text, 16)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, layers=1, heads=2, width=16))
    made = trainer(tmp_path, model, train_set, precision=precision, max_steps=60, learning_rate=1e-2, lr_scheduler_type="constant")
    result = made.train()
    losses = [r["loss"] for r in made.state.log_history if "loss" in r]
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
    assert result.global_step == len(losses) == 60
    assert result.training_loss == pytest.approx(sum(losses) / 60)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_record_is_in_the_history_and_in_the_file(tmp_path: Path, precision: str) -> None:
    made = trainer(tmp_path, eval_dataset=dataset(5, 1), max_steps=5, precision=precision, eval_strategy="steps", eval_steps=2, logging_steps=2)
    made.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [{("lr" if k == "learning_rate" else k): v for k, v in r.items()} for r in made.state.log_history] == lines
    steps = [r for r in lines if "loss" in r]
    assert [r["step"] for r in steps] == [2, 4, 5]
    for record in steps:
        watched = {"largest_gradient", "closest_output"} | ({"underflow"} if precision == "fp16-mixed" else set())
        assert set(record) == {"step", "epoch", "loss", "lr", "grad_norm", "scale", "applied", "skipped", "replayed"} | watched
        assert record["applied"] == record["step"]
        assert record["skipped"] == 0
        assert record["scale"] == (8192.0 if precision == "fp16-mixed" else 1.0), "where 65536 leaves no head room of 16"
        assert record["grad_norm"] > 0
    assert [r["step"] for r in lines if "eval_loss" in r] == [2, 4, 5]
    assert [r["epoch"] for r in steps] == [0.5, 1.0, 1.25]


def test_a_logged_loss_is_the_mean_of_its_window_of_steps(tmp_path: Path) -> None:
    each, pairs = trainer(tmp_path / "a", max_steps=6), trainer(tmp_path / "b", max_steps=6, logging_steps=2)
    each.train()
    pairs.train()
    single = [r["loss"] for r in each.state.log_history[:-1]]
    assert [r["loss"] for r in pairs.state.log_history[:-1]] == pytest.approx([(single[i] + single[i + 1]) / 2 for i in (0, 2, 4)])


def test_training_is_a_function_of_the_seed(tmp_path: Path) -> None:
    def run(place: str, seed: int, **more: object) -> list[torch.Tensor]:
        made = trainer(tmp_path / place, max_steps=4, seed=seed, **more)
        made.train()
        return weights(made.model)

    assert equal(run("a", 1), run("b", 1))
    assert not equal(run("c", 1), run("d", 2))
    assert equal(run("e", 1, data_seed=5), run("f", 2, data_seed=5)), "the order of the data has a seed of its own"


def test_equals_the_loop_written_by_hand(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=4, lr_scheduler_type="constant", weight_decay=0.1, max_grad_norm=0.5, optim="adamw_torch")
    made.train()
    net = classifier()
    decayed = [{"params": [p for p in net.parameters() if p.dim() == d], "weight_decay": w} for d, w in ((2, 0.1), (1, 0.0))]
    optimizer = torch.optim.AdamW(decayed, lr=0.05)
    for batch in made.get_train_dataloader():
        net(batch["x"], batch["labels"])["loss"].backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(weights(made.model), weights(net), strict=True))


@pytest.mark.parametrize(("size", "window"), [(4, 2), (2, 4), (1, 8)])
def test_accumulation_equals_the_big_batch(tmp_path: Path, size: int, window: int) -> None:
    big = trainer(tmp_path / "big", data=dataset(20), num_train_epochs=2, per_device_train_batch_size=8)
    small = trainer(tmp_path / "small", data=dataset(20), num_train_epochs=2, per_device_train_batch_size=size, gradient_accumulation_steps=window)
    big.train()
    small.train()
    assert big.state.global_step == small.state.global_step == 6, "the last window of a pass is half a window"
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(weights(big.model), weights(small.model), strict=True))
    for one, other in zip(big.state.log_history[:-1], small.state.log_history[:-1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_zero_max_grad_norm_does_not_clip(tmp_path: Path) -> None:
    free, tight = (
        trainer(tmp_path / "a", max_steps=1, optim="sgd", max_grad_norm=0),
        trainer(tmp_path / "b", max_steps=1, optim="sgd", max_grad_norm=1e-3),
    )
    start = weights(classifier())
    moved = []
    for made in (free, tight):
        made.train()
        moved.append(sum(float((a - b).norm()) for a, b in zip(weights(made.model), start, strict=True)))
    assert free.state.log_history[0]["grad_norm"] == tight.state.log_history[0]["grad_norm"] > 1e-3
    assert moved[0] > 10 * moved[1] > 0


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        ({"num_train_epochs": 2}, 8, 2),
        ({"num_train_epochs": 0.5}, 2, 1),
        ({"num_train_epochs": 1.5}, 6, 2),
        ({"max_steps": 5}, 5, 2),
        ({"max_steps": 4, "num_train_epochs": 9}, 4, 1),
        ({"num_train_epochs": 1, "gradient_accumulation_steps": 3}, 2, 1),
        ({"num_train_epochs": 1, "dataloader_drop_last": True, "per_device_train_batch_size": 5}, 3, 1),
    ],
)
def test_lengths(tmp_path: Path, settings: dict, steps: int, epochs: int) -> None:
    made = trainer(tmp_path, **settings)
    made.train()
    assert (made.state.global_step, made.state.max_steps, made.state.num_train_epochs) == (steps, steps, epochs)
    assert made.lr_scheduler.get_last_lr() == [0.0, 0.0], "the schedule is as long as the run"


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> object:
        return iter(dataset(self.count))


def test_an_iterable_dataset_is_read_again_until_the_steps_are_done(tmp_path: Path) -> None:
    made = trainer(tmp_path, data=Stream(10), max_steps=7)
    made.train()
    assert made.state.global_step == 7
    assert all(math.isfinite(r["loss"]) for r in made.state.log_history[:-1])


def test_an_iterable_dataset_without_max_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no length, so the number of steps is not known. Set max_steps"):
        trainer(tmp_path, data=Stream(10)).train()


class Once(IterableDataset):
    """Reads from a generator, which is spent after one pass."""

    def __init__(self, count: int) -> None:
        self.source = iter(dataset(count))

    def __iter__(self) -> object:
        return self.source


def test_an_iterator_that_is_spent_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the training data yields nothing. .*spent after one pass"):
        trainer(tmp_path, data=Once(8), max_steps=5).train()


def test_a_bare_generator_is_explained_too(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        trainer(tmp_path, data=(s for s in dataset(8)), max_steps=5).train()


def test_no_training_data_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=r"train\(\) needs training data. Pass train_dataset="):
        Trainer(classifier(), args).train()
    with pytest.raises(ConfigError, match=r"evaluation needs data. Pass eval_dataset= to the Trainer, or eval_strategy='no'"):
        Trainer(classifier(), args).evaluate()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "the dataset has no samples"),
        ([(torch.ones(4), 1)] * 4, r"samples of type tuple, and the model needs named inputs. Let it give dicts such as"),
        ([{"y": torch.ones(4), "labels": 1}] * 4, r"the columns y, labels are not inputs of the model's forward"),
        ([{"x": torch.ones(4), "labels": v} for v in (0, 1, 2, 3)], r"the labels of this batch run from 0 to 3, and the loss has no such class"),
        ([{"x": torch.ones(4), "labels": v} for v in (-1, 1, 2, 0)], r"the labels of this batch run from -1 to 2"),
    ],
)
def test_data_that_cannot_be_used_is_refused(tmp_path: Path, data: list, said: str) -> None:
    with pytest.raises(DataError, match=said):
        trainer(tmp_path, data=data, max_steps=2).train()


def test_drop_last_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 samples, fewer than one batch of 4, and dataloader_drop_last=True"):
        trainer(tmp_path, data=dataset(3), dataloader_drop_last=True).train()


def test_labels_of_a_classifier_with_a_config_are_checked_before_the_model_sees_them(tmp_path: Path) -> None:
    model = classifier()
    model.config = SimpleNamespace(num_labels=3)
    with pytest.raises(DataError, match=r"run from 1 to 5, and the model has 3 classes, 0 to 2. Number the classes from 0"):
        trainer(tmp_path, model, [{"x": torch.ones(4), "labels": v} for v in (1, 2, 5, 1)], max_steps=1).train()


# --- losses ---------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Returns logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = classifier().body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_a_loss_function_of_ones_own_gives_what_the_model_would_have_given(tmp_path: Path) -> None:
    own, models = trainer(tmp_path / "a", Plain(), max_steps=4, compute_loss_func=F.cross_entropy), trainer(tmp_path / "b", max_steps=4)
    own.train()
    models.train()
    assert equal(weights(own.model), weights(models.model))


def test_a_model_without_a_loss_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"returned a tensor of shape \(4, 3\), with no loss in it; its inputs were x. .*compute_loss_func=f"):
        trainer(tmp_path, Plain(), max_steps=1).train()
    with pytest.raises(ConfigError, match=r"returned a mapping of logits, with no loss in it; its inputs were x. Give the dataset a 'labels' column"):
        trainer(tmp_path / "b", data=[{"x": torch.ones(4)}] * 4, max_steps=1).train()


def test_several_label_columns_go_to_the_loss_function_by_name(tmp_path: Path) -> None:
    seen: list[set] = []

    def loss(outputs: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(set(labels))
        return F.cross_entropy(outputs, labels["first"]) + F.cross_entropy(outputs, labels["second"])

    data = [{"x": s["x"], "first": s["labels"], "second": 0} for s in dataset()]
    trainer(tmp_path, Plain(), data, max_steps=1, label_names=["first", "second"], compute_loss_func=loss).train()
    assert seen == [{"first", "second"}]


def test_an_optimizer_and_a_schedule_of_ones_own_are_used(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    made = trainer(tmp_path, model, max_steps=3, optimizers=(optimizer, schedule))
    made.train()
    assert [r["learning_rate"] for r in made.state.log_history[:-1]] == pytest.approx([0.5, 0.05, 0.005]), "that of the logged step"


def test_a_collator_of_ones_own_gets_only_columns_of_the_model(tmp_path: Path) -> None:
    seen: list[set] = []

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        seen.append(set(features[0]))
        return {"x": torch.stack([f["x"] for f in features]), "labels": torch.tensor([f["labels"] for f in features])}

    trainer(tmp_path / "a", max_steps=1, data_collator=collate).train()
    trainer(tmp_path / "b", max_steps=1, data_collator=collate, remove_unused_columns=False).train()
    assert seen == [{"x", "labels"}, {"x", "labels", "idx", "text"}]


def test_a_second_call_of_train_starts_a_run_of_its_own(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=2, overwrite_output_dir=True, precision="fp16-mixed")
    made.train()
    made.train()
    assert made.state.global_step == 2
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3, "two steps and the end"
