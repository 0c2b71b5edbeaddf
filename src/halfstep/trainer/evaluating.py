"""Evaluation and prediction: passes over data that leave the model, its mode and the random states as they are."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import autocast
from halfstep.errors import ConfigError, DataError
from halfstep.trainer import evaluation
from halfstep.trainer.best import FAILED
from halfstep.trainer.evaluation import Column, EvalLoopOutput, MeanLoss, Metric
from halfstep.trainer.items import count_items
from halfstep.trainer.loop import TrainingLoop
from halfstep.trainer.outputs import EvalPrediction, PredictionOutput, explained, predictions_of
from halfstep.trainer.ranks import dealt
from halfstep.trainer.speed import speed_metrics


class Evaluating(TrainingLoop):
    """What `evaluate` and `predict` do, with transformers' signatures: a subclass may override each part."""

    eval_dataset: Any
    compute_metrics: Callable[..., Any] | None
    compute_loss_func: Callable[..., Any] | None
    _ignored: tuple[str, ...]  # outputs that are no predictions
    _shifts_labels: bool
    _loss_needs_items: bool
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None

    @abstractmethod
    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The loss of a batch, or (loss, outputs)."""

    @abstractmethod
    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The block in which losses are computed."""

    @abstractmethod
    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """A batch on the device."""

    @abstractmethod
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of data to predict on."""

    def evaluate(self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Loss and metrics over the evaluation data; logged. Neither the model's dtype nor its training mode is changed.

        With ema_decay the average of the weights is evaluated, unless ema_in_evaluation=False; the record says which (eval_weights).

        eval_dataset: a dataset, the name of one of those given to the constructor, or a dict of names and datasets: each is evaluated, its numbers
        under PREFIX_NAME. ignore_keys: outputs of the model that are no predictions.
        Inside `train()` a `compute_metrics` that raises does not end the run: PREFIX_metrics_error has its text.
        Raises DataError for data that yields nothing, ConfigError without data.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            found: dict[str, Any] = {}
            for name, one in data.items():
                one = name if eval_dataset is None else one
                found |= self.evaluate(one, ignore_keys=ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return found
        loader, began = self.get_eval_dataloader(data), time.perf_counter()
        only = True if self.compute_metrics is None else None
        with self._average.in_use():
            output = self.evaluation_loop(loader, "Evaluation", only, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
        metrics = output.metrics | self._speed(metric_key_prefix, output.num_samples, began)
        self.log(self._average.told() | metrics)
        metrics["epoch"] = self.state.epoch
        self._event("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predictions and labels over `test_dataset` as numpy arrays, with loss and metrics; not logged."""
        loader, began = self.get_test_dataloader(test_dataset), time.perf_counter()
        with self._average.in_use():
            output = self.evaluation_loop(loader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
        metrics = output.metrics | self._speed(metric_key_prefix, output.num_samples, began)
        self._event("on_predict", metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def _speed(self, prefix: str, samples: int, began: float) -> dict[str, float]:
        steps = -(-samples // self.args.per_device_eval_batch_size)
        return speed_metrics(prefix, time.perf_counter() - began, samples, steps)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over `dataloader`: `prediction_step` for each batch, then the mean loss (`evaluation.MeanLoss`) and the metrics.

        prediction_loss_only: gather no predictions; args.prediction_loss_only when None.
        """
        args, batchwise = self.args, self.args.batch_eval_metrics and description != "Prediction"
        only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        metric = Metric(self.compute_metrics, self.is_in_train, f"step {self.state.global_step}")
        losses, samples, wanted = MeanLoss(), 0, args.include_for_metrics or ()
        columns = predictions, labels, inputs_kept = tuple(Column(args.eval_do_concat_batches) for _ in range(3))
        each_loss = Column(args.eval_do_concat_batches)
        ranks = self.accelerator.ranks
        self._eval_loader = dataloader = dealt(dataloader, ranks, even=False)
        with self._changes.in_use(), evaluation.undisturbed(self.model), self._narrow_forward():
            for number, (batch, last) in enumerate(evaluation.with_last(dataloader), 1):
                inputs = self._inputs(batch)
                size, items = evaluation.size_of(inputs), count_items([inputs], self.label_names, self._shifts_labels)
                main = inputs.get(getattr(self.model, "main_input_name", "input_ids")) if "inputs" in wanted else None
                loss, logits, target = self.prediction_step(self.model, inputs, only, ignore_keys=ignore_keys)
                samples += size
                if loss is not None:
                    losses.add(loss, size if items is None else items)
                if logits is not None and self.preprocess_logits_for_metrics is not None:
                    logits = self.preprocess_logits_for_metrics(logits, target)
                repeated = loss.detach().mean().repeat(size) if loss is not None and "loss" in wanted else None
                if not batchwise:
                    for column, value in zip((*columns, each_loss), (logits, target, main, repeated), strict=True):
                        column.add(value)
                elif logits is not None and target is not None:
                    metric(EvalPrediction(logits, target, main, repeated), compute_result=last)
                self._event("on_prediction_step")
                if number % (args.eval_accumulation_steps or 1) == 0:
                    for column in (*columns, each_loss):
                        column.settle()
                self._interrupt.stop_if_requested()
        if ranks.world > 1:
            samples = sum(ranks.gather_object(samples))
            losses.share(ranks)
            for column in (*columns, each_loss):
                column.share(ranks)
        if not samples:
            raise DataError("the evaluation data yields nothing", "Check the dataset: it has no samples, or its iterator is spent.")
        found, target = predictions.result(), labels.result()
        if not batchwise and found is not None and target is not None:
            whole: dict[str, Any] = {"compute_result": True} if args.batch_eval_metrics else {}
            metric(EvalPrediction(found, target, inputs_kept.result(), each_loss.result()), **whole)
        return EvalLoopOutput(found, target, _under(metric_key_prefix, losses.mean(), metric), samples)

    def _narrow_forward(self) -> AbstractContextManager[Any]:
        """The block of bf16_full_eval and fp16_full_eval: autocast around the forward passes, which copies no weight and leaves them as they are."""
        wanted = torch.bfloat16 if self.args.bf16_full_eval else torch.float16 if self.args.fp16_full_eval else None
        policy = self.accelerator.policy
        if wanted is None or policy.dtype == wanted:
            return nullcontext()
        if policy.is_mixed or policy.whole:
            raise ConfigError(
                f"evaluation runs under {policy}, as training does, and a full evaluation in {str(wanted).removeprefix('torch.')} was asked for",
                "Leave it out.",
            )
        return autocast(self.accelerator.device.type, wanted)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """(loss, predictions, labels) of one evaluation batch; loss is None when the batch has no labels and the model gives none."""
        inputs = self._prepare_inputs(inputs)
        labels = [inputs[k] for k in self.label_names if inputs.get(k) is not None]
        ignored = self._ignored if ignore_keys is None else tuple(ignore_keys)
        with torch.no_grad(), self.compute_loss_context_manager(), explained(inputs, self.label_names, model):
            if labels or self.compute_loss_func is not None:
                items = count_items([inputs], self.label_names, self._shifts_labels) if self._loss_needs_items else None
                more: dict[str, Any] = {} if items is None else {"num_items_in_batch": items}
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **more)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if prediction_loss_only:
            return loss, None, None
        return loss, predictions_of(outputs, ignored), (labels[0] if len(labels) == 1 else tuple(labels)) if labels else None


def _under(prefix: str, loss: float | None, metric: Metric) -> dict[str, Any]:
    """All numbers of a pass under its prefix."""
    found = {} if loss is None else {f"{prefix}_loss": loss}
    found |= {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metric.found.items()}
    return found | ({f"{prefix}_{FAILED}": metric.error} if metric.error is not None else {})
