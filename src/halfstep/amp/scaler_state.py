"""The saved state of a loss scaler: torch's keys, and what is ours beside them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halfstep.errors import CheckpointError
from halfstep.step import DynamicScaling, FollowingScaling, StepEngine


def state_of(engine: StepEngine) -> dict[str, Any]:
    """The state under torch's keys, with what is ours beside them; empty when scaling is off."""
    engine.settle()
    scaling = engine.scaling
    if not scaling.active:
        return {}
    state: dict[str, Any] = {"scale": scaling.scale, "bad_steps": engine.bad_steps}
    if isinstance(scaling, DynamicScaling):
        state |= {
            "growth_factor": scaling.growth,
            "backoff_factor": scaling.backoff,
            "growth_interval": scaling.window,
            "_growth_tracker": scaling.good,
            "floor": scaling.floor,
            "ceiling": scaling.ceiling,
        }
    if isinstance(scaling, FollowingScaling):
        fallen = scaling.scale if scaling.upcoming is None else scaling.upcoming
        state |= {"scale": fallen, "limit": scaling.limit, "peak": scaling.peak, "falls": scaling.falls, "calibrated": scaling.calibrated}
    return state


def load_into(engine: StepEngine, state_dict: Mapping[str, Any]) -> None:
    """Take over a state from `state_dict()` or from `torch.amp.GradScaler`'s. Nothing is changed when it does not fit.

    A scale that is not a power of two (torch allows that) is rounded down to one, with a warning. An empty state (saved without
    a scaler, or with one that was off) is announced with a warning, and the next loss calibrates the scale.
    Raises CheckpointError for a state without a scale, or with one that no run can go on from.
    """
    if not engine.scaling.active:
        return
    if not state_dict and isinstance(engine.scaling, FollowingScaling):
        warnings.warn(
            f"the checkpoint holds no loss scale; the next loss calibrates it anew, from {engine.scaling.scale:g} on",
            stacklevel=3,
        )
        engine.scaling.calibrated = False
        return
    if "scale" not in state_dict:
        raise CheckpointError(
            "the state holds no loss scale: it was saved without a scaler, or with one that was off",
            "Leave load_state_dict out to start from init_scale, or save the state of an enabled scaler.",
        )
    scaling, scale = engine.scaling, float(state_dict["scale"])
    if not scale > 0:
        raise CheckpointError(f"the saved loss scale is {scale:g}: the run it comes from had failed", "Use an older checkpoint.")
    if isinstance(scaling, DynamicScaling):
        floor, ceiling = float(state_dict.get("floor", scaling.floor)), float(state_dict.get("ceiling", scaling.ceiling))
        usable = _round_down(min(max(scale, floor), ceiling))
        loaded = replace(
            scaling,
            scale=usable,
            growth=float(state_dict.get("growth_factor", scaling.growth)),
            backoff=float(state_dict.get("backoff_factor", scaling.backoff)),
            window=int(state_dict.get("growth_interval", scaling.window)),
            floor=floor,
            ceiling=ceiling,
            good=int(state_dict.get("_growth_tracker", 0)),
        )
        if isinstance(loaded, FollowingScaling):  # torch's state has none of these: its scale is taken as found
            loaded.limit, loaded.peak = float(state_dict.get("limit", loaded.limit)), float(state_dict.get("peak", 0.0))
            loaded.falls = int(state_dict.get("falls", 0))
            loaded.calibrated, loaded.upcoming = bool(state_dict.get("calibrated", True)), None
        engine.scaling = loaded
    else:
        usable = _round_down(scale)
        scaling.scale = usable
    if usable != scale:
        warnings.warn(f"the saved loss scale {scale:g} is not a power of two inside [floor, ceiling]; going on with {usable:g}", stacklevel=3)
    engine.bad_steps = int(state_dict.get("bad_steps", 0))


def _round_down(scale: float) -> float:
    """The largest power of two that is not above `scale`."""
    return 2.0 ** (math.frexp(scale)[1] - 1)
