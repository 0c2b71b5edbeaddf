"""The loss scale as a state machine."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigError
from halfstep.policy import LARGEST_SCALE, LossScale
from halfstep.step import DynamicScaling, FollowingScaling, NoScaling, Scaling, StaticScaling, scaling_for

quick = settings(deadline=None, max_examples=100, derandomize=True, database=None)


@st.composite
def dynamics(draw: st.DrawFn) -> DynamicScaling:
    floor, start, ceiling = sorted(draw(st.lists(st.integers(-4, 32), min_size=3, max_size=3)))
    growth, backoff = 2.0 ** draw(st.integers(0, 3)), 2.0 ** -draw(st.integers(0, 3))
    return DynamicScaling(2.0**start, growth, backoff, draw(st.integers(1, 6)), 2.0**floor, 2.0**ceiling)


@quick
@given(dynamics(), st.lists(st.booleans(), max_size=60))
def test_a_dynamic_scale_is_always_a_power_of_two_between_floor_and_ceiling(scaling: DynamicScaling, overflows: list[bool]) -> None:
    for overflow in overflows:
        before, promised = scaling.scale, scaling.after(overflow)
        assert scaling.scale == before, "after() changes nothing"
        scaling.update(overflow)
        assert scaling.scale == promised
        assert scaling.floor <= scaling.scale <= scaling.ceiling
        assert math.frexp(scaling.scale)[0] == 0.5
        assert scaling.scale <= before if overflow else scaling.scale >= before
        assert 0 <= scaling.good < scaling.window


@quick
@given(dynamics())
def test_a_dynamic_scale_grows_after_exactly_window_good_steps(scaling: DynamicScaling) -> None:
    scaling.update(overflow=True)
    start = scaling.scale
    seen = []
    for _ in range(scaling.window):
        seen.append(scaling.scale)
        scaling.update(overflow=False)
    assert seen == [start] * scaling.window
    assert scaling.scale == min(scaling.ceiling, start * scaling.growth)


def test_an_overflow_starts_the_count_anew() -> None:
    scaling = DynamicScaling(1024.0, window=3)
    for overflow in (False, False, True, False, False):
        scaling.update(overflow)
    assert scaling.scale == 512.0
    scaling.update(overflow=False)
    assert scaling.scale == 1024.0


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize(("scaling", "scale", "active"), [(NoScaling(), 1.0, False), (StaticScaling(1024.0), 1024.0, True)], ids=["none", "static"])
def test_no_and_static_scaling_never_move(scaling: Scaling, scale: float, active: bool, overflow: bool) -> None:
    for _ in range(3):
        assert scaling.after(overflow) == scaling.scale == scale
        scaling.update(overflow)
    assert scaling.active == active


def test_a_policys_loss_scale_gives_its_machine() -> None:
    assert scaling_for(LossScale()) == NoScaling()
    assert scaling_for(LossScale("static", 256.0)) == StaticScaling(256.0)
    for strategy, kind in (("stock", DynamicScaling), ("follow", FollowingScaling)):
        assert scaling_for(LossScale("dynamic", 256.0, 2.0, 1024.0, 7, strategy)) == kind(256.0, 2.0, 0.5, 7, 2.0, 1024.0)
        assert scaling_for(LossScale("dynamic", strategy=strategy)) == kind()
    assert LossScale("dynamic").strategy == "follow"
    assert DynamicScaling().ceiling == LARGEST_SCALE


REFUSED = [
    ({"scale": 1000.0}, "scale=1000", "1024"),
    ({"scale": math.inf}, "scale=inf", "power of two"),
    ({"scale": 0.0}, "scale=0", "power of two"),
    ({"scale": -2.0}, "scale=-2", "power of two"),
    ({"scale": 2.0**33, "ceiling": 2.0**33}, "2^32", "2^32 or less"),
    ({"growth": 1.5}, "growth=1.5", "2"),
    ({"growth": 0.5}, "grows by 0.5", "growth 1 or more"),
    ({"backoff": 2.0}, "backs off by 2", "backoff 1 or less"),
    ({"backoff": 0.3}, "backoff", "4"),
    ({"backoff": 0.0}, "backoff", "power of two"),
    ({"window": 0}, "growth interval of 0", "1 or more"),
    ({"floor": 3.0}, "floor=3", "4"),
    ({"ceiling": 100.0}, "ceiling=100", "128"),
    ({"floor": 2.0**17}, "65536 lies outside", "Move the floor"),
    ({"ceiling": 2.0**10}, "65536 lies outside", "ceiling"),
]


@pytest.mark.parametrize(("arguments", "cause", "remedy"), REFUSED, ids=[str(a) for a, _, _ in REFUSED])
def test_refusals_name_cause_and_remedy(arguments: dict[str, float], cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DynamicScaling(**arguments)  # type: ignore[arg-type]
    assert cause in caught.value.cause
    assert remedy in caught.value.remedy
