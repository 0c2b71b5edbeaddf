"""Callbacks: the events of a run in the order of their occurrence."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from halfstep.errors import ConfigError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.state import TrainerControl, TrainerState


class TrainerCallback:
    """Base of callbacks, with transformers' events and signatures: override what you need.

    Every event gets the arguments, the state and the control (whose switches it may set), and as keywords `model`,
    `optimizer`, `lr_scheduler`, `train_dataloader`, and what belongs to the event: `logs`, `metrics`, `step_result`.
    `on_step_end` comes after steps that moved the weights; `on_step_skipped` (halfstep's own) after those that did not.
    """

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The trainer was made."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Everything is ready; `resolution` says which precision is in force."""

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A pass over the data begins."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A window of micro-batches begins."""

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A micro-batch that is not the last of its window was used."""

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Gradients are unscaled and clipped; the optimizer step comes next."""

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The optimizer moved the weights; gradients are still there."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step was applied and counted."""

    def on_step_skipped(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step was refused; `step_result` says why."""

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A pass over the data ended."""

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One evaluation batch was used."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation ended; `metrics` has its numbers."""

    def on_predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A prediction ended; `metrics` has its numbers."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was written."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A record was logged; `logs` has it."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The run ended."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class CallbackList:
    """Calls an event on each callback in order. A callback may return a control to replace the one it was given.

    A callback is anything with methods named as the events; objects of `transformers.TrainerCallback` are.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self.callbacks: list[Any] = list(callbacks)
        self._found: dict[str, tuple[list[Any], list[Any]]] = {}  # who listens to an event, beside the callbacks that it was found for

    def add(self, callback: Any) -> None:
        """Add a callback, or a class of callbacks to make one of. Raises ConfigError for an object that has none of the events."""
        made = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(made, event, None)) for event in EVENTS):
            raise ConfigError(f"a {type(made).__name__} is no callback: it has no method named as an event", f"Events: {', '.join(EVENTS)}.")
        self.callbacks.append(made)

    def pop(self, callback: Any) -> Any:
        """Take out a callback, or the first of a class, and return it; None when there is none.

        A class of transformers stands for ours of the same name (ProgressCallback, PrinterCallback, DefaultFlowCallback, EarlyStoppingCallback).
        """
        for i, one in enumerate(self.callbacks):
            if (_is_of(one, callback)) if isinstance(callback, type) else one == callback:
                return self.callbacks.pop(i)
        return None

    def listeners(self, event: str) -> list[Any]:
        """The callbacks that do something at `event`."""
        known = self._found.get(event)
        if known is not None and len(known[0]) == len(self.callbacks) and all(map(operator.is_, known[0], self.callbacks)):
            return known[1]
        empty = f"TrainerCallback.{event}"  # of a base class, ours or transformers'
        listening = [c for c in self.callbacks if (m := getattr(c, event, None)) is not None and getattr(m, "__qualname__", "") != empty]
        self._found[event] = list(self.callbacks), listening
        return listening

    def listens(self, event: str) -> bool:
        """Whether a callback does something at `event`."""
        return bool(self.listeners(event))

    def call(self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Run `event` on every callback that has it; returns the control to go on with."""
        return self.tell(self.listeners(event), event, args, state, control, **kwargs)

    def tell(
        self, listening: list[Any], event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The same for those that `listeners` has found."""
        for callback in listening:
            returned = getattr(callback, event)(args, state, control, **kwargs)
            control = control if returned is None else returned
        if not event.startswith("on_s"):  # not in every step: a callback may have given itself a method meanwhile
            self._found.clear()
        return control


def _is_of(callback: Any, kind: type) -> bool:
    return isinstance(callback, kind) or (kind.__module__.startswith("transformers.") and type(callback).__name__ == kind.__name__)
