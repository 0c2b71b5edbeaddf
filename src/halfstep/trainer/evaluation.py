"""One pass over data without training: losses, predictions, labels, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.checkpoint import capture, restore
from halfstep.errors import ConfigError, DataError
from halfstep.trainer.outputs import EvalPrediction, join, to_numpy

PredictionStep = Callable[[nn.Module, dict[str, Any]], tuple[Tensor | None, Any, Any]]


@dataclass(frozen=True)
class Evaluation:
    """What a pass gave: the mean loss over samples (NaN and inf are kept), arrays, sizes and time."""

    loss: float | None
    predictions: Any
    labels: Any
    samples: int
    seconds: float

    def metrics(self, prefix: str, compute: Callable[[EvalPrediction], dict[str, Any]] | None) -> dict[str, Any]:
        """All numbers under `prefix`, those of `compute` included."""
        found: dict[str, Any] = {} if self.loss is None else {f"{prefix}_loss": self.loss}
        if compute is not None and self.predictions is not None and self.labels is not None:
            metrics = compute(EvalPrediction(self.predictions, self.labels))
            if not isinstance(metrics, Mapping):
                raise ConfigError(f"compute_metrics returned a {type(metrics).__name__}", "Let it return a dict of names and numbers.")
            for key, value in metrics.items():
                number = value.item() if hasattr(value, "item") else value
                found[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = number
        found[f"{prefix}_runtime"] = round(self.seconds, 4)
        found[f"{prefix}_samples_per_second"] = round(self.samples / max(self.seconds, 1e-9), 3)
        return found


def run(model: nn.Module, batches: Iterable[dict[str, Any]], step: PredictionStep, after_batch: Callable[[], None]) -> Evaluation:
    """Evaluate `model` over `batches`; each batch's loss counts by its samples. The model's training mode and all random states are put back,
    so that a run does not depend on how often, or how far, it was evaluated.

    Raises DataError when there is no batch.
    """
    was_training, began = model.training, time.perf_counter()
    total, counted, samples = 0.0, 0, 0
    predictions: list[Any] = []
    labels: list[Any] = []
    random_states = capture()
    model.eval()
    try:
        with torch.no_grad():
            for inputs in batches:
                size = next((len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim()), 1)
                loss, logits, target = step(model, inputs)
                samples += size
                if loss is not None:
                    total, counted = total + float(loss) * size, counted + size
                if logits is not None:
                    predictions.append(to_numpy(logits))
                if target is not None:
                    labels.append(to_numpy(target))
                after_batch()
    finally:
        model.train(was_training)
        restore(random_states)
    if not samples:
        raise DataError("the evaluation data yields nothing", "Check the dataset: it has no samples, or its iterator is spent.")
    mean = total / counted if counted else None
    return Evaluation(mean, join(predictions), join(labels), samples, time.perf_counter() - began)
