"""Callbacks: the events of a run in the order of their occurrence, and the one that paces logging, evaluation and saving."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halfstep.trainer.arguments import TrainingArguments, spaced
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


_NOTHING = dict(vars(TrainerCallback))  # the methods as they stand above


class CallbackList:
    """Calls an event on each callback in order. A callback may return a control to replace the one it was given."""

    def __init__(self, callbacks: Iterable[TrainerCallback]) -> None:
        self.callbacks = list(callbacks)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or a class of callbacks to make one of."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def listeners(self, event: str) -> list[TrainerCallback]:
        """The callbacks that do something at `event`."""
        nothing = _NOTHING.get(event)
        return [c for c in self.callbacks if (m := getattr(c, event, None)) is not None and getattr(m, "__func__", m) is not nothing]

    def listens(self, event: str) -> bool:
        """Whether a callback does something at `event`."""
        return bool(self.listeners(event))

    def call(self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Run `event` on every callback that has it; returns the control to go on with."""
        for callback in self.listeners(event):
            method = getattr(callback, event, None)
            returned = method(args, state, control, **kwargs) if method else None
            control = control if returned is None else returned
        return control


class Pace(TrainerCallback):
    """Sets the control's switches as the strategies in the arguments say."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log, evaluate and save every so many applied steps, and at the last one."""
        step, total, last = state.global_step, state.max_steps, self._is_last(args, state)
        if args.logging_strategy == "steps" and (step % spaced(args.logging_steps, total) == 0 or last):
            control.should_log = True
        if args.eval_strategy == "steps" and (step % spaced(args.steps_between_evaluations, total) == 0 or last):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (step % spaced(args.save_steps, total) == 0 or last):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_step_skipped(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A run of epochs may end with a refused step: log, evaluate and save as at any other end."""
        if self._is_last(args, state):
            control.should_log = control.should_log or args.logging_strategy == "steps"
            control.should_evaluate = control.should_evaluate or args.eval_strategy == "steps"
            control.should_save = control.should_save or args.save_strategy == "steps"

    @staticmethod
    def _is_last(args: TrainingArguments, state: TrainerState) -> bool:
        return (state.global_step if args.max_steps > 0 else state.attempted) >= state.max_steps

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log, evaluate and save after each epoch."""
        control.should_log = control.should_log or args.logging_strategy == "epoch"
        control.should_evaluate = control.should_evaluate or args.eval_strategy == "epoch"
        control.should_save = control.should_save or args.save_strategy == "epoch"
