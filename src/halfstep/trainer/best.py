"""Which evaluation was the best one so far, by one of its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.checkpoint import checkpoints
from halfstep.errors import ConfigError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.state import TrainerState

FAILED = "metrics_error"  # under the prefix of an evaluation: the text of what compute_metrics raised


@dataclass(frozen=True)
class Judge:
    """name: the metric that decides, with its prefix. greater: whether more of it is better."""

    name: str
    greater: bool

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether `value` is better than `best`, None for no value yet. NaN never is, nor is an infinite value of the wrong sign."""
        start = -math.inf if self.greater else math.inf
        than = start if best is None else best
        return value > than if self.greater else value < than

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        """The metric among those of an evaluation; None when the function that computes it has raised.

        Raises ConfigError when it is not among them otherwise.
        """
        found = metrics.get(self.name)
        if found is None and not self.failed(metrics):
            raise ConfigError(
                f"metric_for_best_model is {self.name!r}, and the evaluation gave {', '.join(map(str, metrics))}",
                "Name one of these, or let compute_metrics return it.",
            )
        return None if found is None else float(found)

    def failed(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the function that computes the metric has raised in this evaluation."""
        return any(key.endswith(FAILED) and self.name.startswith(key.removesuffix(FAILED)) for key in metrics)


def compares(args: TrainingArguments) -> bool:
    """Whether evaluations are compared: a metric is named for it, or something depends on the best one."""
    return args.metric_for_best_model is not None or args.load_best_model_at_end or args.save_strategy == "best"


def judge_of(args: TrainingArguments) -> Judge:
    """How evaluations are compared. metric_for_best_model: with or without `eval_`, the loss when not given."""
    name = args.best_metric
    return Judge(name if name.startswith("eval_") else f"eval_{name}", args.best_is_greatest)


def folder_of_best(run: Path, state: TrainerState) -> Path | None:
    """The checkpoint of the best evaluation, if it is there."""
    if state.best_global_step is None:
        return None
    folder = run / f"checkpoint-{state.best_global_step}"
    if folder in checkpoints(run):
        return folder
    elsewhere = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None  # of the run that this one was resumed from
    return elsewhere if elsewhere is not None and elsewhere.is_dir() else None


def doubts_about_best(found: bool, args: TrainingArguments, state: TrainerState, failed: list[int]) -> str:
    """Why the best model was not `found`, or may not be the best: evaluations, after these steps, that `failed`. Empty where there is no doubt."""
    raised = f"compute_metrics raised at steps {failed}" if failed else ""
    if found:
        return f"{raised}; the best of the others, of step {state.best_global_step}, was loaded" if raised else ""
    judge = judge_of(args)
    why = raised or f"no evaluation gave a {judge.name} that is better than {'-' if judge.greater else ''}inf"
    return f"there is no best model: {why}; the weights are those of the last step, {state.global_step}"
