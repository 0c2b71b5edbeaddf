"""One pass over data without training: losses, predictions, labels, and the function that makes metrics of them."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.checkpoint import capture, restore
from halfstep.distributed import Ranks
from halfstep.errors import ConfigError
from halfstep.trainer.outputs import EvalPrediction, join, to_numpy

Compute = Callable[..., Any]


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns: arrays, metrics under their prefix, and the number of samples seen."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]
    num_samples: int


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """A block without gradients in which `model` is in evaluation mode. Each part's training mode and all random states are put back after it,
    so that a run does not depend on how often, or how far, it was evaluated.
    """
    modes, random_states = {part: part.training for part in model.modules()}, capture()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        restore(random_states)


class MeanLoss:
    """The mean of the losses of batches, each counted by its label items; read from the device once, at the end.

    items: labels that are not -100 where a batch has integer labels, else samples. So ragged batches give the loss of one batch of everything, for a
    loss that is a mean over its items. Summed in fp64 in the order of the batches. A batch without items has no loss (0/0) and is left out; NaN and
    inf of any other show in the mean.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._items: list[Tensor | int] = []

    def add(self, loss: Tensor, items: Tensor | int) -> None:
        """The loss of a batch."""
        self._losses.append(loss.detach().double().mean())
        self._items.append(items)

    def share(self, ranks: Ranks) -> None:
        """Take in those of all ranks, in the order of the data."""
        losses, items = torch.stack(self._losses).tolist() if self._losses else [], [int(n) for n in self._items]
        pieces = ranks.gather_object(list(zip(losses, items, strict=True)))
        joined = in_turn(pieces)
        self._losses, self._items = [torch.tensor(loss, dtype=torch.float64) for loss, _ in joined], [count for _, count in joined]

    def mean(self) -> float | None:
        """The mean; None without any loss, NaN when no batch had an item."""
        if not self._losses:
            return None
        losses, items = torch.stack(self._losses).tolist(), [int(n) for n in self._items]
        total = 0.0
        for loss, count in zip(losses, items, strict=True):
            if count:
                total += loss * count
        return total / sum(items) if sum(items) else math.nan


class Column:
    """Predictions, labels or inputs of batches. They wait on the device until `settle`; joined to one array at the end, or one a batch."""

    def __init__(self, concatenate: bool) -> None:
        self._concatenate = concatenate
        self._waiting: list[Any] = []
        self._arrays: list[Any] = []

    def add(self, value: Any) -> None:
        """The values of a batch; None for none."""
        if value is not None:
            self._waiting.append(value)

    def settle(self) -> None:
        """Move what waits to the CPU, as numpy arrays."""
        self._arrays += [to_numpy(value) for value in self._waiting]
        self._waiting = []

    def share(self, ranks: Ranks) -> None:
        """Take in those of all ranks, in the order of the data."""
        self.settle()
        self._arrays = in_turn(ranks.gather_object(self._arrays))

    def result(self) -> Any:
        """All of them; None without any."""
        self.settle()
        return (join(self._arrays) if self._concatenate else self._arrays) if self._arrays else None


class Metric:
    """Calls `compute_metrics`. forgiving: what it raises is kept in `error`, said once as a warning, and the run goes on."""

    def __init__(self, compute: Compute | None, forgiving: bool, where: str) -> None:
        self.compute, self.forgiving, self.where = compute, forgiving, where
        self.found: dict[str, Any] = {}
        self.error: str | None = None

    def __call__(self, prediction: EvalPrediction, **kwargs: Any) -> None:
        """The metrics of a prediction; of a batch at a time, those of the last call stand."""
        if self.compute is None or self.error is not None:
            return
        try:
            self.found = numbers_of(self.compute(prediction, **kwargs), optional=kwargs.get("compute_result") is False)
        except Exception as error:
            if not self.forgiving:
                raise
            self.found, self.error = {}, f"{type(error).__name__}: {error}"
            warnings.warn(f"{self.where}: compute_metrics raised {self.error}; the run goes on without its numbers", stacklevel=2)


def numbers_of(found: Any, optional: bool = False) -> dict[str, Any]:
    """What compute_metrics returned, as plain values by name; optional: None stands for none. Raises ConfigError for anything but a mapping."""
    if found is None and optional:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"compute_metrics returned a {type(found).__name__}", "Let it return a dict of names and numbers.")
    return {str(key): plain(value) for key, value in found.items()}


def plain(value: Any) -> Any:
    """A number of numpy or torch as Python's; anything else as it is."""
    single = hasattr(value, "item") and getattr(value, "ndim", 0) == 0
    return value.item() if single else value


def batchwise(compute: Compute | None) -> None:
    """Raise ConfigError when `compute_metrics` cannot be called batch by batch (batch_eval_metrics=True)."""
    if compute is not None and "compute_result" not in inspect.signature(compute).parameters:
        raise ConfigError(
            "batch_eval_metrics=True calls compute_metrics after each batch, and it takes no compute_result",
            "Let it take compute_result=False: True comes with the last batch, and its result is kept.",
        )


def size_of(inputs: Mapping[str, Any]) -> int:
    """Samples in a batch: the length of its first tensor that has one."""
    return next((len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim()), 1)


def with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one."""
    iterator = iter(batches)
    for batch in iterator:
        for following in iterator:
            yield batch, False
            batch = following
        yield batch, True


def in_turn(pieces: Sequence[Sequence[Any]]) -> list[Any]:
    """What ranks have of each batch, batch by batch in the order of ranks: the order of the data."""
    longest = max(map(len, pieces), default=0)
    return [mine[i] for i in range(longest) for mine in pieces if i < len(mine)]
