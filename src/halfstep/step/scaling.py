"""The loss scale as a small state machine: none, static, dynamic or following, with one interface."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from halfstep.errors import ConfigError
from halfstep.policy import LARGEST_SCALE, LossScale, power_of_two

HEAD_ROOM = 16.0  # how far the largest gradient stays below what is known to be safe
UNDERFLOW = 0.01  # share of subnormal gradients above which the scale grows without waiting for its window
SETTLING, PERIOD = 8, 16  # gradients are measured in each of the first steps after a change, then in every PERIOD-th


@dataclass(frozen=True)
class Seen:
    """What the gradients of a good step were like: largest magnitude (still scaled), subnormal share, and the scale they were made under."""

    peak: float
    share: float
    scale: float


class Scaling(Protocol):
    """What a step engine needs of a loss scale."""

    scale: float

    @property
    def floor(self) -> float:
        """The lowest scale."""

    @property
    def active(self) -> bool:
        """Whether losses are multiplied at all."""

    @property
    def senses(self) -> bool:
        """Whether peak and subnormal share of the next gradients are wanted."""

    @property
    def wants_calibration(self) -> bool:
        """Whether the scale should be found by probing before it is used."""

    def after(self, overflow: bool, seen: Seen | None = None) -> float:
        """The scale that would follow a step with or without overflow; changes nothing."""

    def update(self, overflow: bool, seen: Seen | None = None) -> None:
        """Move on after a step."""

    def lower(self, scale: float) -> None:
        """A step went through at this lower scale after it had overflowed at the one before."""

    def begin(self) -> None:
        """The next loss is about to be scaled."""


@dataclass
class NoScaling:
    """Losses as they are: fp32 and bf16."""

    scale: float = 1.0
    floor = 1.0
    active = False
    senses = False
    wants_calibration = False

    def after(self, overflow: bool, seen: Seen | None = None) -> float:
        """1."""
        return 1.0

    def update(self, overflow: bool, seen: Seen | None = None) -> None:
        """Nothing changes."""

    def lower(self, scale: float) -> None:
        """Nothing changes."""

    def begin(self) -> None:
        """Nothing changes."""


@dataclass
class StaticScaling:
    """The same scale for ever."""

    scale: float
    active = True

    @property
    def floor(self) -> float:
        """The scale itself: there is no lower one."""
        return self.scale

    senses = False
    wants_calibration = False

    def after(self, overflow: bool, seen: Seen | None = None) -> float:
        """The same scale."""
        return self.scale

    def update(self, overflow: bool, seen: Seen | None = None) -> None:
        """Nothing changes."""

    def lower(self, scale: float) -> None:
        """Nothing changes."""

    def begin(self) -> None:
        """Nothing changes."""


@dataclass
class DynamicScaling:
    """torch's rule: times `backoff` after an overflow, times `growth` after `window` good steps in a row, always in [`floor`, `ceiling`].

    All are powers of two, so scaling and unscaling are exact. Source: Micikevicius et al., arXiv:1710.03740, section 3.2.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000
    floor: float = 1.0
    ceiling: float = LARGEST_SCALE
    good: int = 0  # good steps since the last change

    active = True

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
    def senses(self) -> bool:
        """False: torch's rule looks at overflows only."""
        return False

    @property
    def wants_calibration(self) -> bool:
        """False: it starts where it is told to."""
        return False

    def after(self, overflow: bool, seen: Seen | None = None) -> float:
        """The scale that would follow a step with or without overflow."""
        if overflow:
            return max(self.floor, self.scale * self.backoff)
        if self.good + 1 >= self.window:
            return min(self.ceiling, self.scale * self.growth)
        return self.scale

    def update(self, overflow: bool, seen: Seen | None = None) -> None:
        """Move on after a step."""
        self.scale, self.good = self.after(overflow), 0 if overflow or self.good + 1 >= self.window else self.good + 1

    def lower(self, scale: float) -> None:
        """Go on from this scale."""
        self.scale, self.good = scale, 0

    def begin(self) -> None:
        """Nothing changes."""


@dataclass
class FollowingScaling(DynamicScaling):
    """A scale that is calibrated in the first backward pass and then follows the gradients, so that it need not overflow to be found.

    limit: the largest scaled gradient that is known to be safe, activation gradients included: where a probe or a step with
    such a gradient went through. The largest gradient is kept HEAD_ROOM (16) times below it:

    - overflow: the scale falls by `backoff`, at a second one soon after by its square, then its fourth power; and the next loss
      calibrates the scale again, from there downwards, so that one step is lost and not several;
    - the largest gradient comes within a factor of 2 of the limit: the scale falls until the head room is there again, before anything
      overflows. It falls at the next loss and not in `update`, where scripts take a lower scale for a step that was skipped;
    - more than 1 % of the non-zero gradients are subnormal in fp16: the scale doubles at once if a head room of 4 is left;
    - `window` good steps in a row: it doubles if the head room is left.
    """

    limit: float = 32768.0
    peak: float = 0.0  # the largest gradient at today's scale since the last change
    calibrated: bool = False
    upcoming: float | None = None  # what the next loss lowers the scale to
    falls: int = 0  # overflows with hardly a good step between them

    @property
    def senses(self) -> bool:
        """In the first steps after a change, then every PERIOD-th."""
        return self.good < SETTLING or self.good % PERIOD == PERIOD - 1 or self.good + 1 >= self.window

    @property
    def wants_calibration(self) -> bool:
        """Until it was calibrated, and again after an overflow."""
        return not self.calibrated

    def calibrate(self, scale: float, limit: float) -> None:
        """Start from `scale`; gradients of magnitude `limit` (scaled) went through a probe."""
        self.scale, self.limit, self.peak, self.good, self.calibrated, self.upcoming = scale, limit, 0.0, 0, True, None

    def after(self, overflow: bool, seen: Seen | None = None) -> float:
        """The scale that would follow such a step."""
        return replace(self, falls=min(self.falls + 1, 5))._following(True, seen)[0] if overflow else self._following(False, seen)[0]

    def update(self, overflow: bool, seen: Seen | None = None) -> None:
        """Move on after a step."""
        if overflow:
            self.limit, self.calibrated = max(self.limit / 2, 1.0), False
            self.falls = min(self.falls + 1, 5)
        elif seen is not None:
            self.limit = max(self.limit, seen.peak)
            self.peak = max(self.peak, seen.peak * self.scale / seen.scale)
        if not overflow and self.good + 1 >= SETTLING:
            self.falls = 0
        scale, restart = self._following(overflow, seen)
        changed = scale != self.scale
        if scale < self.scale and not overflow:
            self.upcoming, scale = scale, self.scale
        self.scale, self.good = scale, 0 if restart or changed else self.good + 1
        self.peak = 0.0 if restart or changed else self.peak

    def lower(self, scale: float) -> None:
        """Go on from this scale, with a lower limit: gradients that were not measured had overflowed."""
        self.limit, self.peak = max(self.limit * min(scale / self.scale, 0.5), 1.0), 0.0
        self.upcoming, self.calibrated = None, False
        super().lower(scale)

    def begin(self) -> None:
        """Fall to where the last step said."""
        if self.upcoming is not None:
            self.scale, self.upcoming = self.upcoming, None

    def _following(self, overflow: bool, seen: Seen | None) -> tuple[float, bool]:
        """The next scale, and whether the count of good steps starts again."""
        if overflow:
            return max(self.floor, self.scale * self.backoff ** (2 ** max(0, self.falls - 1))), True
        limit = max(self.limit, seen.peak if seen else 0.0)
        now = seen.peak * self.scale / seen.scale if seen else 0.0
        peak = max(self.peak, now)
        if now > limit / 2:
            excess = math.ceil(math.log2(now * HEAD_ROOM / limit))
            return max(self.floor, self.scale / 2.0**excess), True
        larger = min(self.ceiling, self.scale * self.growth)
        room = limit / (peak * self.growth) if peak else math.inf
        if seen is not None and seen.share > UNDERFLOW and room >= 4.0 and self.good + 1 >= SETTLING:
            return larger, True
        if self.good + 1 >= self.window:
            return (larger if room >= HEAD_ROOM else self.scale), True
        return self.scale, False


def scaling_for(spec: LossScale) -> Scaling:
    """The state machine that a policy's loss scale describes, at its start."""
    if spec.kind == "none":
        return NoScaling()
    if spec.kind == "static":
        return StaticScaling(spec.init)
    kind = FollowingScaling if spec.strategy == "follow" else DynamicScaling
    return kind(spec.init, window=spec.window, floor=spec.floor, ceiling=spec.ceiling)
