"""What a run writes down for its report: `halfstep.diagnostics.Recorder`, told of the trainer's events."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.accelerator import to_device
from halfstep.diagnostics import Recorder
from halfstep.diagnostics.reading import AUDIT
from halfstep.diagnostics.surroundings import inner
from halfstep.errors import CheckpointError, DivergedError, StepRefusedError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.callbacks import TrainerCallback
from halfstep.trainer.loggers import TrackerCallback
from halfstep.trainer.looking import audited, predicted_bytes, write_report
from halfstep.trainer.run import RunFolder
from halfstep.trainer.state import TrainerControl, TrainerState


class RecordsWriter(TrainerCallback):
    """Writes events.jsonl, layers.jsonl, environment.json and memory.json into the run folder, in the main process.

    Its part of a checkpoint is how far they are, so that a resumed run drops what it gives up and goes on as one that never stopped.
    """

    def __init__(self, run: RunFolder, trackers: Sequence[TrackerCallback], compute_loss: Callable[..., Any]) -> None:
        self.run, self._trackers, self._compute_loss = run, trackers, compute_loss
        self.recorder: Recorder | None = None
        self.kept: dict[str, Any] = {}  # of the checkpoint that the run goes on from
        self._predicts = self._audits = False  # the memory of the first step is still to be predicted, the step to be audited
        self._inputs: dict[str, Any] = {}  # of the first step, until they were looked at

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin, or go on as of the checkpoint."""
        kept, self.kept = self.kept, {}
        if not state.is_world_process_zero:
            return
        accumulated = f" x {args.gradient_accumulation_steps}" if args.gradient_accumulation_steps > 1 else ""
        self.recorder = Recorder(
            self.run.path,
            kwargs["model"],
            kwargs["accelerator"],
            every=args.record_every,
            log_every=0,
            optimizer=kwargs["optimizer"],
            go_on=True,
            batch=f"{state.train_batch_size or args.per_device_train_batch_size}{accumulated} samples",
            trackers=lambda: [t.tracker for t in self._trackers if t.tracker is not None],
        )
        self._predicts, self._audits = args.report, args.audit and not state.attempted
        if state.attempted:
            self.recorder.load_state_dict(kept or _unknown(state))
            self.recorder.event("resumed", f"the run went on from the checkpoint of step {state.global_step}")

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The weights have moved, and the gradients are still there."""
        if self.recorder is not None:
            if self._predicts or self._audits:
                self._inputs = dict(to_device(kwargs["inputs"], kwargs["device"]))
            if self._predicts:
                self._predicts = False
                self.recorder.predict(predicted_bytes(kwargs["model"], self._inputs, inner(kwargs["optimizer"]), args))
            self.recorder.step(kwargs["step_result"].settled())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the first step: the audit, where it was asked for. Its own steps leave the model and random states as they are."""
        if self.recorder is not None and self._audits:
            self._audits, model, inputs = False, kwargs["model"], self._inputs
            found = audited(model, lambda: self._compute_loss(model, dict(inputs)))
            if isinstance(found, str):
                self.recorder.event("note", f"the step was not audited: {found}", UNAUDITED)
            else:
                self.recorder.document(AUDIT, found.as_dict())
                print(str(found).partition("\n")[0])
        self._inputs = {}

    def on_step_skipped(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """They have not."""
        if self.recorder is not None:
            self.recorder.step(kwargs["step_result"].settled())

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The losses of an evaluation during the run."""
        if self.recorder is not None:
            losses = [f"{k} {v:.4g}" for k, v in (kwargs.get("metrics") or {}).items() if k.endswith("loss") and isinstance(v, float)]
            self.recorder.event("evaluated", f"evaluated after step {state.global_step}: {', '.join(losses) or 'no loss'}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint is there."""
        if self.recorder is not None:
            self.recorder.event("checkpoint", f"checkpoint-{state.global_step} was saved")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The run has ended: by itself, or by the error that is on its way past the trainer."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            error = sys.exception()
            if not isinstance(error, CheckpointError | OSError):  # of a full disk, which would not take this either
                _tell_end(recorder, error, state.global_step)
            recorder.close(tell=not isinstance(error, CheckpointError | OSError))
            if args.report:
                write_report(self.run.path, args.disable_tqdm)

    def state(self) -> dict[str, Any]:
        """What goes into checkpoints, in the form of transformers."""
        return {"args": {}, "attributes": {"kept": {} if self.recorder is None else self.recorder.state_dict()}}


def _tell_end(recorder: Recorder, error: BaseException | None, step: int) -> None:
    if isinstance(error, DivergedError | StepRefusedError):
        if error.result is not None:
            recorder.step(error.result.settled())
        kind, culprits = "diverged", [c.name for c in error.result.culprits] if error.result is not None else []
        recorder.event(kind, f"the run ended after step {step}: {error.cause}", culprits=culprits)
    elif isinstance(error, KeyboardInterrupt):
        recorder.event("interrupted", f"the run was interrupted after step {step}")
    elif error is not None:
        recorder.event("note", f"the run failed after step {step}: {type(error).__name__}: {error}", FAILED)


UNAUDITED = "halfstep.audit(model, batch) in a script of its own may tell more; the run goes on."
FAILED = "The run ended with an error that is not about numbers; the terminal has it in full."


def _unknown(state: TrainerState) -> dict[str, Any]:
    """Where the records are as of a checkpoint that does not tell: of an older halfstep, or of a run without them."""
    counts = {"applied": state.global_step, "skipped": state.skipped_steps, "replayed": state.replayed_steps}
    return {"events": None, "counts": counts, "scale": None, "losses": [None, 0], "shown": {}, "alarms": {"close": {}, "stalled": False}}
