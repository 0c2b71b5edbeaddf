"""The training loop of `Trainer`: epochs, windows of micro-batches, steps, and what is done between them."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from halfstep.accelerator import Accelerator, EpochStart, to_device
from halfstep.errors import ConfigError, DataError, DivergedError, StepRefusedError
from halfstep.step import StepResult
from halfstep.trainer import outputs
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.build import lengths, step_options
from halfstep.trainer.callbacks import CallbackList
from halfstep.trainer.changes import Changes
from halfstep.trainer.data import count_inputs, from_batch
from halfstep.trainer.fitting import FixedBatch, OutOfMemory, is_out_of_memory
from halfstep.trainer.interrupt import Interrupt, StopNow, TrainingInterrupted
from halfstep.trainer.outputs import TrainOutput, check_batch, record_of
from halfstep.trainer.resume import refuse_other_settings, settings_to_keep
from halfstep.trainer.rules import follow_rules, note_pins
from halfstep.trainer.run import RunFolder
from halfstep.trainer.schedules import follows_metric, metric_of
from halfstep.trainer.state import Losses, TrainerControl, TrainerState


class TrainingLoop(ABC):
    """What `train()` does. `Trainer` says how data, loss and optimizer are made, and a subclass of it may say otherwise."""

    args: TrainingArguments
    model: nn.Module
    run: RunFolder
    accelerator: Accelerator
    callbacks: CallbackList
    state: TrainerState
    control: TrainerControl
    label_names: tuple[str, ...]
    settings: dict[str, Any]  # what config.yaml gets
    _changes: Changes  # what is done to the model while it is used
    _batch: FixedBatch  # how many samples a micro-batch has
    optimizer_in_use: Any
    scheduler_in_use: Any

    def __init__(self) -> None:
        self.state, self.control = TrainerState(), TrainerControl()
        self._interrupt = Interrupt()
        self._losses = Losses()  # of the steps since the last record
        self._loader: Any = None  # of the training data
        self._epoch_start, self._saved_at = EpochStart(), -1  # where the epoch began; the step of the last checkpoint
        self._window = 1  # micro-batches in the window at hand
        self._per_epoch: int | None = None  # steps in a pass over the data, None when it has no length
        self._clips_late = False  # clipping is left to the optimizer's own pass
        self._follows_metric = False  # the schedule moves with evaluations and not with steps
        self._last: StepResult | None = None

    @abstractmethod
    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data."""

    @abstractmethod
    def get_eval_dataloader(self, dataset: Any = None) -> DataLoader[Any]:
        """The loader of evaluation data."""

    @abstractmethod
    def create_optimizer(self) -> Optimizer:
        """The optimizer of the run."""

    @abstractmethod
    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer) -> Any:
        """The learning rate schedule of the run."""

    @abstractmethod
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch."""

    @abstractmethod
    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Loss and metrics over the evaluation data."""

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train to the end of the schedule. `resume_from_checkpoint`: True for the newest of this run, or a folder.

        Ctrl-C finishes the step, saves a checkpoint and raises TrainingInterrupted (a KeyboardInterrupt).
        Raises DivergedError after args.max_bad_steps refused steps in a row, CheckpointError, ConfigError, DataError.
        """
        wanted = resume_from_checkpoint or self.args.resume_from_checkpoint
        checkpoint = self.run.find(wanted) if wanted else None
        if checkpoint is None or not self.run.owns(checkpoint):
            self.run.check(self.args.overwrite_output_dir)
        self._batch.begin(self.model, checkpoint)
        with self._changes.in_training():
            while True:
                self._loader = self._set_up()
                try:
                    self._enter(checkpoint)
                    return self._train()
                except OutOfMemory as error:
                    self._batch.shrink(self.model, error.__cause__ or error)
                finally:
                    self.run.leave()

    def _enter(self, checkpoint: Path | None) -> None:
        """Begin a run in its folder, or go on from a checkpoint."""
        if checkpoint is None:
            self.run.begin(self.settings, self.args.overwrite_output_dir or self._batch.tried > 0)
            if told := follow_rules(self.args, self.run.path, self.model):
                self.log(told)
        else:
            refuse_other_settings(checkpoint, settings_to_keep(self.args, self._loader))
            lengths = self.state.max_steps, self.state.num_train_epochs
            self.accelerator.load_state(checkpoint)
            self.state.max_steps, self.state.num_train_epochs = lengths
            self._losses = Losses(self.state.loss_sum, self.state.loss_count)
            self.control.should_evaluate = self.state.evaluation_due
            self.run.go_on(self.settings, checkpoint, self.state.log_history)

    def _train(self) -> TrainOutput:
        """From where the state stands to the end, or to Ctrl-C."""
        begun, losses = self.state.global_step, Losses()
        self._event("on_train_begin")
        try:
            with self._interrupt:
                if self.args.eval_on_start and self.state.attempted == 0:
                    self.control.should_evaluate = True
                self._act()
                for result in self._steps(self._loader):
                    losses.add(result.loss_tensor)
            if self.args.save_strategy != "no" and self.state.global_step not in (begun, self._saved_at):
                self._save()
        except StopNow:
            folder = self._save() if self.args.save_strategy != "no" and self.state.attempted else None
            raise TrainingInterrupted(self.state.global_step, folder) from None
        finally:
            self._event("on_train_end")
        mean = losses.mean()
        return TrainOutput(self.state.global_step, mean, {"train_loss": mean, "epoch": self.state.epoch})

    def _set_up(self) -> DataLoader[Any]:
        """Loader, optimizer, schedule and lengths, all before anything is trained."""
        loader = self.get_train_dataloader()
        length = lengths(self.args, loader)
        self._per_epoch = length.per_epoch
        if self.args.eval_strategy != "no" or self.args.eval_on_start:
            self.get_eval_dataloader()  # refuses missing data now, and not after the first steps
        self.state, self.control, self._losses = TrainerState(), TrainerControl(), Losses()
        self.state.max_steps, self.state.num_train_epochs = length.steps, length.epochs
        self.accelerator = self._fresh_accelerator()
        optimizer = self.create_optimizer()
        scheduler = self.create_scheduler(self.state.max_steps, optimizer)
        self.optimizer_in_use, self.scheduler_in_use = self.accelerator.prepare(optimizer, scheduler)
        self._follows_metric = follows_metric(self.scheduler_in_use)
        self.accelerator.register_for_checkpointing(self.state, self._epoch_start)
        return loader

    def _fresh_accelerator(self) -> Accelerator:
        """An accelerator that knows the model and nothing of an earlier call of train()."""
        a = self.args
        strict: Literal["raise", "skip"] = "raise" if a.on_overflow == "raise" else "skip"
        fresh = Accelerator(precision=a.policy, cpu=a.use_cpu, patience=a.max_bad_steps, on_overflow=strict, heal=a.heal)
        fresh.prepare(self.model)
        return fresh

    def _steps(self, loader: DataLoader[Any]) -> Iterator[StepResult]:
        """Every step of the run, epoch by epoch, with its logging, evaluation and saving."""
        while not self._finished():
            self._event("on_epoch_begin")
            batches = from_batch(loader, self.state.epoch_index, self.state.batches_in_epoch, self._epoch_start)
            while window := list(itertools.islice(batches, self.args.gradient_accumulation_steps)):
                yield self._step(window, loader)
                self._act()
                self._interrupt.stop_if_requested()
                if self._finished() or self.control.should_epoch_stop:
                    break
            if self.state.batches_in_epoch == 0:
                raise DataError("the training data yields nothing", "Check the dataset: no samples, or an iterator that is spent after one pass.")
            self.control.should_epoch_stop = False
            self._event("on_epoch_end")
            whole = self._per_epoch is None or self.state.batches_in_epoch >= len(loader)
            if whole or not self._finished():
                self.state.epoch_index, self.state.batches_in_epoch = self.state.epoch_index + 1, 0
            self._act()

    def _finished(self) -> bool:
        """Whether the run is over: enough steps were applied, or the epochs asked for were seen, or a callback said so."""
        done = self.state.global_step if self.args.max_steps > 0 else self.state.attempted
        return self.control.should_training_stop or done >= self.state.max_steps

    def _step(self, window: list[Any], loader: DataLoader[Any]) -> StepResult:
        """One optimizer step over the micro-batches of a window."""
        self._event("on_step_begin")
        learning_rate = self.scheduler_in_use.get_last_lr()[0]
        result = outputs.with_bad_inputs(self._take_step(window), window)
        self.state.num_input_tokens_seen += sum(count_inputs(batch) for batch in window)
        self.state.replayed_steps += result.replays > 0
        self.state.last_grad_norm, self._last = result.grad_norm, result
        if result.pinned:
            self.log(note_pins(self.run.path, self.model, result.pinned))
        self._losses.add(result.loss_tensor)
        self.state.batches_in_epoch += len(window)
        size = len(loader) if self._per_epoch is not None else max(1, self.state.batches_in_epoch)
        self.state.epoch = self.state.epoch_index + self.state.batches_in_epoch / size
        if result:
            self._event("on_optimizer_step", step_result=result)
            if not self._follows_metric:
                self.scheduler_in_use.step()
            self.state.global_step += 1
        else:
            self._skipped(result)
        self.optimizer_in_use.zero_grad()
        self._event("on_step_end" if result else "on_step_skipped", step_result=result, learning_rate=learning_rate)
        return result

    def _compute(self, window: list[Any]) -> None:
        """Forward and backward passes of the micro-batches of a window, then clipping; after an overflow it is called again."""
        self._window = len(window)
        for i, batch in enumerate(window):
            self.training_step(self.model, self._inputs(batch))
            if i + 1 < len(window):
                self._event("on_substep_end")
        if self.args.max_grad_norm > 0 and not self._clips_late:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self._event("on_pre_optimizer_step")

    def _take_step(self, window: list[Any]) -> StepResult:
        """Compute and step, and replay if need be. A step that ends the run is counted and logged before that."""
        compute = functools.partial(self._compute, window)
        late = step_options(self.args, self.optimizer_in_use, self.callbacks, self.state.global_step, self.state.max_steps)
        self._clips_late = late["max_norm"] is not None
        try:
            if self.args.on_overflow == "replay" or self.args.heal == "pin":
                again = self.args.on_overflow == "replay"
                result = self.accelerator.run_step(self.optimizer_in_use, compute, on_overflow=again, **late)
            else:
                compute()
                result = self.optimizer_in_use.step(**late)
        except (DivergedError, StepRefusedError) as error:
            self._skipped(error.result)
            raise
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise OutOfMemory from error
            raise
        if result.reason == "no-gradients":
            raise ConfigError(f"the step had nothing to do: {result.detail}", "Make the optimizer from the parameters of the trained model.")
        return result

    def _skipped(self, result: StepResult | None) -> None:
        """A record of its own for every refused step: what was not finite is in the log, not only on the terminal."""
        self.state.skipped_steps += 1
        if result is not None:
            self.log(record_of(result) | {"applied": self.state.global_step, "skipped": self.state.skipped_steps})

    def _inputs(self, batch: Any) -> dict[str, Any]:
        """A batch as named tensors on the device, its labels checked."""
        check_batch(self.model, batch, self.label_names)
        return dict(to_device(batch, self.accelerator.device))

    def _act(self) -> None:
        """Do what the control asks for: log, evaluate, save. The switches are cleared."""
        if self.control.should_log:
            self.control.should_log = False
            self._log_window()
        if self.control.should_evaluate:
            found = self.evaluate()
            if self._follows_metric and self.state.global_step:
                self.scheduler_in_use.scheduler.step(metric_of(self.args, found))
            self.control.should_evaluate = False  # only now: Ctrl-C during an evaluation leaves it due
        if self.control.should_save:
            self.control.should_save = False
            self._save()

    def _log_window(self) -> None:
        """A record of the steps since the last one; a loss among them that is not finite shows in the mean."""
        if not self._losses.count:
            return
        mean, self._losses = self._losses.mean(), Losses()
        rate, scale = self.scheduler_in_use.get_last_lr()[0], self.accelerator.scaler.get_scale()
        record = {"loss": mean, "grad_norm": self.state.last_grad_norm, "learning_rate": rate, "scale": scale}
        record |= outputs.watched(self._last) if self._last is not None else self.state.watched
        self.log(record | {"applied": self.state.global_step, "skipped": self.state.skipped_steps})

    def _save(self) -> Path:
        self.state.loss_sum, self.state.loss_count = float(self._losses.sum), self._losses.count
        self.state.evaluation_due = self.control.should_evaluate
        self.state.watched = outputs.watched(self._last) if self._last is not None else self.state.watched
        about = {"arguments": settings_to_keep(self.args, self._loader)}
        folder = self.accelerator.save_state(self.run.path / f"checkpoint-{self.state.global_step}", about)
        self._saved_at = self.state.global_step
        self.run.keep_newest(self.args.save_total_limit)
        self._event("on_save")
        return folder

    def log(self, logs: dict[str, Any]) -> None:
        """Add a record with step and epoch to the history and tell the callbacks; metrics.jsonl gets it during a run."""
        record = logs | {"epoch": round(self.state.epoch, 6), "step": self.state.global_step}
        self.state.log_history.append(record)
        self._event("on_log", logs=record)

    def _event(self, name: str, **kwargs: Any) -> None:
        if self.callbacks.listens(name):
            about = {
                "model": self.model,
                "optimizer": getattr(self, "optimizer_in_use", None),
                "lr_scheduler": getattr(self, "scheduler_in_use", None),
                "train_dataloader": self._loader,
                "resolution": self.accelerator.resolution,
                "device": self.accelerator.device,
            }
            self.control = self.callbacks.call(name, self.args, self.state, self.control, **about, **kwargs)
