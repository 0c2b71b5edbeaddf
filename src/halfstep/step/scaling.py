"""The loss scale as a small state machine: none, static or dynamic, with one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from halfstep.errors import ConfigError
from halfstep.policy import LARGEST_SCALE, LossScale, power_of_two


class Scaling(Protocol):
    """What a step engine needs of a loss scale."""

    scale: float

    @property
    def active(self) -> bool:
        """Whether losses are multiplied at all."""

    def after(self, overflow: bool) -> float:
        """The scale that would follow a step with or without overflow; changes nothing."""

    def update(self, overflow: bool) -> None:
        """Move on after a step."""


@dataclass
class NoScaling:
    """Losses as they are: fp32 and bf16."""

    scale: float = 1.0

    @property
    def active(self) -> bool:
        """False: nothing is multiplied."""
        return False

    def after(self, overflow: bool) -> float:
        """1."""
        return 1.0

    def update(self, overflow: bool) -> None:
        """Nothing changes."""


@dataclass
class StaticScaling:
    """The same scale for ever."""

    scale: float

    @property
    def active(self) -> bool:
        """True."""
        return True

    def after(self, overflow: bool) -> float:
        """The same scale."""
        return self.scale

    def update(self, overflow: bool) -> None:
        """Nothing changes."""


@dataclass
class DynamicScaling:
    """Times `backoff` after an overflow, times `growth` after `window` good steps in a row, always in [`floor`, `ceiling`].

    All are powers of two, so scaling and unscaling are exact. Source: Micikevicius et al., arXiv:1710.03740, section 3.2.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000
    floor: float = 1.0
    ceiling: float = LARGEST_SCALE
    good: int = 0  # good steps since the last change

    def __post_init__(self) -> None:
        for key in ("scale", "growth", "floor", "ceiling"):
            power_of_two(key, getattr(self, key))
        power_of_two("1 / backoff", 1 / self.backoff if self.backoff else 0.0)
        if self.growth < 1 or self.backoff > 1:
            raise ConfigError(
                f"a scale that grows by {self.growth:g} and backs off by {self.backoff:g}", "Use growth 1 or more and backoff 1 or less."
            )
        if self.window < 1:
            raise ConfigError(f"a growth interval of {self.window} steps", "Use 1 or more.")
        if not self.floor <= self.scale <= self.ceiling:
            raise ConfigError(
                f"loss scale {self.scale:g} lies outside [{self.floor:g}, {self.ceiling:g}]", "Move the floor, the ceiling or the start."
            )

    @property
    def active(self) -> bool:
        """True."""
        return True

    def after(self, overflow: bool) -> float:
        """The scale that would follow a step with or without overflow."""
        if overflow:
            return max(self.floor, self.scale * self.backoff)
        if self.good + 1 >= self.window:
            return min(self.ceiling, self.scale * self.growth)
        return self.scale

    def update(self, overflow: bool) -> None:
        """Move on after a step."""
        self.scale, self.good = self.after(overflow), 0 if overflow or self.good + 1 >= self.window else self.good + 1


def scaling_for(spec: LossScale) -> Scaling:
    """The state machine that a policy's loss scale describes, at its start."""
    if spec.kind == "none":
        return NoScaling()
    if spec.kind == "static":
        return StaticScaling(spec.init)
    return DynamicScaling(spec.init, window=spec.window, floor=spec.floor, ceiling=spec.ceiling)
