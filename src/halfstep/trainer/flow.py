"""Callbacks that come with the trainer: what paces a run, what prints its numbers, and what stops it early."""

from __future__ import annotations

import math
import warnings
from typing import Any

from halfstep.errors import ConfigError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.best import compares, judge_of
from halfstep.trainer.callbacks import TrainerCallback
from halfstep.trainer.state import TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Sets the control's switches as the strategies in the arguments say."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log, evaluate and save every so many applied steps, and at the last one."""
        step, last = state.global_step, self._is_last(args, state)
        if args.logging_strategy == "steps" and (step % state.logging_steps == 0 or last):
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if args.eval_strategy == "steps" and (step % state.eval_steps == 0 or last) and step >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "steps" and (step % state.save_steps == 0 or last):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_step_skipped(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A run of epochs may end with a refused step: log, evaluate and save as at any other end."""
        if self._is_last(args, state):
            control.should_log = control.should_log or args.logging_strategy == "steps"
            control.should_evaluate = control.should_evaluate or (args.eval_strategy == "steps" and state.global_step >= args.eval_delay)
            control.should_save = control.should_save or args.save_strategy == "steps"

    @staticmethod
    def _is_last(args: TrainingArguments, state: TrainerState) -> bool:
        return (state.global_step if args.max_steps > 0 else state.attempted) >= state.max_steps

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log, evaluate and save after each epoch."""
        control.should_log = control.should_log or args.logging_strategy == "epoch"
        control.should_evaluate = control.should_evaluate or (args.eval_strategy == "epoch" and state.epoch >= args.eval_delay)
        control.should_save = control.should_save or args.save_strategy == "epoch"


class PrinterCallback(TrainerCallback):
    """Prints each record as a line."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print the record; numbers to four digits, NaN as nan."""
        if state.is_local_process_zero:
            print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in (kwargs.get("logs") or {}).items()})


class EarlyStoppingCallback(TrainerCallback):
    """Stops the run after so many evaluations in a row that were not better than the best one.

    early_stopping_patience: that many evaluations. early_stopping_threshold: what counts as better is more than this away from the best value, in the
    metric's own unit. The metric is `metric_for_best_model`. A value that is NaN is no improvement, and neither is an evaluation whose metric raised.
    The count goes into checkpoints.

    Raises ConfigError when the run begins without evaluations or without a metric to compare them by.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        if early_stopping_patience < 1:
            raise ConfigError(f"early_stopping_patience={early_stopping_patience} would stop at once", "Use 1 or more.")
        if early_stopping_threshold is not None and not early_stopping_threshold >= 0:
            raise ConfigError(f"early_stopping_threshold={early_stopping_threshold}", "Use 0 or more.")
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse a run that evaluates nothing, or does not say what is better; a new run counts from 0."""
        if not compares(args):
            raise ConfigError("EarlyStoppingCallback has nothing to compare evaluations by", "Set metric_for_best_model, 'loss' for example.")
        if args.eval_strategy == "no":
            raise ConfigError("EarlyStoppingCallback has no effect with eval_strategy='no'", "Use eval_strategy='steps' or 'epoch'.")
        if state.attempted == 0:
            self.early_stopping_patience_counter = 0

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count an evaluation that was no better, and stop the run after too many."""
        judge, metrics = judge_of(args), kwargs.get("metrics") or {}
        if judge.name not in metrics and not judge.failed(metrics):
            return  # one of several datasets
        value, best = judge.value(metrics), state.best_metric
        better = value is not None and judge.is_better(value, best)
        if value is not None and better and (best is None or not math.isfinite(best) or abs(value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """What goes into checkpoints, in the form of transformers."""
        args = {"early_stopping_patience": self.early_stopping_patience, "early_stopping_threshold": self.early_stopping_threshold}
        return {"args": args, "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter}}


def states_of(callbacks: list[Any]) -> dict[str, list[dict[str, Any]]]:
    """What callbacks with a method `state()` want to keep, by class name, those of one class in order."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for callback in callbacks:
        method = getattr(callback, "state", None)
        if callable(method):
            kept.setdefault(type(callback).__name__, []).append(method())
    return kept


def give_back(callbacks: list[Any], kept: dict[str, list[dict[str, Any]]]) -> None:
    """Set the attributes that `states_of` kept on callbacks of the same classes; their arguments stay those of this run."""
    left = {name: list(states) for name, states in kept.items()}
    for callback in callbacks:
        states = left.get(type(callback).__name__)
        if states and callable(getattr(callback, "state", None)):
            for key, value in states.pop(0).get("attributes", {}).items():
                setattr(callback, key, value)
    missing = [name for name, states in left.items() if states]
    if missing:
        warnings.warn(f"the checkpoint has the state of callbacks that this run does not have: {', '.join(missing)}", stacklevel=3)
