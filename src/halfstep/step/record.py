"""Where one optimizer stands between two of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from halfstep.step.deferred import Pending
from halfstep.step.marks import Marks, unchanged
from halfstep.step.verdict import Evidence, Verdict


@dataclass
class Record:
    """Where one optimizer stands."""

    verdict: Verdict | None = None  # on the gradients at hand; set when they are unscaled
    evidence: Evidence | None = None  # instead of a verdict where that is read later
    measured: Evidence | None = None  # what the verdict is from
    marks: Marks = ()  # the gradients that were judged
    clipped: bool = False
    signs: list[Tensor] = field(default_factory=list)  # of a verdict that is read later: whether it was clipped, each a scalar on the device
    replays: int = 0
    stepped: bool = False  # with the gradients at hand
    awaits_update: bool = False  # it stepped, and update() has not been called since
    heard: bool = False  # the verdict has moved the scale, or waits in line to
    losses: int = 0  # how many had been scaled when the verdict was reached
    spent: Marks = ()  # gradients a step was taken with that nobody has cleared or added to
    loss: Tensor | None = None  # sum of the losses that gave this optimizer its gradients
    loss_at: tuple[int, int] = (-1, 0)  # the ledger's turn, and `spent_to`, when `loss_then` was that sum
    loss_then: Tensor | None = None
    met_at: int = 0  # losses that had been scaled when this optimizer was met
    spent_to: int = 0  # the number of the last loss before its last step
    bad_steps: int = 0  # in a row
    applied: int = 0  # steps that moved the weights
    stalled: float | None = None  # share of the last step's updates that rounded away, where it was measured
    pending: Pending | None = None  # a step whose verdict has not been read
    devices: tuple[object, ...] = ()  # what was found in order when the devices of the states were looked at last
    hooks: list[Callable[[], object]] = field(default_factory=list)  # run after each step that was applied

    @property
    def unscaled(self) -> bool:
        """Whether the gradients at hand were judged and unscaled."""
        return self.verdict is not None or self.evidence is not None

    def forget(self) -> None:
        """The gradients at hand are new."""
        self.verdict, self.evidence, self.marks, self.clipped, self.replays = None, None, (), False, 0
        self.signs = []
        self.stepped, self.heard = False, False

    def judged(self, gradients: list[Tensor]) -> bool:
        """Whether the verdict is on just these gradients, unchanged since."""
        return unchanged(self.marks, gradients)
