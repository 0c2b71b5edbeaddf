"""What the records of a run need of a scaler."""

from __future__ import annotations

from halfstep.amp.grad_scaler import GradScaler
from halfstep.step.watching import NoRecorder


def record_gradients(scaler: GradScaler, recorder: NoRecorder | None) -> None:
    """Let `recorder` have the gradients of all steps of `scaler` that it asks for, as the backward pass left them; None: nobody from now on."""
    scaler._engine.state.watching.recorder = NoRecorder() if recorder is None else recorder


def scale_of(scaler: GradScaler) -> float:
    """The loss scale now. Unlike `get_scale` this is no sign that a loop uses it."""
    return scaler._engine.scaling.scale
