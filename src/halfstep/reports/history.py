"""A run as its report reads it: the series that charts and answers share, taken from the records once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from halfstep.diagnostics.records import RunEvent, RunRecords
from halfstep.reports.samples import View, views
from halfstep.reports.series import EMPTY, Series, columns

LOSS = ("loss", "train_loss", "train/loss", "training_loss")  # by the names of others too
EVALUATION = ("eval_loss", "eval/loss", "val_loss", "valid_loss", "validation_loss")
NORM = ("grad_norm", "train/grad_norm", "gradient_norm")
SCALE = ("scale", "loss_scale", "train/scale")
RATE = ("lr", "learning_rate", "train/learning_rate")
SPEED = ("train_tokens_per_second", "tokens_per_second", "train/tokens_per_second")
LOST, AGAIN = ("skipped",), ("replayed",)


@dataclass(frozen=True, eq=False)
class History:
    """The records of one run under the name that the report gives it."""

    name: str
    records: RunRecords

    @cached_property
    def windows(self) -> list[Mapping[str, Any]]:
        """The records of ordinary steps."""
        return [m for m in self.records.metrics if "reason" not in m]

    @cached_property
    def refused(self) -> list[Mapping[str, Any]]:
        """The records of steps that were not applied, or only in part."""
        return [m for m in self.records.metrics if "reason" in m]

    @cached_property
    def _columns(self) -> dict[str, Series]:
        return columns(self.windows)

    def first_of(self, keys: Sequence[str]) -> Series:
        """The series under the first of some keys that the run has; EMPTY without any."""
        return next((self._columns[key] for key in keys if key in self._columns), EMPTY)

    @property
    def loss(self) -> Series:
        """The training loss."""
        return self.first_of(LOSS)

    @property
    def evaluation(self) -> Series:
        """The loss of evaluations."""
        return self.first_of(EVALUATION)

    @property
    def norm(self) -> Series:
        """The norm of the gradients, unscaled."""
        return self.first_of(NORM)

    @cached_property
    def scale(self) -> Series:
        """The loss scale, with that after each refused step."""
        ordinary, refused = self.first_of(SCALE), columns(self.refused).get("scale", EMPTY)
        if not len(refused):
            return ordinary
        steps, values = np.concatenate([ordinary.steps, refused.steps]), np.concatenate([ordinary.values, refused.values])
        order = np.argsort(steps, kind="stable")
        return Series("scale", steps[order], values[order])

    @property
    def is_scaled(self) -> bool:
        """Whether the loss was multiplied by anything but 1."""
        return bool(len(self.scale) and np.any(self.scale.values != 1.0))

    @cached_property
    def lost(self) -> int:
        """How many steps were not applied."""
        told: list[int] = [m["skipped"] for m in self.records.metrics if type(m.get("skipped")) is int]
        return max([*told[-1:], len([m for m in self.refused if m["reason"] != "partly"]), len(self.events_of("skipped"))])

    @cached_property
    def counted(self) -> bool:
        """Whether the records tell of steps that were not applied, if there were any."""
        return bool(self.records.events) or any(key in m for m in self.records.metrics for key in ("skipped", "applied", "reason"))

    @cached_property
    def replayed(self) -> int:
        """How many steps were run again."""
        told: list[int] = [m["replayed"] for m in self.records.metrics if type(m.get("replayed")) is int]
        return max([*told[-1:], len(self.events_of("replayed"))])

    @cached_property
    def steps(self) -> int:
        """The last step."""
        return self.records.last_step

    def events_of(self, *kinds: str) -> list[RunEvent]:
        """The events of some kinds, in order."""
        return [event for event in self.records.events if event.kind in kinds]

    @cached_property
    def views(self) -> list[View]:
        """The maps of layers and steps."""
        return views(self.records.layers)

    @property
    def policy(self) -> str:
        """The precision as text; empty where it is not known."""
        config = self.records.config
        return self.records.environment.policy or str(config.get("precision") or config.get("mixed_precision") or "")


def named(runs: Sequence[RunRecords]) -> list[History]:
    """Histories with names that tell them apart: folders' own, with as many parents as that takes."""
    parts = [run.folder.resolve().parts for run in runs]
    deep = 1
    while deep < max(map(len, parts)) and len({p[-deep:] for p in parts}) < len(set(parts)):
        deep += 1
    return [History("/".join(p[-deep:]), run) for p, run in zip(parts, runs, strict=True)]
