"""What a trainer tells: events to its callbacks, records to its history, metrics to the terminal and to files."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch import nn

from halfstep.accelerator import Accelerator
from halfstep.optim import EMA
from halfstep.step import StepResult
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.averaging import NoAverage
from halfstep.trainer.callbacks import CallbackList
from halfstep.trainer.outputs import record_of
from halfstep.trainer.ranks import mean_loss
from halfstep.trainer.rules import note_pins
from halfstep.trainer.run import RunFolder
from halfstep.trainer.speed import shown, speed_metrics, write_json, write_metrics
from halfstep.trainer.state import TrainerControl, TrainerState


class Reporting(ABC):
    """Callbacks, log and metrics of a trainer."""

    args: TrainingArguments
    model: nn.Module
    run: RunFolder
    accelerator: Accelerator
    callbacks: CallbackList
    state: TrainerState
    control: TrainerControl
    processing_class: Any
    optimizer_in_use: Any
    scheduler_in_use: Any

    def __init__(self) -> None:
        self.state, self.control = TrainerState(), TrainerControl()
        self.optimizer_in_use, self.scheduler_in_use = None, None
        self._loader: Any = None  # of the training data
        self._eval_loader: Any = None  # of the evaluation going on, or of the last one
        self._average = NoAverage()  # of the run's weights
        self._tokens_at_start = 0  # tokens seen before this call of train()

    def _tell(self, result: StepResult) -> None:
        """Records of a step out of turn: modules that are held in fp32 from now on, and weights that a bad gradient has left out."""
        if result.pinned:
            self.log(note_pins(self.run.path, self.model, result.pinned, self.accelerator.is_main_process))
        if result.reason == "partly":
            self.log(mean_loss(self.accelerator.ranks, record_of(result)) | {"detail": result.detail})

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class of callbacks, after those there are. Objects of transformers.TrainerCallback work too."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback, or the first of a class, out and return it; None when there is none."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback, or the first of a class, out; nothing happens when there is none."""
        self.callbacks.pop(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that writes files and logs."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of this machine."""
        return self.state.is_local_process_zero

    @property
    def average(self) -> EMA | None:
        """The average of the weights of the run (`ema_decay`); None without one, and before `train()`."""
        return self._average.average

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add a record with step and epoch to the history and tell the callbacks; metrics.jsonl gets it during a run.

        start_time: when training began, in seconds of `time.time()`: with include_num_input_tokens_seen the record gets tokens a second since then.
        """
        record = logs | {"epoch": round(self.state.epoch, 6), "step": self.state.global_step}
        if self.counts_tokens:
            record["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._tokens_at_start
                record |= speed_metrics("train", time.time() - start_time, tokens=tokens)
        self.state.log_history.append(record)
        self._event("on_log", logs=record)

    @property
    def counts_tokens(self) -> bool:
        """Whether records have the number of input tokens seen."""
        return self.args.include_num_input_tokens_seen not in (False, "no")

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, one a line, in the first process. split: train, eval or another name for the heading."""
        if self.is_world_process_zero():
            lines = shown(metrics)
            wide, long = max(map(len, lines), default=0), max(map(len, lines.values()), default=0)
            print(f"***** {split} metrics *****")
            for key in sorted(lines):
                print(f"  {key:<{wide}} = {lines[key]:>{long}}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write SPLIT_results.json into output_dir in the first process; combined: all_results.json gets them too."""
        if self.is_world_process_zero():
            write_metrics(self.run.path, split, metrics, combined)

    def save_state(self) -> None:
        """Write trainer_state.json into output_dir in the first process: the state with its log history."""
        if self.is_world_process_zero():
            write_json(self.run.path / "trainer_state.json", self.state.state_dict())

    def _event(self, name: str, **kwargs: Any) -> None:
        if listening := self.callbacks.listeners(name):
            about = {
                "model": self.model,
                "processing_class": self.processing_class,
                "optimizer": self.optimizer_in_use,
                "lr_scheduler": self.scheduler_in_use,
                "train_dataloader": self._loader,
                "eval_dataloader": self._eval_loader,
                "resolution": self.accelerator.resolution,
                "device": self.accelerator.device,
                "accelerator": self.accelerator,
            }
            self.control = self.callbacks.tell(listening, name, self.args, self.state, self.control, **about, **kwargs)
