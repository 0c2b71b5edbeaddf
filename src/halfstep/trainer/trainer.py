"""The third door: hand over the loop. Built on `Accelerator` and its public names only."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from halfstep.accelerator import Accelerator, to_device
from halfstep.checkpoint import capture, seed_everything
from halfstep.errors import ConfigError, DataError, DivergedError, StepRefusedError, refuse_unknown
from halfstep.step import StepResult
from halfstep.trainer import evaluation, outputs
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.build import lengths, make_optimizer, make_scheduler, step_options
from halfstep.trainer.callbacks import CallbackList, Pace, TrainerCallback
from halfstep.trainer.data import Collator, ColumnFilter, EpochStart, count_inputs, default_data_collator, from_batch, is_ours, make_loader
from halfstep.trainer.interrupt import Interrupt, StopNow, TrainingInterrupted
from halfstep.trainer.outputs import (
    EvalPrediction,
    LossFunction,
    PredictionOutput,
    TrainOutput,
    accepts,
    check_batch,
    explained,
    loss_of,
    predictions_of,
    record_of,
)
from halfstep.trainer.progress import ProgressCallback
from halfstep.trainer.resume import refuse_other_settings, settings_to_keep
from halfstep.trainer.rules import follow_rules, note_pins
from halfstep.trainer.run import MetricsWriter, RunFolder
from halfstep.trainer.state import Losses, TrainerControl, TrainerState


class Trainer:
    """Trains a model by the settings in `args`; the step it takes is the one the other doors take.

    model: any module whose output is a loss, a mapping or record with `loss`, or predictions for `compute_loss_func`.
    args: settings, precision among them. data_collator: list of samples to a mapping of tensors.
    train_dataset, eval_dataset: map-style or iterable datasets of mappings.
    compute_loss_func: f(outputs, labels) to a scalar, for models that return no loss.
    compute_metrics: f(EvalPrediction) to a dict of numbers.
    callbacks: instances or classes of `TrainerCallback`, transformers' events. optimizers: (optimizer, scheduler) to use instead.

    `state.log_history` has every logged record; a step that was refused is counted, said and never averaged away.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        **unknown: Any,
    ) -> None:
        refuse_unknown("Trainer", unknown, inspect.signature(Trainer.__init__).parameters)
        self.args = args if args is not None else TrainingArguments()
        seed_everything(self.args.seed)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.run = RunFolder(self.args.output_dir)
        self.label_names = tuple(self.args.label_names or ("labels",))
        collate: Collator = data_collator if data_collator is not None else default_data_collator
        self.data_collator: Collator = ColumnFilter(collate, model, self.label_names) if self.args.remove_unused_columns else collate
        self._takes_labels = accepts(model.forward, self.label_names)
        self._ignored = tuple(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or ())
        self.model = model
        self.accelerator = self._fresh_accelerator()
        self.state, self.control = TrainerState(), TrainerControl()
        self.callbacks = CallbackList([Pace(), MetricsWriter(self.run)])
        for callback in (*(() if self.args.disable_tqdm else (ProgressCallback(),)), *(callbacks or ())):
            self.add_callback(callback)
        self._interrupt = Interrupt()
        self._losses = Losses()  # of the steps since the last record
        self._loader: Any = None  # of the training data
        self._epoch_start, self._saved_at = EpochStart(), -1  # where the epoch began; the step of the last checkpoint
        self.settings = self.args.to_dict()  # what config.yaml gets
        self._window = 1  # micro-batches in the window at hand
        self._per_epoch: int | None = None  # steps in a pass over the data, None when it has no length
        self._wants_predictions = self._clips_late = False  # clipping is left to the optimizer's own pass
        self._last: StepResult | None = None
        self._event("on_init_end")

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback after those there are."""
        self.callbacks.add(callback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data. One of your own works; resuming then reads past the batches that were used."""
        if self.train_dataset is None:
            raise ConfigError("train() needs training data", "Pass train_dataset= to the Trainer.")
        a = self.args
        return self._load(self.train_dataset, a.per_device_train_batch_size, shuffle=True, seed=a.order_seed, drop_last=a.dataloader_drop_last)

    def get_eval_dataloader(self, dataset: Any = None) -> DataLoader[Any]:
        """The loader of evaluation data, in order."""
        data = dataset if dataset is not None else self.eval_dataset
        if data is None:
            raise ConfigError("evaluation needs data", "Pass eval_dataset= to the Trainer, or eval_strategy='no'.")
        return self._load(data, self.args.per_device_eval_batch_size, shuffle=False, seed=self.args.seed, drop_last=False)

    def _load(self, data: Any, batch_size: int, **order: Any) -> DataLoader[Any]:
        pin, workers = self.accelerator.device.type == "cuda", self.args.dataloader_num_workers
        return make_loader(data, self.data_collator, batch_size=batch_size, workers=workers, pin=pin, **order)

    def create_optimizer(self) -> Optimizer:
        """The optimizer: the one given, or that of `args.optim`."""
        return self.optimizer if self.optimizer is not None else make_optimizer(self.model, self.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer) -> Any:
        """The learning rate schedule: the one given, or that of `args.lr_scheduler_type`."""
        return self.lr_scheduler if self.lr_scheduler is not None else make_scheduler(optimizer, self.args, num_training_steps)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The loss of a batch, or (loss, outputs). Raises ConfigError when the model gives none and no function was given."""
        labels = {k: inputs[k] for k in self.label_names if k in inputs}
        alone = self.compute_loss_func is not None or not self._takes_labels
        given = {k: v for k, v in inputs.items() if k not in labels} if alone else inputs
        outputs = model(**given)
        if self.compute_loss_func is not None:
            target = next(iter(labels.values())) if len(labels) == 1 else labels or None
            loss = self.compute_loss_func(outputs, target)
        else:
            loss = loss_of(outputs)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch of a window; returns its loss."""
        if not all(part.training for part in model.modules()):
            model.train()
        with self.accelerator.autocast(), explained(inputs, self.label_names):
            loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss / self._window if self._window > 1 else loss)
        return torch.as_tensor(loss.detach())

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor | None, Any, Any]:
        """(loss, predictions, labels) of one evaluation batch; loss is None when the batch has no labels and the model gives none."""
        labels = [inputs[k] for k in self.label_names if k in inputs]
        with self.accelerator.autocast(), explained(inputs, self.label_names):
            if labels or self.compute_loss_func is not None:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            else:
                outputs = model(**inputs)
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        wanted = predictions_of(outputs, self._ignored) if self._wants_predictions else None
        return loss, wanted, (labels[0] if len(labels) == 1 else tuple(labels)) if labels and self._wants_predictions else None

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train to the end of the schedule. `resume_from_checkpoint`: True for the newest of this run, or a folder.

        Ctrl-C finishes the step, saves a checkpoint and raises TrainingInterrupted (a KeyboardInterrupt).
        Raises DivergedError after args.max_bad_steps refused steps in a row, CheckpointError, ConfigError, DataError.
        """
        wanted = resume_from_checkpoint or self.args.resume_from_checkpoint
        checkpoint = self.run.find(wanted) if wanted else None
        if checkpoint is None or not self.run.owns(checkpoint):
            self.run.check(self.args.overwrite_output_dir)
        self._loader = self._set_up()
        if checkpoint is None:
            self.run.begin(self.settings, self.args.overwrite_output_dir)
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
            if self.state.batches_in_epoch == 0:
                self._epoch_start.states = {} if is_ours(loader) else capture()
            batches = from_batch(loader, self.state.epoch_index, self.state.batches_in_epoch, self._epoch_start.states)
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
        late = step_options(self.args, self.optimizer_in_use, self.callbacks, self.state.global_step)
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
            self.evaluate()
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

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Loss and metrics over the evaluation data; logged. Neither the model's dtype nor its training mode is changed."""
        self._wants_predictions = self.compute_metrics is not None
        found = self._pass(self.get_eval_dataloader(eval_dataset)).metrics(metric_key_prefix, self.compute_metrics)
        self.log(found)
        self._event("on_evaluate", metrics=found)
        return found

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predictions and labels over `test_dataset` as numpy arrays, with loss and metrics; not logged."""
        self._wants_predictions = True
        result = self._pass(self.get_eval_dataloader(test_dataset))
        metrics = result.metrics(metric_key_prefix, self.compute_metrics)
        self._event("on_predict", metrics=metrics)
        return PredictionOutput(result.predictions, result.labels, metrics)

    def _pass(self, loader: Iterable[Any]) -> evaluation.Evaluation:
        return evaluation.run(self.model, (self._inputs(b) for b in loader), self.prediction_step, self._after_prediction)

    def _after_prediction(self) -> None:
        self._event("on_prediction_step")
        self._interrupt.stop_if_requested()

    def log(self, logs: dict[str, Any]) -> None:
        """Add a record with step and epoch to the history and tell the callbacks; metrics.jsonl gets it during a run."""
        record = logs | {"epoch": round(self.state.epoch, 6), "step": self.state.global_step}
        self.state.log_history.append(record)
        self._event("on_log", logs=record)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model alone, as `Accelerator.save_model` does: each weight in the dtype it was loaded in, from its master."""
        self.accelerator.save_model(self.model, output_dir if output_dir is not None else self.run.path)

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
