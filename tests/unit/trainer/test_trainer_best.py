"""The best model: which evaluation it is, what is kept of it, when a run stops for want of a better one, and metrics that raise."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep import EarlyStoppingCallback, Trainer, TrainingArguments
from halfstep.checkpoint import checkpoints
from halfstep.errors import ConfigError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


DATA = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "labels": i % 3} for i in range(16)]


def trainer(place: Path, values: list[Any], callbacks: tuple = (), **settings: Any) -> Trainer:
    """A trainer whose evaluations give `values`, one after another; an exception among them is raised."""
    given = iter(values)

    def metric(prediction: object) -> dict[str, float]:
        value = next(given)
        if isinstance(value, Exception):
            raise value
        return {"score": value}

    defaults = {"output_dir": str(place), "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "learning_rate": 0.1}
    defaults |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": len(values), "logging_steps": 1}
    args = TrainingArguments(**{**defaults, "metric_for_best_model": "score", **settings})
    return Trainer(Model(), args, train_dataset=DATA, eval_dataset=DATA[:6], compute_metrics=metric, callbacks=callbacks)


def weights_at_each_step(made: Trainer) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}

    class Keep:
        def on_step_end(self, args, state, control, **kwargs) -> None:
            found[state.global_step] = kwargs["model"].layer.weight.detach().clone()

    made.add_callback(Keep())
    return found


@pytest.mark.parametrize(
    ("values", "greater", "best"), [([1.0, 3.0, 2.0], True, 2), ([3.0, 1.0, 2.0], False, 2), ([math.nan, 1.0, math.nan], True, 2)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16-lean", "fp16-mixed"])
def test_a_run_ends_with_the_weights_of_its_best_evaluation(tmp_path: Path, values: list[float], greater: bool, best: int, precision: str) -> None:
    made = trainer(tmp_path, values, load_best_model_at_end=True, greater_is_better=greater, precision=precision)
    seen = weights_at_each_step(made)
    made.train()
    state = made.state
    assert (state.best_metric, state.best_global_step) == (values[best - 1], best)
    assert state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert torch.equal(made.model.layer.weight, seen[best])
    assert not torch.equal(seen[best], seen[len(values)])


def test_the_best_checkpoint_outlives_the_newest_ones_and_the_state_in_it_knows_it_is(tmp_path: Path) -> None:
    made = trainer(tmp_path, [1.0, 5.0, 2.0, 3.0, 4.0], load_best_model_at_end=True, greater_is_better=True, save_total_limit=2)
    made.train()
    assert [c.name for c in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-5"]
    resumed = trainer(tmp_path, [6.0], load_best_model_at_end=True, greater_is_better=True, save_total_limit=2, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.state.best_metric, resumed.state.best_global_step) == (6.0, 6)


def test_one_checkpoint_is_left_where_one_is_allowed(tmp_path: Path) -> None:
    trainer(tmp_path, [5.0, 1.0, 2.0], load_best_model_at_end=True, greater_is_better=True, save_total_limit=1).train()
    assert [c.name for c in checkpoints(tmp_path)] == ["checkpoint-1"]


def test_save_strategy_best_saves_when_an_evaluation_was_better(tmp_path: Path) -> None:
    trainer(tmp_path, [1.0, 3.0, 2.0, 4.0], save_strategy="best", save_steps=500, greater_is_better=True).train()
    assert [c.name for c in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]


def test_nan_is_never_the_best_and_a_run_without_a_best_says_so(tmp_path: Path) -> None:
    made = trainer(tmp_path, [math.nan, math.nan], load_best_model_at_end=True)
    with pytest.warns(UserWarning, match=r"there is no best model: no evaluation gave a eval_score .* last step, 2"):
        made.train()
    assert (made.state.best_metric, made.state.best_global_step, made.state.best_model_checkpoint) == (None, None, None)
    assert all(math.isnan(r["eval_score"]) for r in made.state.log_history if "eval_score" in r)


def test_a_metric_that_raises_does_not_end_the_run_and_is_shown(tmp_path: Path) -> None:
    made = trainer(tmp_path, [1.0, LookupError("no such class"), 2.0], load_best_model_at_end=True, greater_is_better=True)
    with pytest.warns(UserWarning, match="compute_metrics raised") as warned:
        made.train()
    assert made.state.global_step == 3
    errors = [r["eval_metrics_error"] for r in made.state.log_history if "eval_metrics_error" in r]
    assert errors == ["LookupError: no such class"]
    assert "LookupError: no such class" in (tmp_path / "metrics.jsonl").read_text()
    texts = [str(w.message) for w in warned]
    assert any("step 2: compute_metrics raised LookupError: no such class" in t for t in texts)
    assert any("raised at steps [2]; the best of the others, of step 3, was loaded" in t for t in texts)


def test_a_metric_that_always_raises_leaves_no_best_model_and_that_is_said(tmp_path: Path) -> None:
    made = trainer(tmp_path, [ValueError("bad")] * 2, load_best_model_at_end=True)
    with pytest.warns(UserWarning, match="compute_metrics raised") as warned:
        made.train()
    assert "there is no best model: compute_metrics raised at steps [1, 2]" in str(warned[-1].message)


def test_outside_a_run_a_metric_that_raises_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad"):
        trainer(tmp_path, [ValueError("bad")]).evaluate()


def test_a_metric_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric_for_best_model is 'eval_f1', and the evaluation gave eval_loss, eval_score"):
        trainer(tmp_path, [1.0], metric_for_best_model="f1").train()


@pytest.mark.parametrize(
    ("values", "patience", "threshold", "stops"),
    [
        ([1.0, 2.0, 1.5, 1.6, 3.0, 4.0], 2, 0.0, 4),
        ([1.0, 2.0, 3.0], 1, 0.0, 3),
        ([1.0, 1.05, 1.1, 9.0], 2, 0.5, 3),
        ([1.0, math.nan, math.nan, 9.0], 2, 0.0, 3),
        ([math.nan, math.nan, 9.0], 2, 0.0, 2),
    ],
)
def test_a_run_stops_after_so_many_evaluations_without_a_better_one(
    tmp_path: Path, values: list[float], patience: int, threshold: float, stops: int
) -> None:
    made = trainer(tmp_path, values, (EarlyStoppingCallback(patience, threshold),), greater_is_better=True, save_strategy="no", save_steps=500)
    made.train()
    assert made.state.global_step == stops


def test_the_count_of_early_stopping_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    trainer(tmp_path, [5.0, 1.0], (EarlyStoppingCallback(3),), greater_is_better=True).train()
    resumed = trainer(tmp_path, [1.0, 1.0, 1.0, 1.0], (EarlyStoppingCallback(3),), greater_is_better=True, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4, "one of the three was before"


def test_transformers_early_stopping_works_and_keeps_its_count(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback as Theirs

    trainer(tmp_path, [5.0, 1.0], (Theirs(3),), greater_is_better=True, load_best_model_at_end=True).train()
    again = {"greater_is_better": True, "load_best_model_at_end": True, "max_steps": 6}
    resumed = trainer(tmp_path, [1.0, 1.0, 1.0, 1.0], (Theirs(3),), **again)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_early_stopping_without_a_metric_or_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to compare evaluations by"):
        trainer(tmp_path / "a", [1.0], (EarlyStoppingCallback(),), metric_for_best_model=None).train()
    with pytest.raises(ConfigError, match="would stop at once"):
        EarlyStoppingCallback(0)
