"""The learning rate schedules that the arguments describe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from halfstep.errors import ConfigError
from halfstep.trainer.best import judge_of
from halfstep.trainer.schedules import make_scheduler


def rates(kind: str, steps: int, **settings_: Any) -> list[float]:
    args = TrainingArguments(lr_scheduler_type=kind, learning_rate=1.0, **settings_)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler, found = make_scheduler(optimizer, args, steps), []
    for _ in range(steps + 2):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 0.125, "power": 2.0}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 5}),
    ("cosine_with_min_lr", {"min_lr": 0.25}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.0}),
    ("warmup_stable_decay", {"num_decay_steps": 3}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.25}),
    ("warmup_stable_decay", {"num_decay_steps": 2, "num_stable_steps": 3, "warmup_type": "cosine", "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt", "num_cycles": 0.25}),
]


@pytest.mark.parametrize(("kind", "extra"), ARGUMENTS)
@pytest.mark.parametrize(("steps", "warmup"), [(13, 0), (13, 4), (40, 7), (10, 1)])
def test_rates_are_those_of_transformers(kind: str, extra: dict, steps: int, warmup: int) -> None:
    from transformers import get_scheduler

    warmup = 0 if kind == "constant" else warmup
    total = None if "num_stable_steps" in extra else steps
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs, expected = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=dict(extra)), []
    for _ in range(steps + 1):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(kind, steps, warmup_steps=warmup, lr_scheduler_kwargs=extra)[: steps + 1] == pytest.approx(expected, abs=1e-12, rel=0)


def test_a_plateau_is_that_of_transformers() -> None:
    from transformers import get_scheduler

    extra = {"factor": 0.5, "patience": 1, "min_lr": 0.2}
    args = TrainingArguments(learning_rate=1.0, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs=extra, eval_strategy="epoch")
    found: list[list[float]] = []
    for make in (lambda o: make_scheduler(o, args, 9), lambda o: get_scheduler(args.lr_scheduler_type, o, scheduler_specific_kwargs=extra)):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        scheduler = make(optimizer)
        found.append([])
        for loss in (3.0, 2.0, 2.5, 2.5, 1.0, float("nan"), float("nan"), 1.0, 1.0, 1.0):
            optimizer.step()
            scheduler.step(loss)
            found[-1].append(optimizer.param_groups[0]["lr"])
    assert found[0] == found[1]
    assert (found[0][3], found[0][6], found[0][-1]) == (0.5, 0.25, 0.2)


def test_a_plateau_of_a_score_waits_for_it_to_rise() -> None:
    args = TrainingArguments(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", metric_for_best_model="accuracy")
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    assert make_scheduler(optimizer, args, 3).mode == "max"


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, r"lr_scheduler_type='linear' takes no 'num_cycles'"),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": "num_cycle=2"},
            r"takes no 'num_cycle' in lr_scheduler_kwargs. Did you mean 'num_cycles'",
        ),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": "num_cycles=0"}, r"num_cycles=0 in lr_scheduler_kwargs is out of range"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, r"does not know how long to decay"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, r"takes one of min_lr and min_lr_rate"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, r"follows evaluations, and there are none. Use eval_strategy="),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": "lr_end=2.0"}, r"lr_end=2.0 is not below learning_rate=1.0"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": "min_lr=2.0"}, r"min_lr=2.0 is above learning_rate=1.0"),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": "num_decay_steps=9"},
            r"decay of 9 steps are more than the 5",
        ),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "lr_scheduler_kwargs": "factor=2.0"},
            r"reduce_lr_on_plateau refuses lr_scheduler_kwargs=.'factor': 2.0.: Factor",
        ),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings_: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_scheduler(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), TrainingArguments(learning_rate=1.0, **settings_), 5)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["linear", "cosine"]), st.integers(2, 20), st.floats(0, 1))
def test_the_rate_rises_once_to_the_given_one_and_falls_to_nothing(kind: str, steps: int, ratio: float) -> None:
    found = rates(kind, steps, warmup_ratio=ratio)
    peak = found.index(max(found))
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert found[-1] == pytest.approx(0.0, abs=1e-12) or ratio == 1
    assert max(found) == 1.0 or ratio > (steps - 1) / steps


def test_a_share_of_warm_up_is_rounded_up() -> None:
    assert rates("constant_with_warmup", 10, warmup_ratio=0.11) == [0.0, 0.5] + [1.0] * 10
    assert rates("constant_with_warmup", 10, warmup_steps=0.11) == [0.0, 0.5] + [1.0] * 10


def test_warm_up_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warm-up has no effect with lr_scheduler_type='constant'. Use constant_with_warmup"):
        rates("constant", 5, warmup_steps=2)


class Scored(TrainerCallback):
    """Replaces the loss of each evaluation, and notes the learning rate of each step."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.rates = losses, list[float]()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


def plateau_run(place: Path, losses: list[float], steps: int, *, save_at: int = 100, resume: str | None = None) -> tuple[list[float], Trainer]:
    scored = Scored(losses)
    args = TrainingArguments(
        str(place),
        max_steps=steps,
        save_steps=save_at,
        per_device_train_batch_size=1,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs="patience=0,factor=0.5",
        learning_rate=1.0,
        optim="sgd",
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"x": torch.zeros(1)}] * 8

    class Told(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return super().evaluate(*args, **kwargs) | {"eval_loss": scored.losses[self.state.global_step]}

    made = Told(Still(), args, train_dataset=data, eval_dataset=data[:1], callbacks=[scored])
    made.train(resume_from_checkpoint=resume)
    return scored.rates, made


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).sum()}


def test_training_slows_down_where_evaluations_stop_falling_and_goes_on_so_from_a_checkpoint(tmp_path: Path) -> None:
    """The evaluation before the first step moves nothing; one that is not finite is no progress."""
    losses = [0.0, 5.0, 4.0, 4.5, float("nan"), 3.0, 3.5]
    whole, _ = plateau_run(tmp_path / "whole", losses, 6)
    assert whole == [1.0, 1.0, 1.0, 0.5, 0.25, 0.25]
    plateau_run(tmp_path / "cut", losses, 3, save_at=3)
    rest, made = plateau_run(tmp_path / "cut", losses, 6, resume=str(tmp_path / "cut" / "checkpoint-3"))
    assert rest == whole[3:]
    assert made.scheduler_in_use.get_last_lr() == [0.125]


def test_a_plateau_of_a_metric_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric_for_best_model is 'eval_f1', and the evaluation gave eval_loss, eval_runtime\. Name one of these"):
        judge_of(TrainingArguments(metric_for_best_model="f1", eval_strategy="epoch")).value({"eval_loss": 1.0, "eval_runtime": 1.0})
