"""Trainers that take their steps when told to: `train()` runs in a thread of its own and a callback waits at the end of a step for its next turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.gpu.measure import Timing, Waits, wait

FOREVER = 10_000_000  # steps, which no run reaches


class Gate:
    """The callback: after so many steps it hands over to who asked for them. To be mixed into a trainer's own class of callbacks.

    A step that was refused counts too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.error: BaseException | None = None
        self._wanted, self._begun, self._stop = 0, 0.0, False
        self._host = 0.0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._waits: Waits | None = None
        self._open: AbstractContextManager[None] | None = None

    def run(self, steps: int, waits: Waits | None) -> Timing:
        """From the thread that measures: let the trainer take so many steps."""
        self._wanted, self._waits = steps, waits
        wait(self.device)
        self._begun = time.perf_counter()
        self._go.release()
        self._done.acquire()
        if self.error is not None:
            raise self.error
        return Timing(steps, time.perf_counter() - self._begun, self._host)

    def stop(self) -> None:
        """Let the trainer end."""
        self._stop = True
        self._go.release()

    def ended(self, error: BaseException | None) -> None:
        """From the trainer's thread: there will be no more steps."""
        self.error = error if error is not None else RuntimeError("the trainer ended by itself")
        self._done.release()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the first turn."""
        self._next_turn(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand over, if these were all."""
        self._wanted -= 1
        if self._wanted > 0:
            return
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        self._host = time.perf_counter() - self._begun
        wait(self.device)
        self._done.release()
        self._next_turn(control)

    on_step_skipped = on_step_end

    def _next_turn(self, control: Any) -> None:
        self._go.acquire()
        control.should_training_stop = self._stop
        if self._waits is not None and not self._stop:
            self._open = self._waits.counted()
            self._open.__enter__()


class Driven:
    """A trainer as a runner. start: `train` of a trainer that has `gate` among its callbacks."""

    def __init__(self, gate: Gate, start: Callable[[], Any], close: Callable[[], None]) -> None:
        self._gate, self._close, self._start = gate, close, start
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        error: BaseException | None = None
        try:
            if self._gate.device.type == "cuda":
                torch.cuda.set_device(self._gate.device)
            self._start()
        except BaseException as raised:  # noqa: BLE001  told to the thread that measures
            error = raised
        self._gate.ended(error)

    def run(self, steps: int, waits: Waits | None = None) -> Timing:
        """See Runner."""
        return self._gate.run(steps, waits)

    def close(self) -> None:
        """See Runner."""
        self._gate.stop()
        self._thread.join(60)
        self._start = lambda: None
        self._close()
