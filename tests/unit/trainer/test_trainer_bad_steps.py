"""Steps that cannot be applied are counted, said and logged as they were; they use up neither steps nor schedule."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from halfstep import StepResult, Trainer, TrainerCallback, TrainingArguments
from halfstep.errors import DivergedError
from halfstep.trainer.progress import ProgressCallback

PRECISIONS = ["fp32", "bf16-mixed", "fp16-mixed,scale=dynamic:64"]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


class InOrder(Trainer):
    """Reads the data as it stands, so that a test knows which step gets the bad batch."""

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        loader.batch_sampler.shuffle = False
        return loader


class Results(TrainerCallback):
    """Keeps what each step said and did."""

    def __init__(self) -> None:
        self.applied: list[StepResult] = []
        self.skipped: list[tuple[StepResult, bool]] = []
        self.before: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.before = [p.detach().clone() for p in kwargs["model"].parameters()]

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.applied.append(kwargs["step_result"])

    def on_step_skipped(self, args, state, control, **kwargs) -> None:
        untouched = all(torch.equal(a, b) for a, b in zip(self.before, kwargs["model"].parameters(), strict=True))
        self.skipped.append((kwargs["step_result"], untouched))


def data(count: int, bad: set[int] = frozenset(), value: float = math.nan) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(count, 2, generator=generator)
    return [{"x": x * value if i in bad else x, "labels": float(x.sum())} for i, x in enumerate(xs)]


def records(place: Path) -> tuple[list[dict], list[dict]]:
    """What metrics.jsonl has: the records of the logging strategy, and those of refused steps."""
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    return [r for r in lines if "reason" not in r and "train_runtime" not in r], [r for r in lines if "reason" in r]


def trained(place: Path, samples: list[dict], **settings) -> tuple[Trainer, Results, list[dict]]:
    made, results = build(place, samples, **settings)
    made.train()
    return made, results, records(place)[0]


def build(place: Path, samples: list[dict], **settings) -> tuple[Trainer, Results]:
    torch.manual_seed(0)
    model, results = Regression(), Results()
    extra = settings.pop("callbacks", [])
    defaults = {
        "output_dir": str(place / "run"),
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 0.1,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    args = TrainingArguments(**{**defaults, "per_device_train_batch_size": 1, "optim": "sgd", **settings})
    return InOrder(model, args, train_dataset=samples, callbacks=[results, *extra]), results


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_bad_batch_among_good_ones_is_skipped_and_counted_and_the_rest_goes_on(tmp_path: Path, precision: str) -> None:
    made, results, lines = trained(tmp_path, data(8, {2}), max_steps=6, precision=precision)
    state = made.state
    assert (state.global_step, state.skipped_steps, state.attempted) == (6, 1, 7)
    assert [untouched for _, untouched in results.skipped] == [True]
    assert results.skipped[0][0].reason == "nonfinite-loss"
    assert [r["step"] for r in lines] == [1, 2, 3, 4, 5, 6]
    assert [r["skipped"] for r in lines] == [0, 0, 1, 1, 1, 1]
    assert [r["applied"] for r in lines] == [1, 2, 3, 4, 5, 6]
    assert [math.isnan(r["loss"]) for r in lines] == [False, False, True, False, False, False], "it is never averaged away"
    assert [r["lr"] for r in lines] == pytest.approx([0.1 * (1 - n / 6) for n in range(6)]), "that of the logged step"
    assert {r["scale"] for r in lines} == {64.0 if precision.startswith("fp16") else 1.0}, "a bad forward pass is not the scale's fault"
    (skip,) = records(tmp_path)[1]
    assert {k: skip[k] for k in ("step", "reason", "applied", "skipped", "scale")} == {
        "step": 2,
        "reason": "nonfinite-loss",
        "applied": 2,
        "skipped": 1,
        "scale": lines[0]["scale"],
    }
    assert math.isnan(skip["loss"])
    assert skip["culprits"][:2] == ["input x (forward: nan)", "loss (forward: nan)"]


def test_the_good_steps_are_those_of_a_run_without_the_bad_batch(tmp_path: Path) -> None:
    with_bad, _, _ = trained(tmp_path / "a", data(8, {2}), max_steps=6)
    samples = [s for i, s in enumerate(data(8)) if i != 2]
    without, _, _ = trained(tmp_path / "b", samples, max_steps=6)
    assert all(torch.equal(a, b) for a, b in zip(with_bad.model.parameters(), without.model.parameters(), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_but_bad_batches_ends_in_diverged_error_that_names_the_loss(tmp_path: Path, precision: str, value: float) -> None:
    made, results = build(tmp_path, data(8, set(range(8)), value), max_steps=100, precision=precision, max_bad_steps=5)
    before = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(DivergedError) as caught:
        made.train()
    assert "5 steps in a row could not be applied (nonfinite-loss" in caught.value.cause
    kind = "nan" if math.isnan(value) else "inf"
    assert f"not finite: input x (forward: {kind}), loss (forward: {kind})" in caught.value.cause
    assert "since the first step of this run" in caught.value.cause
    assert caught.value.remedy.startswith("1. Take the values that are not finite out of the data (input x). 2. ")
    assert "max_bad_steps=" in caught.value.remedy
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert len(results.skipped) == 4
    assert results.applied == []
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert caught.value.result.reason == "nonfinite-loss"
    logged, skips = records(tmp_path)
    assert logged == []
    assert [r["skipped"] for r in skips] == [1, 2, 3, 4, 5], "the one that ends the run too"
    assert all(not math.isfinite(r["loss"]) and r["applied"] == 0 for r in skips)


def test_a_good_step_between_bad_ones_resets_the_patience(tmp_path: Path) -> None:
    made, _, _ = trained(tmp_path, data(12, {0, 1, 3, 4, 6, 7, 9, 10}), num_train_epochs=1, max_bad_steps=3)
    assert (made.state.global_step, made.state.skipped_steps) == (4, 8)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_a_run_of_epochs_a_skipped_step_is_not_made_up_for(tmp_path: Path, precision: str) -> None:
    made, _, lines = trained(tmp_path, data(8, {5}), num_train_epochs=1, precision=precision)
    assert (made.state.global_step, made.state.skipped_steps) == (7, 1)
    assert [r["step"] for r in lines] == [1, 2, 3, 4, 5, 6, 7]


def test_the_last_steps_of_a_run_of_epochs_are_logged_and_evaluated_although_one_was_skipped(tmp_path: Path) -> None:
    """As in a run without a skip, which logs and evaluates at its end whatever logging_steps says."""
    made, _ = build(tmp_path, data(8, {5}), num_train_epochs=1, logging_steps=100, eval_strategy="steps", eval_steps=100)
    made.eval_dataset = data(4)
    made.train()
    assert ["loss" in r and "reason" not in r for r in made.state.log_history].count(True) == 1
    assert ["eval_loss" in r for r in made.state.log_history].count(True) == 1


def test_an_overflow_of_gradients_lowers_the_scale_and_says_the_parameter(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            self.handle = kwargs["model"].layer.weight.register_hook(lambda g: g * math.inf if state.attempted == 2 else g)

        def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
            self.handle.remove()

    precision = "fp16-mixed,scale=dynamic:64,scale_strategy=stock"
    made, results, lines = trained(tmp_path, data(8), max_steps=4, precision=precision, on_overflow="skip", callbacks=[Once()])
    assert [r["scale"] for r in lines] == [64, 64, 32, 32]
    assert [(r.reason, r.scale, r.next_scale, [c.name for c in r.culprits]) for r, _ in results.skipped] == [("overflow", 64, 32, ["layer.weight"])]
    assert all(math.isfinite(r["loss"]) for r in lines)
    assert made.state.skipped_steps == 1


def test_one_bad_micro_batch_makes_its_window_bad(tmp_path: Path) -> None:
    made, results, lines = trained(tmp_path, data(8, {3}), num_train_epochs=1, gradient_accumulation_steps=2)
    assert (made.state.global_step, made.state.skipped_steps) == (3, 1)
    assert [untouched for _, untouched in results.skipped] == [True]
    assert [math.isnan(r["loss"]) for r in lines] == [False, True, False]


def test_the_mean_loss_of_the_run_is_nan_when_one_was(tmp_path: Path) -> None:
    made, _ = build(tmp_path, data(8, {3}), num_train_epochs=1)
    assert math.isnan(made.train().training_loss)


def test_every_skip_is_said_on_the_terminal_and_many_are_said_less_often(tmp_path: Path) -> None:
    screen = io.StringIO()
    shown = ProgressCallback(Console(file=screen, width=200))
    made, results, _ = trained(tmp_path, data(40, set(range(1, 40, 2))), num_train_epochs=1, callbacks=[shown])
    assert len(results.skipped) == 20
    said = [line for line in screen.getvalue().splitlines() if "not applied" in line]
    assert len(said) == 11
    assert (
        said[0] == "step 2 not applied: nonfinite-loss: input x (forward: nan), loss (forward: nan), layer.weight (backward: nan) and more (1 so far)"
    )
    assert said[-1].endswith("(20 so far)")
    assert "precision fp32 on cpu, fp32 weights, loss scale none" in screen.getvalue()
    assert "loss nan" in screen.getvalue()
    assert made.state.skipped_steps == 20


def test_labels_that_are_not_finite_are_named_where_the_model_never_sees_them(tmp_path: Path) -> None:
    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).squeeze(-1)

    samples = [{"x": torch.ones(2), "labels": torch.tensor(math.nan if i == 1 else 1.0)} for i in range(3)]
    heard = Results()
    settings = {"per_device_train_batch_size": 1, "max_steps": 2, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(tmp_path / "run"), **settings)
    mse = torch.nn.functional.mse_loss
    InOrder(Predicts(), args, train_dataset=samples, compute_loss_func=mse, callbacks=[heard]).train()
    assert [c.name for c in heard.skipped[0][0].culprits][:2] == ["input labels", "loss"]
