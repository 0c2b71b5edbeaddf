"""Ctrl-C that loses nothing: the step at hand is finished, a checkpoint is saved, then the run ends."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class TrainingInterrupted(KeyboardInterrupt):
    """The run was stopped by Ctrl-C. `checkpoint` is the folder to resume from, None when nothing was saved."""

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.step = step
        self.checkpoint = checkpoint
        saved = f"saved in {checkpoint}" if checkpoint else "nothing was saved (no step was taken, or save_strategy is 'no')"
        how = "; go on with trainer.train(resume_from_checkpoint=True) or halfstep train --resume" if checkpoint else ""
        super().__init__(f"stopped at step {step}, {saved}{how}")


class StopNow(Exception):  # noqa: N818  a signal between parts of the trainer, not an error
    """Ctrl-C was pressed: leave what is going on and save."""


class Interrupt:
    """While this block runs in the main thread, the first Ctrl-C only sets `requested`; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self.agreed: bool | None = None  # in several processes: whether it was requested in one of them, as all know since the last step
        self._before: Any = None
        self._active = False

    def __enter__(self) -> Interrupt:
        self.requested = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._active = True
        return self

    def __exit__(self, *_: Any) -> None:
        self.requested = False
        if self._active:
            signal.signal(signal.SIGINT, self._before)
            self._active = False

    def stop_if_requested(self) -> None:
        """Raise StopNow after the first Ctrl-C."""
        if self.requested if self.agreed is None else self.agreed:
            raise StopNow

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
