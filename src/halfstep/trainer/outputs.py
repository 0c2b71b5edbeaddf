"""Reading what a model returns: its loss, its predictions; and what a metric function is given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, DataError, suggest
from halfstep.step import Culprit, StepResult
from halfstep.trainer.columns import SPANS
from halfstep.trainer.items import IGNORED

LossFunction = Callable[..., Tensor]


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns: arrays in fp32, and metrics."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


@dataclass(frozen=True)
class EvalPrediction:
    """What `compute_metrics` is given: numpy arrays, 16-bit predictions as fp32; tensors with batch_eval_metrics=True.

    Unpacks into predictions, label_ids, and those of inputs and losses that include_for_metrics asks for. losses: for each sample that of its batch.
    """

    predictions: Any
    label_ids: Any
    inputs: Any = None
    losses: Any = None

    def _parts(self) -> tuple[Any, ...]:
        return (self.predictions, self.label_ids, *(part for part in (self.inputs, self.losses) if part is not None))

    def __iter__(self) -> Any:
        return iter(self._parts())

    def __getitem__(self, index: int) -> Any:
        return self._parts()[index]


def loss_of(outputs: Any, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """The loss in a model's outputs: a scalar tensor, a mapping or record with `loss`, or the first of a tuple.

    Raises ConfigError when there is none, with the names of the `inputs` that the model was given.
    """
    if isinstance(outputs, Tensor) and outputs.dim() == 0:
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor) and outputs[0].dim() == 0:
        loss = outputs[0]
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ConfigError(f"the model's loss has shape {tuple(loss.shape)}", "Return its mean, a scalar.")
        return loss if loss.dim() == 0 else loss.reshape(())
    if loss is not None:
        raise ConfigError(f"the model's loss is a {type(loss).__name__}", "Return a scalar tensor, computed from the model's outputs.")
    if isinstance(outputs, Mapping):
        what = f"a mapping of {', '.join(map(str, outputs))}"
    else:
        what = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    raise ConfigError(
        f"the model returned {what}, with no loss in it" + (f"; its inputs were {', '.join(map(str, inputs))}" if inputs else ""),
        "Give the dataset a 'labels' column if the model computes its own loss, or pass compute_loss_func=f with f(outputs, labels) a scalar.",
    )


def predictions_of(outputs: Any, ignore: tuple[str, ...]) -> Any:
    """What a model's outputs hold besides the loss: one tensor, or a tuple when there are several; tuples of tensors in it stay tuples.

    ignore: names of outputs to leave out. What holds anything but tensors (a cache) is left out too.
    """
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() else None
    if isinstance(outputs, tuple | list):
        found = [_tensors(v) for v in outputs if not isinstance(v, Tensor) or v.dim()]
    else:
        named = outputs if isinstance(outputs, Mapping) else vars(outputs)
        found = [_tensors(v) for k, v in named.items() if k != "loss" and k not in ignore]
    kept = [v for v in found if v is not None]
    return kept[0] if len(kept) == 1 else tuple(kept) if kept else None


def _tensors(value: Any) -> Any:
    """A tensor, or a tuple of nothing but such (lists as tuples); None for anything else."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, tuple | list) or not value:
        return None
    parts = tuple(_tensors(v) for v in value)
    return None if any(part is None for part in parts) else parts


def to_numpy(value: Any) -> Any:
    """Tensors, in tuples, lists and mappings too, as numpy arrays on the CPU; 16-bit floats as fp32, for numpy has no bf16."""
    if isinstance(value, tuple | list):
        return tuple(to_numpy(v) for v in value)
    if isinstance(value, Mapping):
        return {key: to_numpy(v) for key, v in value.items()}
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()


def join(parts: list[Any]) -> Any:
    """Arrays of batches as one along the first axis; tuples by place, mappings by name; None when there were none.

    Arrays whose later axes differ are padded with -100, which losses and metrics leave out. Single numbers are put in a row.
    """
    if not parts or parts[0] is None:
        return None
    if isinstance(parts[0], tuple):
        return tuple(join([p[i] for p in parts]) for i in range(len(parts[0])))
    if isinstance(parts[0], Mapping):
        return {key: join([p[key] for p in parts]) for key in parts[0]}
    if parts[0].ndim == 0:
        return np.stack(parts)
    widest = [max(p.shape[axis] for p in parts) for axis in range(1, parts[0].ndim)]
    padded = [
        np.pad(p, [(0, 0), *((0, w - s) for w, s in zip(widest, p.shape[1:], strict=True))], constant_values=-100)
        if list(p.shape[1:]) != widest
        else p
        for p in parts
    ]
    return np.concatenate(padded)


def check_batch(model: nn.Module, batch: Any, label_names: tuple[str, ...]) -> None:
    """Refuse a batch that is no mapping of names to tensors, or whose class labels are out of range."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the loader gives batches of type {type(batch).__name__}, and the model needs named inputs", "Let the collator return a dict."
        )
    for name in label_names:
        if name not in SPANS:  # places in a text, and no classes
            check_labels(model, batch.get(name))


def record_of(result: StepResult) -> dict[str, Any]:
    """What the log says of a refused step: what was not finite, by name."""
    about = {"reason": result.reason, "culprits": [str(c) for c in result.culprits], "replays": result.replays}
    return about | {"loss": result.loss, "grad_norm": result.grad_norm, "scale": result.next_scale}


def with_bad_inputs(result: StepResult, window: list[Any]) -> StepResult:
    """The result of a step whose loss was not finite although nothing before it was, with the inputs that are not finite named first (labels)."""
    if result or result.reason != "nonfinite-loss" or not result.culprits or result.culprits[0].name != "loss":
        return result
    bad = {k: v for batch in window for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point() and not bool(v.isfinite().all())}
    named = tuple(Culprit(f"input {name}", "forward", math.nan if bool(v.isnan().any()) else math.inf) for name, v in bad.items())
    return replace(result.settled(), culprits=(*named, *result.culprits)) if named else result


def watched(result: StepResult | None) -> dict[str, Any]:
    """What a record says of how close the run came to the limits of its formats; `near` says what is within a factor of 2.

    stalled: of the last step where that was measured exactly, else as the watch has it.
    """
    if result is None or result.watch is None:
        return {}
    watch, near = result.watch, str(result.watch)
    stalled = result.stalled if result.stalled is not None else watch.stalled
    largest, closest = dict(list(watch.largest.items())[:1]), dict(watch.outputs[:1])
    found = {"largest_gradient": largest, "underflow": watch.underflow, "stalled": stalled, "closest_output": closest, "near": near}
    return {k: v for k, v in found.items() if v not in (None, {}, "")}


def check_labels(model: nn.Module, labels: Any) -> None:
    """Refuse class labels outside the classes of a transformers classifier, before they reach a GPU, where they end the process.

    Looks at integer labels of one dimension on the CPU and at `model.config.num_labels`; other tasks are left to the loss.
    """
    classes = getattr(getattr(model, "config", None), "num_labels", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1 or not isinstance(classes, int) or classes < 2:
        return
    used = labels[labels != IGNORED]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < classes:
        raise out_of_range(labels, f"the model has {classes} classes, 0 to {classes - 1}")


class explained:  # noqa: N801  used like a function
    """A block in which errors about `inputs` are told in terms of them: a class out of bounds, a column that is no tensor or that `model` lacks,
    one sample for a BatchNorm.
    """

    def __init__(self, inputs: Mapping[str, Any], names: tuple[str, ...], model: nn.Module | None = None) -> None:
        self._inputs, self._names, self._model = inputs, names, model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TypeError | AttributeError):
            _refuse_columns(self._inputs, self._model, error)
        elif isinstance(error, IndexError) and "out of bounds" in str(error):
            labels = next((v for k, v in self._inputs.items() if k in self._names and isinstance(v, Tensor)), None)
            if labels is not None and not labels.is_floating_point():
                raise out_of_range(labels, f"the loss has no such class ({error})") from error
        elif isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
            raise DataError(
                f"the batch of this process has one sample, and a BatchNorm has no statistics of one: {error}",
                "Pass dataloader_drop_last=True, which leaves out the last, smaller batch, or choose another batch size.",
            ) from error


def _refuse_columns(inputs: Mapping[str, Any], model: nn.Module | None, error: Exception) -> None:
    """Raise DataError where the columns of a batch explain an error of the model."""
    missing = missing_inputs(model, inputs) if model is not None and "required" in str(error) else []
    if missing:
        raise DataError(
            f"the model's forward needs {', '.join(missing)}, and a batch of the data has {', '.join(map(str, inputs)) or 'nothing'}",
            f"Rename the columns of the dataset. {suggest(missing[0], map(str, inputs))}",
        ) from error
    found = {k: v for k, v in inputs.items() if isinstance(v, list | tuple | np.ndarray)}
    if found:
        raise DataError(
            f"the batch has {', '.join(f'{k!r} as a {type(v).__name__}' for k, v in found.items())}, and the model failed on it: {error}",
            "Let the collator return tensors; sequences of unlike lengths are padded to one (for example by transformers.DataCollatorWithPadding).",
        ) from error


def missing_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """The arguments that a model's forward cannot do without and a batch does not have."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in needed if name not in inputs]


def out_of_range(labels: Tensor, allowed: str) -> DataError:
    """The error for labels that are not classes of the model."""
    used = labels[labels != IGNORED]
    return DataError(
        f"the labels of this batch run from {int(used.min())} to {int(used.max())}, and {allowed}",
        "Number the classes from 0 (-100 leaves a place out), or build the model with as many classes as the data has (num_labels).",
    )


def accepts(forward: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether a forward method takes all of `names` as arguments."""
    parameters = inspect.signature(forward).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or all(n in parameters for n in names)
