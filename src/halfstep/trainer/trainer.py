"""The third door: hand over the loop. Built on `Accelerator` and its public names only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.amp import upcast
from halfstep.amp.mode import Unread
from halfstep.checkpoint import seed_everything
from halfstep.errors import ConfigError, refuse_unknown
from halfstep.hardware import default_device
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.callbacks import CallbackList
from halfstep.trainer.changes import Changes
from halfstep.trainer.collators import DecoderInputs, collator_for
from halfstep.trainer.columns import label_names_of, taken_columns
from halfstep.trainer.data import Collator, ColumnFilter
from halfstep.trainer.evaluating import Evaluating
from halfstep.trainer.evaluation import batchwise
from halfstep.trainer.feeding import Feeding
from halfstep.trainer.fitting import FittingBatch, FixedBatch
from halfstep.trainer.flow import DefaultFlowCallback
from halfstep.trainer.fused import use_chunked_loss, use_fused_kernels
from halfstep.trainer.given import called, check_callbacks, check_data, check_evaluation, check_function, check_optimizers
from halfstep.trainer.hooks import warn_unheard
from halfstep.trainer.items import count_items, model_takes_items, noting, shifts_labels, takes_items, was_used
from halfstep.trainer.loggers import TrackerCallback, trackers_of
from halfstep.trainer.looking import refuse_missing_packages
from halfstep.trainer.optimizers import make_optimizer, parameter_groups
from halfstep.trainer.outputs import LossFunction, accepts, explained, loss_of
from halfstep.trainer.processing import chosen_processing, write_processing
from halfstep.trainer.progress import ProgressCallback
from halfstep.trainer.ranks import folder_of
from halfstep.trainer.recording import RecordsWriter
from halfstep.trainer.run import MetricsWriter
from halfstep.trainer.schedules import make_scheduler
from halfstep.trainer.smoothing import smoother_for


class Trainer(Feeding, Evaluating):
    """Trains a model by the settings in `args`; the step it takes is the one the other doors take.

    model: any module whose output is a loss, a mapping or record with `loss`, or predictions for `compute_loss_func`.
    args: settings, precision among them. data_collator: list of samples to a mapping of tensors.
    train_dataset: map-style or iterable dataset of mappings; eval_dataset: one, or a dict of names and datasets.
    processing_class: the tokenizer or processor of the data: pads batches, and is saved beside the model. `tokenizer` is its old name.
    model_init: makes the model, anew for each call of `train()`; instead of `model`.
    compute_loss_func: f(outputs, labels) or f(outputs, labels, num_items_in_batch) to a scalar, for models that return no loss.
    compute_metrics: f(EvalPrediction) to a dict of numbers. preprocess_logits_for_metrics: f(predictions, labels) to what is kept of them.
    callbacks: instances or classes of `TrainerCallback`, transformers' events. optimizers: (optimizer, scheduler) to use instead.
    optimizer_cls_and_kwargs: the class of the optimizer and its arguments, instead of `args.optim`.

    A subclass may override what one of transformers' Trainer may: `compute_loss`, `training_step`, `prediction_step`, `evaluation_loop`, `evaluate`,
    `log`, `create_optimizer`, `create_scheduler`, `create_optimizer_and_scheduler`, `get_train_dataloader` and its siblings, `save_model`.
    loss_is_scaled_for_ga: of a `compute_loss` of one's own: whether its loss is divided by all items of the window (True) or a mean over its batch
    (False). None, the default: it is if `num_items_in_batch` was used in making it.

    `state.log_history` has every logged record; a step that was refused is counted, said and never averaged away.
    """

    loss_is_scaled_for_ga: bool | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("Trainer", unknown, inspect.signature(Trainer.__init__).parameters)
        super().__init__()
        if args is not None and not isinstance(args, TrainingArguments):
            raise ConfigError(f"args is a {type(args).__name__}", "Give the Trainer a TrainingArguments; TrainingArguments(**settings) makes one.")
        self.args = args if args is not None else TrainingArguments()
        refuse_missing_packages(self.args)
        seed_everything(self.args.seed)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = chosen_processing(processing_class, tokenizer)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        warn_unheard(self)
        self.optimizer, self.lr_scheduler = self._given = check_optimizers(optimizers, optimizer_cls_and_kwargs)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.model_init = model_init
        self._collate: Collator = data_collator if data_collator is not None else collator_for(self.processing_class)
        self._refuse(model)
        self._use_model(model if model is not None else self.call_model_init())
        self.accelerator = self._fresh_accelerator(trains=False)
        main, self.run = self.accelerator.is_main_process, folder_of(self.args, self.accelerator.ranks)
        self.state.is_world_process_zero, self.state.is_local_process_zero = main, self.accelerator.is_local_main_process
        trackers = [TrackerCallback(one) for one in trackers_of(self.args)] if main else []
        self.callbacks = CallbackList([DefaultFlowCallback(), MetricsWriter(self.run), RecordsWriter(self.run, trackers, self._loss_of)])
        for callback in (*trackers, *(() if self.args.disable_tqdm or not main else (ProgressCallback(),)), *check_callbacks(callbacks)):
            self.add_callback(callback)
        self.settings = self.args.to_dict()
        self._prepare_run()
        self._event("on_init_end")

    def _loss_of(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a batch that is looked at and not trained on, under whatever precision the model is bound to meanwhile."""
        return torch.as_tensor(self.compute_loss(model, inputs))

    def _refuse(self, model: nn.Module | None) -> None:
        """Raise ConfigError for arguments that contradict each other or the settings."""
        if (model is None) == (self.model_init is None):
            what = "neither model nor model_init" if model is None else "both model and model_init"
            raise ConfigError(f"the Trainer was given {what}", "Give it one of them.")
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"model is {called(model)}", "Give the Trainer a module, or a function that makes one as model_init.")
        for name in ("model_init", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            check_function(name, getattr(self, name))
        check_function("data_collator", self._collate)
        if self.train_dataset is not None:
            check_data("train_dataset", self.train_dataset)
        check_evaluation(self.eval_dataset)
        if self.model_init is not None and self._given != (None, None):
            raise ConfigError("optimizers= belongs to one model, and model_init makes a new one", "Use optimizer_cls_and_kwargs or args.optim.")
        if self.optimizer_cls_and_kwargs is not None and self._given[0] is not None:
            raise ConfigError("optimizers= and optimizer_cls_and_kwargs= both say which optimizer to use", "Give one of them.")
        if self.args.auto_find_batch_size and self._given[0] is not None:
            raise ConfigError(
                "auto_find_batch_size=True begins a run again, and the optimizer that was given cannot",
                "Name it in args.optim, or override create_optimizer.",
            )
        if self.args.label_smoothing_factor > 0 and self.compute_loss_func is not None:
            raise ConfigError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} has no effect with a compute_loss_func of your own",
                "Smooth the labels in it (torch.nn.functional.cross_entropy has label_smoothing=), or leave one of them out.",
            )
        if self.args.batch_eval_metrics:
            batchwise(self.compute_metrics)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`."""
        if self.model_init is None:
            raise ConfigError("there is no model_init", "Pass model_init=.")
        taken = list(inspect.signature(self.model_init).parameters)
        if len(taken) > 1:
            raise ConfigError(f"model_init takes {', '.join(taken)}", "Let it take nothing, or the trial alone (functools.partial sets the rest).")
        made = self.model_init(trial) if taken else self.model_init()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model_init returned a {type(made).__name__}", "Let it return a module.")
        return made

    def _use_model(self, model: nn.Module) -> None:
        """Take over a model: what its forward takes decides about columns, labels and losses; and what the arguments do to it."""
        a, self.model = self.args, model
        self.label_names = tuple(self.args.label_names or label_names_of(model))
        self._taken = taken_columns(model, self.label_names) if self.args.remove_unused_columns else None
        self.data_collator: Collator = ColumnFilter(self._collate, self._taken)
        self._takes_labels = accepts(model.forward, self.label_names)
        self._ignored = tuple(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or ())
        self.model_accepts_loss_kwargs = model_takes_items(model)
        self._shifts_labels = shifts_labels(model)
        self._batch = FittingBatch(a.per_device_train_batch_size) if a.auto_find_batch_size else FixedBatch(a.per_device_train_batch_size)
        if a.use_liger_kernel:
            use_fused_kernels(model, default_device(a.use_cpu))
        other = "label_smoothing_factor" if a.label_smoothing_factor > 0 else "compute_loss_func" if self.compute_loss_func is not None else ""
        use_chunked_loss(model, a.chunked_loss, other)
        if a.label_smoothing_factor > 0:
            self.compute_loss_func = smoother_for(model, a.label_smoothing_factor, self.label_names)
            self.data_collator = DecoderInputs(self.data_collator, model)
        self._changes = Changes(model, a)

    def _prepare_run(self) -> None:
        """Which parts are told num_items_in_batch: those of a subclass that take it, and the loss where a window has several micro-batches."""
        own_step, own_loss = type(self).training_step is not Trainer.training_step, type(self).compute_loss is not Trainer.compute_loss
        function = self.compute_loss_func
        self._func_takes_items = function is not None and takes_items(function)
        self._loss_takes_items = takes_items(self.compute_loss)
        self._step_takes_items = takes_items(self.training_step)
        self._loss_needs_items = self._loss_takes_items and (own_loss or self._func_takes_items)
        several = self.args.gradient_accumulation_steps > 1 and (self.model_accepts_loss_kwargs or function is not None or own_loss)
        self._counts_items = self._step_takes_items and (own_step or self._loss_needs_items or several)

    def _renew(self) -> None:
        """At the start of each `train()`: a new model from model_init, unless the one from the constructor is still new."""
        if self.model_init is not None and self.is_prepared:
            self._use_model(self.call_model_init())
        self.is_prepared = True

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler` by the two methods below; those of a subclass may return them or set them."""
        self.optimizer = self.create_optimizer() or self.optimizer
        self.lr_scheduler = self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer) or self.lr_scheduler

    def _forget(self) -> None:
        """Before a run is set up: no optimizer of an earlier one."""
        if self.optimizer is self.optimizer_in_use:
            self.optimizer = self._given[0]
        if self.lr_scheduler is self.scheduler_in_use:
            self.lr_scheduler = self._given[1]

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The optimizer: the one given, one of the class given, or that of `args.optim`."""
        trained = model if model is not None else self.model
        if self.optimizer is None and self.optimizer_cls_and_kwargs is not None:
            kind, settings = self.optimizer_cls_and_kwargs
            self.optimizer = kind(parameter_groups(trained, self.args.weight_decay), **settings)
        elif self.optimizer is None:
            self.optimizer = make_optimizer(trained, self.args)
        made: Optimizer = self.optimizer
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """The learning rate schedule: the one given, or that of `args.lr_scheduler_type`."""
        if self.lr_scheduler is None:
            self.lr_scheduler = make_scheduler(optimizer if optimizer is not None else self.optimizer, self.args, num_training_steps)
        return self.lr_scheduler

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The block in which losses are computed: 16 bits, as the precision says."""
        return self.accelerator.autocast()

    autocast_smart_context_manager = compute_loss_context_manager

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The loss of a batch, or (loss, outputs). Raises ConfigError when the model gives none and no function was given.

        num_items_in_batch: the label items of the whole window, for losses that are a sum over items divided by it.
        """
        labels = {k: inputs[k] for k in self.label_names if k in inputs}
        alone = self.compute_loss_func is not None or not self._takes_labels
        given = {k: v for k, v in inputs.items() if k not in labels} if alone else dict(inputs)
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            given["num_items_in_batch"] = num_items_in_batch
        if self.compute_loss_func is not None or return_outputs:
            outputs = model(**given)
        else:
            with Unread():
                outputs = model(**given)
        if self.compute_loss_func is not None:
            target = next(iter(labels.values())) if len(labels) == 1 else labels or None
            more = {"num_items_in_batch": num_items_in_batch} if self._func_takes_items else {}
            loss = self.compute_loss_func(outputs, target, **more)
        else:
            loss = upcast(loss_of(outputs, inputs))
        return (loss, outputs) if return_outputs else loss

    def _items_in(self, window: list[Any]) -> dict[str, Any]:
        """num_items_in_batch of a window for `training_step`, where something is made of it."""
        if not self._counts_items:
            return {}
        items = count_items(window, self.label_names, self._shifts_labels)
        if items is not None and self.accelerator.num_processes > 1:  # gradients are a mean over ranks: each divides by its share of the items of all
            items = self.accelerator.ranks.reduce(items, "sum") / self.accelerator.num_processes
        return {} if items is None else {"num_items_in_batch": items.to(self.accelerator.device, non_blocking=True)}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch of a window; returns its loss.

        A loss in which num_items_in_batch was used is a share of the window's; any other is a mean, and divided by the micro-batches of the window.
        """
        if not _trains(model):
            model.train()
        inputs = inputs if self._as_prepared(inputs) else self._prepare_inputs(inputs)
        items = noting(num_items_in_batch)
        more: dict[str, Any] = {"num_items_in_batch": items} if items is not None and self._loss_takes_items else {}
        with self.compute_loss_context_manager(), explained(inputs, self.label_names, model):
            loss = self.compute_loss(model, inputs, **more)
        scaled = self.loss_is_scaled_for_ga if self.loss_is_scaled_for_ga is not None else was_used(items)
        part = loss / self._window if self._window > 1 and not scaled else loss
        self.accelerator.backward(part * self._weight if self._weight != 1.0 and not scaled else part)
        told: Tensor = loss.detach()
        return told

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Micro-batches in the window at hand."""
        return self._window

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the model as `Accelerator.save_model` does, each weight in the dtype it was loaded in, from its master; and the processing class.

        With ema_decay the average of the weights is written, unless ema_in_evaluation=False.
        """
        folder = Path(output_dir) if output_dir is not None else self.run.path
        self.accelerator.save_model(self.model, folder, average=self._average.to_save)
        if self.accelerator.is_main_process:
            write_processing(self.processing_class, folder)


def _trains(model: nn.Module) -> bool:
    """Whether every part is in training mode. Asked before every backward pass: without the names that `modules()` makes on its way."""
    parts: list[nn.Module | None] = [model]
    while parts:
        part = parts.pop()
        if part is not None:
            if not part.training:
                return False
            parts.extend(part._modules.values())
    return True
