"""The trackers of `report_to`, as a callback: TensorBoard, Weights & Biases, MLflow. metrics.jsonl is written in any case."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halfstep.tracking import GeneralTracker, chosen_trackers, make_tracker
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.callbacks import TrainerCallback
from halfstep.trainer.state import TrainerControl, TrainerState

REOPENED = ("tensorboard",)  # closed when training ends, so that the file is whole, and opened again for what comes after


def trackers_of(args: TrainingArguments) -> list[str | GeneralTracker]:
    """The trackers that report_to names. Raises ConfigError for an unknown one, and for a missing package with the line that installs it."""
    return [one for one in chosen_trackers(args.report_to, "report_to") if one != "jsonl"]


class TrackerCallback(TrainerCallback):
    """Hands every record on to one tracker, in the first process: eval_NAME as eval/NAME, test_NAME as test/NAME, all else as train/NAME.

    TensorBoard writes into logging_dir, or output_dir/runs. W&B's project is WANDB_PROJECT, MLflow's experiment MLFLOW_EXPERIMENT_NAME, both
    "halfstep" where the variable is not set; run_name is the run's name there. Their runs stay open after training, for what is evaluated then.
    """

    def __init__(self, tracker: str | GeneralTracker) -> None:
        self._wanted = tracker
        self.tracker: GeneralTracker | None = None

    @property
    def name(self) -> str:
        """The tracker's name."""
        return self._wanted if isinstance(self._wanted, str) else self._wanted.name

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the run and store the settings, and how the model is configured."""
        if state.is_world_process_zero and self.tracker is None:
            config: Any = getattr(kwargs.get("model"), "config", None)
            about = {"model/config": config.to_json_string()} if hasattr(config, "to_json_string") else {}
            self._open(args, state).store_init_configuration(args.to_dict() | about)

    def _open(self, args: TrainingArguments, state: TrainerState) -> GeneralTracker:
        if self.tracker is None:
            self.tracker = self._made(args, state) if isinstance(self._wanted, str) else self._wanted
            self.tracker.start()
        return self.tracker

    def _made(self, args: TrainingArguments, state: TrainerState) -> GeneralTracker:
        if self.name == "tensorboard":
            going_on = {"purge_step": state.global_step + 1} if state.global_step else {}  # hides what an interrupted run wrote after the checkpoint
            return make_tracker("tensorboard", "", args.logging_dir or Path(args.output_dir) / "runs", going_on, "report_to")
        variable, key = ("WANDB_PROJECT", "name") if self.name == "wandb" else ("MLFLOW_EXPERIMENT_NAME", "run_name")
        named = {key: args.run_name} if args.run_name else {}
        return make_tracker(self.name, os.environ.get(variable, "halfstep"), None, named, "report_to")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hand the record on; an evaluation before the first training belongs to no run."""
        if state.is_world_process_zero and (self.tracker is not None or state.global_step):
            values = {_rewritten(k): v for k, v in kwargs["logs"].items() if k != "step"}
            self._open(args, state).log(values, step=state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close what can be opened again."""
        if self.tracker is not None and self.name in REOPENED:
            self.tracker.finish()
            self.tracker = None


def _rewritten(key: str) -> str:
    for kind in ("eval", "test"):
        if key.startswith(f"{kind}_"):
            return f"{kind}/{key.removeprefix(f'{kind}_')}"
    return f"train/{key}"
