"""Loops without a halfstep scaler, as a recorder sees them: whether a step was applied is told by torch's own scale, if by anything."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.amp import GradScaler
from halfstep.diagnostics.explanations import WHY
from halfstep.diagnostics.records import RunEvent
from halfstep.errors import ConfigError
from halfstep.step import StepResult


def source_of(source: Any) -> tuple[GradScaler | None, Any]:
    """(the halfstep scaler of a recorder's `source`, torch's scaler in it); None for what it has not. Raises ConfigError for anything else."""
    scaler = getattr(source, "scaler", None if hasattr(source, "is_main_process") else source)  # Accelerate's has none without fp16
    if scaler is None or isinstance(scaler, GradScaler):
        return scaler, None
    if isinstance(scaler, torch.amp.GradScaler):
        return None, scaler
    raise ConfigError(
        f"source= was given a {type(source).__name__}",
        "Pass the Accelerator or the GradScaler of the loop, or leave it out and pass step(loss=, scale=).",
    )


def checked_step(result: Any, loss: Any) -> None:
    """Refuse what is given as a step's result or loss and is none."""
    if result is not None and not isinstance(result, StepResult):
        kind = type(result).__name__
        raise ConfigError(
            f"step was given a {kind} in the place of a StepResult", "Pass accelerator.last_step or what scaler.step gave; a loss is loss=."
        )
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ConfigError(f"loss= has {loss.numel()} numbers", "Pass the loss of the step as one: its mean, or what backward was called on.")
    if loss is not None and not isinstance(loss, Tensor | int | float):
        raise ConfigError(f"loss= was given a {type(loss).__name__}", "Pass a number, or a tensor of one.")


class TorchSteps:
    """The results of steps of torch's own scaler, or of none. scale: that after the step before, None where nothing told it."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.scale: float | None = self._now(None)
        self.lost = False  # the loss of the step before was not finite

    def _now(self, given: float | None) -> float | None:
        return given if given is not None or self.scaler is None else float(self.scaler.get_scale())

    def take(self, given: float | None) -> tuple[StepResult, float | None]:
        """The result of a step, and the scale after it. given: what the loop says of the scale after its update()."""
        after, before = self._now(given), self.scale
        self.scale = after if after is not None else before
        fell = after is not None and before is not None and after < before
        return StepResult(not fell, "overflow" if fell else "applied", scale=before or after or 1.0, next_scale=after or 1.0), after

    def unknown(self, number: int) -> RunEvent:
        """That nobody can say whether the first step was applied."""
        return RunEvent(number, "note", f"whether step {number} was applied is not known: no loss scale before it was told", WHY["untold"])

    def lost_loss(self, loss: Tensor | float | None, result: StepResult, number: int) -> list[RunEvent]:
        """An event where losses begin to be inf or NaN; of those on a GPU, which are not waited for, none."""
        if loss is None or (isinstance(loss, Tensor) and loss.device.type != "cpu"):
            return []
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        return self.begins(value, f"the loss of step {number} is not finite" + (", and the step was applied" if result else ""), number)

    def begins(self, loss: float, said: str, number: int) -> list[RunEvent]:
        """An event where losses begin to be inf or NaN."""
        begun, self.lost = not math.isfinite(loss) and not self.lost, not math.isfinite(loss)
        return [RunEvent(number, "nonfinite-loss", said, WHY["unguarded"])] if begun else []
