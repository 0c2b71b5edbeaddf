"""What moves with a step that was applied and holds still with one that was not: schedules, averages, counters."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from halfstep.step.engine import StepEngine
from halfstep.step.record import Record


class Follower:
    """A learning rate scheduler that advances only when its optimizer has moved the weights since the last call.

    So a refused step, or a micro-batch inside a window, does not use up the schedule; a call per epoch works as ever. While the
    verdict on a step is still on the device the call waits in line, and is carried out before the next step; `get_last_lr()`
    may lag one step then. Everything else is the scheduler's.

    times: by how many steps it advances at once; the number of processes, for a schedule whose length counts the batches of one of them.
    """

    times = 1

    def __init__(self, scheduler: Any, engine: StepEngine, optimizer: Optimizer) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer
        self._engine, self._optimizer = engine, optimizer
        self._seen = engine.state.record(optimizer).applied

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the weights moved since the last call; else hold still."""
        record = self._engine.state.record(self._optimizer)
        if record.pending is None:
            self._advance(record, *args, **kwargs)
        else:
            self._engine.when_known(self._optimizer, lambda: self._advance(record, *args, **kwargs))

    def _advance(self, record: Record, *args: Any, **kwargs: Any) -> None:
        if record.applied != self._seen:
            self._seen = record.applied
            for _ in range(self.times):
                if self.times > 1 and self.scheduler._step_count > getattr(self.scheduler, "total_steps", float("inf")):
                    break  # a last window with fewer batches than processes: OneCycleLR has no further steps
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, with the last step heard."""
        self._engine.settle()
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
