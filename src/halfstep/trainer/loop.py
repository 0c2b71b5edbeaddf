"""The training loop of `Trainer`: epochs, windows of micro-batches, steps, and what is done between them."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from halfstep.accelerator import Accelerator, EpochStart
from halfstep.checkpoint import read_manifest
from halfstep.errors import ConfigError, DataError, DivergedError, StepRefusedError
from halfstep.step import StepResult
from halfstep.trainer import outputs
from halfstep.trainer.arguments import spaced
from halfstep.trainer.averaging import average_of
from halfstep.trainer.best import compares, doubts_about_best, folder_of_best, judge_of
from halfstep.trainer.build import lengths, step_options
from halfstep.trainer.changes import Changes
from halfstep.trainer.data import from_batch
from halfstep.trainer.fitting import FixedBatch, OutOfMemory, is_out_of_memory
from halfstep.trainer.flow import give_back, states_of
from halfstep.trainer.interrupt import Interrupt, StopNow, TrainingInterrupted
from halfstep.trainer.outputs import TrainOutput, record_of
from halfstep.trainer.planned import follow_plan, followed, noted
from halfstep.trainer.processing import write_processing
from halfstep.trainer.ranks import accelerator_for, agree_on, batches_gone, dealt, mean_loss, share_losses, used_in, weight_of
from halfstep.trainer.releasing import release_gradients
from halfstep.trainer.reporting import Reporting
from halfstep.trainer.resume import refuse_other_settings, settings_to_keep
from halfstep.trainer.schedules import follows_metric
from halfstep.trainer.speed import Meter, speed_metrics
from halfstep.trainer.state import OF_THIS_CALL, Losses, TrainerControl, TrainerState


class TrainingLoop(Reporting):
    """What `train()` does. `Trainer` says how data, loss and optimizer are made, and a subclass of it may say otherwise."""

    label_names: tuple[str, ...]
    settings: dict[str, Any]  # what config.yaml gets
    _changes: Changes  # what is done to the model while it is used
    _batch: FixedBatch  # how many samples a micro-batch has
    optimizer: Any
    lr_scheduler: Any
    is_in_train = False  # inside train()
    is_prepared = False  # train() was called before

    def __init__(self) -> None:
        super().__init__()
        self._interrupt = Interrupt()
        self._losses = Losses()  # of the steps since the last record
        self._meter = Meter()
        self._epoch_start, self._saved_at = EpochStart(), -1  # where the epoch began; the step of the last checkpoint
        self._window = 1  # micro-batches in the window at hand
        self._per_epoch: int | None = None  # steps in a pass over the data, None when it has no length
        self._weight = 1.0  # of the loss of the micro-batch at hand among those of other ranks
        self._clips_late = False  # clipping is left to the optimizer's own pass
        self._follows_metric = False  # the schedule moves with evaluations and not with steps
        self._last: StepResult | None = None
        self._compares = False  # evaluations are compared, and the best one noted
        self._failed_evaluations: list[int] = []  # the steps of those without the metric that decides
        self._ignored_in_evaluation: list[str] | None = None

    @abstractmethod
    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data."""

    @abstractmethod
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The loader of evaluation data."""

    @abstractmethod
    def _check_evaluation_data(self) -> None:
        """Refuse missing evaluation data."""

    @abstractmethod
    def _inputs(self, batch: Any) -> dict[str, Any]:
        """A batch of a loader as the inputs of the model."""

    @abstractmethod
    def _renew(self) -> None:
        """At the start of each `train()`: a new model where there is one for each call."""

    @abstractmethod
    def _forget(self) -> None:
        """Before a run is set up: forget what belongs to an earlier one."""

    @abstractmethod
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler`."""

    @abstractmethod
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch."""

    @abstractmethod
    def evaluate(self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Loss and metrics over the evaluation data."""

    @abstractmethod
    def _prepare_run(self) -> None:
        """What the parts that a subclass may override need to know of each other, decided once."""

    @abstractmethod
    def _items_in(self, window: list[Any]) -> dict[str, Any]:
        """What `training_step` is told of a window besides a batch of it."""

    def train(
        self, resume_from_checkpoint: bool | str | Path | None = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train to the end of the schedule. `resume_from_checkpoint`: True for the newest of this run, or a folder.

        ignore_keys_for_eval: outputs of the model that are no predictions, for evaluations during the run. trial: None (no hyper-parameter search).

        Ctrl-C finishes the step, saves a checkpoint and raises TrainingInterrupted (a KeyboardInterrupt).
        Raises DivergedError after args.max_bad_steps refused steps in a row, CheckpointError, ConfigError, DataError.
        """
        if trial is not None:
            raise ConfigError("train(trial=...) is for a search of hyper-parameters, which halfstep does not have", "Make a Trainer for each trial.")
        self._ignored_in_evaluation = ignore_keys_for_eval
        wanted = resume_from_checkpoint or self.args.resume_from_checkpoint
        checkpoint = self.run.find(wanted) if wanted else None
        if checkpoint is None or not self.run.owns(checkpoint):
            self.run.check(self.args.overwrite_output_dir)
        self._renew()
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
                    self.is_in_train = False
                    self.run.leave()

    def _enter(self, checkpoint: Path | None) -> None:
        """Begin a run in its folder, or go on from a checkpoint."""
        ranks = self.accelerator.ranks
        if checkpoint is None:
            self.run.begin(noted(self.settings, self.run.path), self.args.overwrite_output_dir or self._batch.tried > 0)
            for told in followed(self.args, self.run.path, self.model, ranks.is_main):
                self.log(told)
        else:
            refuse_other_settings(checkpoint, settings_to_keep(self.args, self._loader))
            own = {name: getattr(self.state, name) for name in OF_THIS_CALL}
            self.accelerator.load_state(checkpoint)
            for name, value in own.items():
                setattr(self.state, name, value)
            self.state.is_world_process_zero, self.state.is_local_process_zero = ranks.is_main, ranks.is_local_main
            self.state.batches_in_epoch = batches_gone(ranks, read_manifest(checkpoint).about.get("ranks"), self.state.batches_in_epoch)
            self._losses = Losses(self.state.loss_sum, self.state.loss_count)
            self.control.should_evaluate = self.state.evaluation_due
            give_back(self.callbacks.callbacks, self.state.stateful_callbacks)
            self.run.go_on(noted(self.settings, self.run.path), checkpoint, self.state.log_history)
            follow_plan(self.args, self.run.path, ranks.is_main)

    def _train(self) -> TrainOutput:
        """From where the state stands to the end, or to Ctrl-C."""
        begun, losses = self.state.global_step, Losses()
        self._tokens_at_start, self._meter, self._failed_evaluations = self.state.num_input_tokens_seen, Meter(), []
        self.is_in_train = True
        try:
            self._event("on_train_begin")
            with self._interrupt:
                if self.args.eval_on_start and self.state.attempted == 0:
                    self.control.should_evaluate = True
                self._act()
                for result in self._steps(self._loader):
                    losses.add(result.loss_tensor)
            if self.args.save_strategy in ("steps", "epoch") and self.state.global_step not in (begun, self._saved_at):
                self._write_checkpoint()
            mean = share_losses(self.accelerator.ranks, losses).mean()
            metrics = self._meter.metrics(self.state.global_step - begun) | {"train_loss": mean}
            if losses.count:  # a finished run that is resumed takes no step, and has nothing to say of any
                self.log(dict(metrics))
            if self.args.load_best_model_at_end:
                self._load_best()
            self._average.finish()
        except StopNow:
            folder = self._write_checkpoint() if self.args.save_strategy != "no" and self.state.attempted else None
            raise TrainingInterrupted(self.state.global_step, folder) from None
        finally:
            self._event("on_train_end")
        return TrainOutput(self.state.global_step, mean, metrics | {"epoch": self.state.epoch})

    def _set_up(self) -> DataLoader[Any]:
        """Loader, optimizer, schedule and lengths, all before anything is trained."""
        self._forget()
        ranks = self.accelerator.ranks
        loader = dealt(self.get_train_dataloader(), ranks)
        length = lengths(self.args, loader)
        self._per_epoch = length.per_epoch
        if self.args.eval_strategy != "no" or self.args.eval_on_start:
            self._check_evaluation_data()
        a = self.args
        self.state = TrainerState(is_world_process_zero=ranks.is_main, is_local_process_zero=ranks.is_local_main)
        self.control, self._losses = TrainerControl(), Losses()
        self.state.max_steps, self.state.num_train_epochs = length.steps, length.epochs
        self.state.logging_steps, self.state.eval_steps, self.state.save_steps = (
            spaced(every, length.steps) for every in (a.logging_steps, a.steps_between_evaluations, a.save_steps)
        )
        self.state.train_batch_size = a.per_device_train_batch_size
        self._compares, self._last, self._saved_at = compares(a), None, -1
        self.accelerator = self._fresh_accelerator()
        self._prepare_run()
        self.create_optimizer_and_scheduler(num_training_steps=self.state.max_steps)
        self.optimizer, self.lr_scheduler = self.accelerator.prepare(self.optimizer, self.lr_scheduler)
        release_gradients(self.accelerator, self.model, self.optimizer, a)
        self.lr_scheduler.times = 1  # the schedule counts the steps of all ranks together
        self.optimizer_in_use, self.scheduler_in_use = self.optimizer, self.lr_scheduler
        self._follows_metric = follows_metric(self.scheduler_in_use)
        self.accelerator.register_for_checkpointing(self.state, self._epoch_start)
        self._average = average_of(self.model, a)
        self._average.follow(self.accelerator, self.optimizer_in_use)
        return loader

    def _fresh_accelerator(self, trains: bool = True) -> Accelerator:
        """An accelerator that knows the model and nothing of an earlier call of train(). trains: False for what comes before train()."""
        fresh = accelerator_for(self.args)
        fresh.prepare_model(self.model, evaluation_mode=not trains and fresh.policy.autocast == "fp32")
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
        learning_rate = self.state.last_learning_rate = self.scheduler_in_use.get_last_lr()[0]
        result = outputs.with_bad_inputs(self._take_step(window), window)
        samples, inputs, tokens = used_in(window, self.args.include_num_input_tokens_seen == "non_padding", self.accelerator.ranks, self._interrupt)
        self.state.num_input_tokens_seen += inputs
        self._meter.add(samples, inputs if tokens else None)
        self.state.replayed_steps += result.replays > 0
        self.state.last_grad_norm, self._last = result.grad_norm, result
        self._tell(result)
        self._losses.add(result.loss_tensor)
        self.state.batches_in_epoch += len(window)
        size = len(loader) if self._per_epoch is not None else max(1, self.state.batches_in_epoch)
        self.state.epoch = self.state.epoch_index + self.state.batches_in_epoch / size
        if result:
            self._event("on_optimizer_step", step_result=result, inputs=window[0])
            if not self._follows_metric:
                self.scheduler_in_use.step()
            self.state.global_step += 1
        else:
            self._skipped(result)
        self.optimizer_in_use.zero_grad()
        self._event("on_step_end" if result else "on_step_skipped", step_result=result, learning_rate=learning_rate)
        return result

    def _compute(self, window: list[Any], items: dict[str, Any]) -> None:
        """Forward and backward passes of the micro-batches of a window, then clipping; after an overflow it is called again."""
        self._window = len(window)
        for i, batch in enumerate(window):
            self._weight = weight_of(self._loader, self.state.batches_in_epoch + i)
            last = i + 1 == len(window)
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                self.training_step(self.model, self._inputs(batch), **items)
            if not last:
                self._event("on_substep_end")
        if self.args.max_grad_norm > 0 and not self._clips_late:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self._event("on_pre_optimizer_step")

    def _take_step(self, window: list[Any]) -> StepResult:
        """Compute and step, and replay if need be. A step that ends the run is counted and logged before that."""
        compute = functools.partial(self._compute, window, self._items_in(window))
        late = step_options(self.args, self.optimizer_in_use, self.callbacks, self.state.global_step, self.state.max_steps)
        self._clips_late = late["max_norm"] is not None or self.args.gradient_release != "no"
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
            self.log(mean_loss(self.accelerator.ranks, record_of(result)) | {"applied": self.state.global_step, "skipped": self.state.skipped_steps})

    def _act(self) -> None:
        """Do what the control asks for: log, evaluate, save. The switches are cleared."""
        agree_on(self.accelerator.ranks, self.control)
        if self.control.should_log:
            self.control.should_log = False
            self._log_window()
        if self.control.should_evaluate:
            more: dict[str, Any] = {} if self._ignored_in_evaluation is None else {"ignore_keys": self._ignored_in_evaluation}
            metrics = self.evaluate(**more)
            self.control.should_evaluate = False  # only now: Ctrl-C during an evaluation leaves it due
            if (self._compares or self._follows_metric) and self.state.attempted:
                self._judge_by(metrics)
            agree_on(self.accelerator.ranks, self.control)
        if self.control.should_save:
            self.control.should_save = False
            self._write_checkpoint()

    def _judge_by(self, metrics: dict[str, Any]) -> None:
        """Let a schedule follow an evaluation, and note whether it was the best so far; where checkpoints depend on it, the best one is saved."""
        judge = judge_of(self.args)
        value = judge.value(metrics)
        if value is None:
            self._failed_evaluations.append(self.state.global_step)
            return
        if self._follows_metric:
            self.scheduler_in_use.scheduler.step(value)
        if self._compares and judge.is_better(value, self.state.best_metric):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            self.control.should_save = self.control.should_save or self.args.save_strategy == "best" or self.args.load_best_model_at_end

    def _load_best(self) -> None:
        """Give the model the weights of the best evaluation. A warning says so where there is none, or where some could not be compared."""
        folder = folder_of_best(self.run.path, self.state)
        if folder is not None:
            self.accelerator.load_model_state(folder, self.model)
            self._average.go_back(folder)
            if self.args.save_total_limit == 1 and self.run.owns(folder):
                self.run.keep_only(folder)
        if said := doubts_about_best(folder is not None, self.args, self.state, self._failed_evaluations):
            warnings.warn(f"load_best_model_at_end: {said}", stacklevel=3)

    def _log_window(self) -> None:
        """A record of the steps since the last one; a loss among them that is not finite shows in the mean."""
        if not self._losses.count:
            return
        s, scale, mean = self.state, self.accelerator.scaler.get_scale(), share_losses(self.accelerator.ranks, self._losses).mean()
        record, self._losses = {"loss": mean, "grad_norm": s.last_grad_norm, "learning_rate": s.last_learning_rate, "scale": scale}, Losses()
        record |= {"reduced_bytes": self.accelerator.reduced_bytes} if self.accelerator.num_processes > 1 else {}
        record |= outputs.watched(self._last) if self._last is not None else self.state.watched
        if self.counts_tokens:
            record |= speed_metrics("train", time.perf_counter() - self._meter.began, tokens=self.state.num_input_tokens_seen - self._tokens_at_start)
        counts = {"applied": self.state.global_step, "skipped": self.state.skipped_steps, "replayed": self.state.replayed_steps}
        self.log(record | counts)

    def _write_checkpoint(self) -> Path:
        self._losses = share_losses(self.accelerator.ranks, self._losses)
        self.state.loss_sum, self.state.loss_count = float(self._losses.sum), self._losses.count
        self.state.evaluation_due = self.control.should_evaluate
        self.state.watched = outputs.watched(self._last) if self._last is not None else self.state.watched
        about = {"arguments": settings_to_keep(self.args, self._loader), "ranks": self.accelerator.num_processes}
        target = self.run.path / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step is not None:
            best = target if self.state.best_global_step == self.state.global_step else folder_of_best(self.run.path, self.state)
            self.state.best_model_checkpoint = str(best) if best is not None else None
        self.state.stateful_callbacks = states_of(self.callbacks.callbacks)
        folder = self.accelerator.save_state(target, about)
        if self.accelerator.is_main_process:
            write_processing(self.processing_class, folder)
        self._saved_at = self.state.global_step
        self.run.keep_newest(self.args.save_total_limit, folder_of_best(self.run.path, self.state))
        self._event("on_save")
        return folder
