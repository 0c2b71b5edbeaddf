"""Evaluation: means over samples whatever the batches, arrays for metrics, and a model that is left as it was."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep import EvalPrediction, Trainer, TrainingArguments
from halfstep.errors import DataError
from halfstep.trainer.evaluation import MeanLoss


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def dataset(count: int) -> list[dict]:
    xs = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return [{"x": x, "labels": int(x[:3].argmax())} for x in xs]


def trainer(place: Path, make: type[nn.Module] = Classifier, **settings) -> Trainer:
    torch.manual_seed(0)
    others = {k: settings.pop(k) for k in ("compute_metrics", "compute_loss_func", "callbacks") if k in settings}
    args = TrainingArguments(output_dir=str(place / "run"), use_cpu=True, disable_tqdm=True, save_strategy="no", **settings)
    return Trainer(make(), args, train_dataset=dataset(8), eval_dataset=dataset(7), **others)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": (logits.argmax(-1) == labels).mean(), "eval_samples": len(labels)}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 13), st.integers(1, 8), st.sampled_from(["fp32", "bf16-mixed", "fp16-mixed"]))
def test_a_ragged_last_batch_counts_by_its_samples(tmp_path_factory: pytest.TempPathFactory, samples: int, size: int, precision: str) -> None:
    place = tmp_path_factory.getbasetemp()
    ragged = trainer(place, per_device_eval_batch_size=size, precision=precision, compute_metrics=accuracy)
    whole = trainer(place, per_device_eval_batch_size=100, precision=precision, compute_metrics=accuracy)
    one, other = ragged.evaluate(dataset(samples)), whole.evaluate(dataset(samples))
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    assert one["eval_accuracy"] == other["eval_accuracy"]
    assert one["eval_samples"] == samples


def test_metrics_come_under_the_prefix_with_time_and_rate(tmp_path: Path) -> None:
    made = trainer(tmp_path, compute_metrics=accuracy)
    speed = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert set(made.evaluate()) == {"eval_loss", "eval_accuracy", "eval_samples", "epoch"} | speed
    assert {"dev_loss", "dev_accuracy"} <= set(made.evaluate(metric_key_prefix="dev"))
    assert all(isinstance(v, float | int) and not isinstance(v, np.generic) for v in made.evaluate().values())


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_evaluating_changes_neither_weights_nor_mode_nor_random_state_and_drops_nothing_out(tmp_path: Path, precision: str) -> None:
    made = trainer(tmp_path, precision=precision)
    before, states = [p.clone() for p in made.model.parameters()], torch.get_rng_state()
    for mode in (True, False):
        made.model.train(mode)
        first, second = made.evaluate(), made.evaluate()
        assert first["eval_loss"] == second["eval_loss"]
        assert made.model.training is mode
    assert torch.equal(torch.get_rng_state(), states)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, made.model.parameters(), strict=True))
    assert all(p.grad is None for p in made.model.parameters())


def test_a_model_that_fails_in_evaluation_is_put_back_in_training_mode(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.model.train()
    with pytest.raises(RuntimeError):
        made.evaluate([{"x": torch.ones(5), "labels": 0}])
    assert made.model.training


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported_as_it_is(tmp_path: Path, value: float) -> None:
    bad = [*dataset(6), {"x": torch.full((4,), value), "labels": 0}]
    loss = trainer(tmp_path, per_device_eval_batch_size=2).evaluate(bad)["eval_loss"]
    assert math.isnan(loss) or math.isinf(loss)


def test_predictions_and_labels_are_arrays_in_order(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16-mixed"):
        made = trainer(tmp_path, per_device_eval_batch_size=3, precision=precision, compute_metrics=accuracy)
        samples = dataset(7)
        output = made.predict(samples)
        made.model.eval()
        with torch.no_grad():
            expected = made.model(torch.stack([s["x"] for s in samples]))["logits"]
        assert output.predictions.dtype == np.float32
        assert output.predictions.shape == (7, 3)
        assert np.allclose(output.predictions, expected.numpy(), rtol=1e-2, atol=1e-2)
        assert output.label_ids.tolist() == [s["labels"] for s in samples]
        assert {"test_loss", "test_accuracy", "test_runtime"} <= set(output.metrics)
        assert made.state.log_history == [], "a prediction is not logged"


def test_predictions_need_no_labels(tmp_path: Path) -> None:
    output = trainer(tmp_path, compute_metrics=accuracy).predict([{"x": s["x"]} for s in dataset(5)])
    assert output.predictions.shape == (5, 3)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    assert "test_accuracy" not in output.metrics


@pytest.mark.parametrize("kind", ["mapping", "tuple", "record"])
def test_metrics_work_for_every_kind_of_output(tmp_path: Path, kind: str) -> None:
    class Other(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> object:
            found = super().forward(x, labels)
            return {"mapping": found, "tuple": (found["loss"], found["logits"]), "record": SimpleNamespace(**found)}[kind]

    plain = trainer(tmp_path, compute_metrics=accuracy).evaluate()
    found = trainer(tmp_path, Other, compute_metrics=accuracy).evaluate()
    assert found["eval_accuracy"] == plain["eval_accuracy"]
    assert found["eval_loss"] == plain["eval_loss"]


def test_a_loss_function_of_ones_own_is_used_in_evaluation_too(tmp_path: Path) -> None:
    class Plain(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    found = trainer(tmp_path, Plain, compute_loss_func=F.cross_entropy, compute_metrics=accuracy).evaluate()
    plain = trainer(tmp_path, compute_metrics=accuracy).evaluate()
    assert found["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert found["eval_accuracy"] == plain["eval_accuracy"]


def test_evaluations_happen_when_the_strategy_says(tmp_path: Path) -> None:
    def steps(place: str, **settings) -> list[int]:
        made = trainer(tmp_path / place, per_device_train_batch_size=2, num_train_epochs=2, logging_strategy="no", **settings)
        made.train()
        return [r["step"] for r in made.state.log_history if "eval_loss" in r]

    assert steps("no") == []
    assert steps("epoch", eval_strategy="epoch") == [4, 8]
    assert steps("steps", eval_strategy="steps", eval_steps=3) == [3, 6, 8]
    assert steps("start", eval_strategy="epoch", eval_on_start=True) == [0, 4, 8]


def test_training_with_and_without_evaluations_ends_in_the_same_weights(tmp_path: Path) -> None:
    """Dropout draws from torch's random state, which evaluations leave alone."""
    final = []
    for name, settings_ in (("a", {}), ("b", {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True})):
        made = trainer(tmp_path / name, max_steps=4, learning_rate=0.1, **settings_)
        made.train()
        final.append([p.detach().clone() for p in made.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*final, strict=True))


def test_metrics_of_batches_are_told_which_is_the_last_and_get_a_prediction_whole(tmp_path: Path) -> None:
    told: list[tuple[bool, int]] = []

    def summed(prediction: EvalPrediction, compute_result: bool) -> dict[str, float] | None:
        told.append((compute_result, len(prediction.label_ids)))
        return {"seen": sum(count for _, count in told)} if compute_result else None

    made = trainer(tmp_path, compute_metrics=summed, batch_eval_metrics=True, per_device_eval_batch_size=3)
    assert made.evaluate()["eval_seen"] == 7
    assert told == [(False, 3), (False, 3), (True, 1)]
    told.clear()
    predicted = made.predict(dataset(5))
    assert (predicted.metrics["test_seen"], predicted.predictions.shape) == (5, (5, 3))
    assert told == [(True, 5)]


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the dataset has no samples"):
        trainer(tmp_path).evaluate([])


def test_an_evaluation_before_any_training_writes_no_files(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.evaluate()
    assert not (tmp_path / "run").exists()
    assert len(made.state.log_history) == 1


def test_a_batch_without_labels_to_predict_has_no_loss_and_any_other_nan_shows() -> None:
    losses = MeanLoss()
    for loss, items in ((2.0, 3), (float("nan"), 0), (5.0, 1)):
        losses.add(torch.tensor(loss), items)
    assert losses.mean() == (2.0 * 3 + 5.0) / 4
    losses.add(torch.tensor(float("nan")), 2)
    assert str(losses.mean()) == "nan"
