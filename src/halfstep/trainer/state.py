"""Where a training run stands, and what its callbacks want to happen next."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

OF_THIS_CALL = (  # what a state loaded from a checkpoint does not change
    "max_steps",
    "num_train_epochs",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "is_world_process_zero",
    "is_local_process_zero",
)


@dataclass
class TrainerState:
    """Progress of a run. Goes into every checkpoint.

    global_step: optimizer steps that moved the weights; skipped_steps: those that were refused. replayed_steps: steps that
    overflowed and were run again at a lower loss scale.
    best_metric, best_global_step, best_model_checkpoint: the value of metric_for_best_model at the best evaluation so far, its step, its checkpoint.
    There is no total_flos: operations are not counted.
    epoch: passes over the data so far, a fraction inside one. log_history: every logged record, oldest first.
    """

    global_step: int = 0
    skipped_steps: int = 0
    replayed_steps: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    epoch_index: int = 0  # of the pass that is going on
    batches_in_epoch: int = 0  # micro-batches of it that were used
    log_history: list[dict[str, Any]] = field(default_factory=list)
    loss_sum: float = 0.0  # of the steps since the last record, as of the last checkpoint
    loss_count: int = 0
    evaluation_due: bool = False  # Ctrl-C came during an evaluation: the resumed run begins with it
    last_grad_norm: float | None = None
    last_learning_rate: float = 0.0  # of the last step
    watched: dict[str, Any] = field(default_factory=dict)  # what the last step came close to, as of the last checkpoint
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int | None = None
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    stateful_callbacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # as of the last checkpoint
    is_hyper_param_search: bool = False
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    @property
    def attempted(self) -> int:
        """Steps applied and refused."""
        return self.global_step + self.skipped_steps

    def state_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the fields of a saved state; those that an older halfstep did not have are as at the beginning of a run."""
        begun = TrainerState()
        for f in fields(self):
            setattr(self, f.name, state.get(f.name, getattr(begun, f.name)))


class Losses:
    """Sum and number of the losses of some steps; a loss that is not finite shows in the mean. Read from the device when it is asked for."""

    MOST = 256  # losses that wait on the device

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self._sum, self.count = total, count
        self._waiting: list[Tensor] = []

    def add(self, loss: Tensor | None) -> None:
        """Add the loss of a step, if it had one."""
        if loss is not None:
            self._waiting.append(loss.detach())
            self.count += 1
            if len(self._waiting) >= self.MOST:
                self._read()

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        alike = len({(loss.dtype, loss.device) for loss in waiting}) < 2
        for value in torch.stack(waiting if alike else [loss.double().cpu() for loss in waiting]).tolist() if waiting else ():
            self._sum += value  # one by one: a resumed run adds up in the same order

    @property
    def sum(self) -> float:
        """Their sum, in fp64."""
        self._read()
        return self._sum

    def mean(self) -> float:
        """Their mean; NaN without any."""
        return self.sum / self.count if self.count else math.nan


@dataclass
class TrainerControl:
    """Switches that callbacks may set; the trainer obeys and clears them."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
