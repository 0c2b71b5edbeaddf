"""The third door: hand over the loop. Built on `Accelerator` and its public names only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from halfstep.checkpoint import seed_everything
from halfstep.errors import ConfigError, refuse_unknown
from halfstep.hardware import default_device
from halfstep.trainer import evaluation
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.callbacks import CallbackList, Pace, TrainerCallback
from halfstep.trainer.changes import Changes
from halfstep.trainer.collators import DecoderInputs
from halfstep.trainer.columns import label_names_of, lengths_of, taken_columns, without_unused
from halfstep.trainer.data import Collator, ColumnFilter, default_data_collator, make_loader
from halfstep.trainer.fitting import FittingBatch, FixedBatch
from halfstep.trainer.fused import use_fused_kernels
from halfstep.trainer.loop import TrainingLoop
from halfstep.trainer.optimizers import make_optimizer
from halfstep.trainer.outputs import EvalPrediction, LossFunction, PredictionOutput, accepts, explained, loss_of, predictions_of
from halfstep.trainer.progress import ProgressCallback
from halfstep.trainer.run import MetricsWriter, RunFolder
from halfstep.trainer.schedules import make_scheduler
from halfstep.trainer.smoothing import smoother_for


class Trainer(TrainingLoop):
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
        super().__init__()
        self.args = args if args is not None else TrainingArguments()
        seed_everything(self.args.seed)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.run = RunFolder(self.args.output_dir)
        self.label_names = tuple(self.args.label_names or label_names_of(model))
        self._taken = taken_columns(model, self.label_names) if self.args.remove_unused_columns else None
        collate: Collator = data_collator if data_collator is not None else default_data_collator
        self.data_collator: Collator = ColumnFilter(collate, self._taken)
        self._takes_labels = accepts(model.forward, self.label_names)
        self._ignored = tuple(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or ())
        self.model = model
        self._change(model)
        self.accelerator = self._fresh_accelerator()
        self.callbacks = CallbackList([Pace(), MetricsWriter(self.run)])
        for callback in (*(() if self.args.disable_tqdm else (ProgressCallback(),)), *(callbacks or ())):
            self.add_callback(callback)
        self.settings = self.args.to_dict()
        self._wants_predictions = False
        self._event("on_init_end")

    def _change(self, model: nn.Module) -> None:
        """Set up what the arguments do to the model, its batches and its loss."""
        a = self.args
        self._batch = FittingBatch(a.per_device_train_batch_size) if a.auto_find_batch_size else FixedBatch(a.per_device_train_batch_size)
        if a.auto_find_batch_size and self.optimizer is not None:
            raise ConfigError(
                "auto_find_batch_size=True begins a run again, and the optimizer that was given cannot",
                "Name it in args.optim, or override create_optimizer.",
            )
        if a.use_liger_kernel:
            use_fused_kernels(model, default_device(a.use_cpu))
        if a.label_smoothing_factor > 0:
            if self.compute_loss_func is not None:
                raise ConfigError(
                    f"label_smoothing_factor={a.label_smoothing_factor} has no effect with a compute_loss_func of your own",
                    "Smooth the labels in it (torch.nn.functional.cross_entropy has label_smoothing=), or leave one of them out.",
                )
            self.compute_loss_func = smoother_for(model, a.label_smoothing_factor, self.label_names)
            self.data_collator = DecoderInputs(self.data_collator, model)
        self._changes = Changes(model, a)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback after those there are."""
        self.callbacks.add(callback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data. One of your own works; resuming then reads past the batches that were used."""
        if self.train_dataset is None:
            raise ConfigError("train() needs training data", "Pass train_dataset= to the Trainer.")
        a = self.args
        size, lengths = self._batch.size, lengths_of(self.train_dataset, a.length_column_name) if a.group_by_length else None
        order: dict[str, Any] = {"shuffle": a.train_sampling_strategy != "sequential", "seed": a.order_seed, "drop_last": a.dataloader_drop_last}
        return self._load(self.train_dataset, size, **order, lengths=lengths, grouped=size * a.gradient_accumulation_steps)

    def get_eval_dataloader(self, dataset: Any = None) -> DataLoader[Any]:
        """The loader of evaluation data, in order."""
        data = dataset if dataset is not None else self.eval_dataset
        if data is None:
            raise ConfigError("evaluation needs data", "Pass eval_dataset= to the Trainer, or eval_strategy='no'.")
        return self._load(data, self.args.per_device_eval_batch_size, shuffle=False, seed=self.args.seed, drop_last=False)

    def _load(self, data: Any, batch_size: int, **order: Any) -> DataLoader[Any]:
        a = self.args
        workers: dict[str, Any] = {
            "workers": a.dataloader_num_workers,
            "prefetch": a.dataloader_prefetch_factor,
            "persistent": a.dataloader_persistent_workers,
        }
        workers |= {"pin": a.dataloader_pin_memory and self.accelerator.device.type == "cuda", "started": a.dataloader_multiprocessing_context}
        return make_loader(without_unused(data, self._taken), self.data_collator, batch_size=batch_size, **workers, **order)

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
        with self._changes.in_use():
            return evaluation.run(self.model, (self._inputs(b) for b in loader), self.prediction_step, self._after_prediction)

    def _after_prediction(self) -> None:
        self._event("on_prediction_step")
        self._interrupt.stop_if_requested()

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model alone, as `Accelerator.save_model` does: each weight in the dtype it was loaded in, from its master."""
        self.accelerator.save_model(self.model, output_dir if output_dir is not None else self.run.path)
