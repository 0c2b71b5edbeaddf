"""Which further arguments each learning rate schedule takes, and what they may be."""

from __future__ import annotations

import math
from typing import Any

from halfstep.errors import ConfigError, suggest

COUNT, SHARE, RATE, CYCLES = "a whole number of 1 or more", "a number from 0 to 1", "a number of 0 or more", "a number above 0"
SHAPES = "linear, cosine or 1-sqrt"
PLATEAU = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")  # torch checks them

TAKES: dict[str, dict[str, str]] = {
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine": {"num_cycles": CYCLES},
    "cosine_with_restarts": {"num_cycles": COUNT},
    "polynomial": {"lr_end": RATE, "power": CYCLES},
    "inverse_sqrt": {"timescale": COUNT},
    "cosine_with_min_lr": {"num_cycles": CYCLES, "min_lr": RATE, "min_lr_rate": SHARE},
    "warmup_stable_decay": {
        "num_decay_steps": COUNT,
        "num_stable_steps": RATE,
        "warmup_type": SHAPES,
        "decay_type": SHAPES,
        "min_lr_ratio": SHARE,
        "num_cycles": CYCLES,
    },
    "reduce_lr_on_plateau": dict.fromkeys(PLATEAU, ""),
}
"""lr_scheduler_type: its arguments, and what each of them must be."""


def check_schedule(args: Any) -> None:
    """Refuse a schedule's arguments that it does not take, that are out of range, or that it lacks; and a warm-up without effect."""
    kind, extra = args.lr_scheduler_type, args.lr_scheduler_kwargs or {}
    known = TAKES[kind]
    for name, value in extra.items():
        if name not in known:
            remedy = suggest(name, known) if known else "Leave lr_scheduler_kwargs out."
            raise ConfigError(f"lr_scheduler_type={kind!r} takes no {name!r} in lr_scheduler_kwargs", remedy)
        if not _fits(value, known[name]):
            raise ConfigError(f"{name}={value!r} in lr_scheduler_kwargs is out of range", f"Give it {known[name]}.")
    if kind == "warmup_stable_decay" and "num_decay_steps" not in extra:
        raise ConfigError("warmup_stable_decay does not know how long to decay", "Set lr_scheduler_kwargs={'num_decay_steps': ...}.")
    if kind == "cosine_with_min_lr" and ("min_lr" in extra) == ("min_lr_rate" in extra):
        raise ConfigError("cosine_with_min_lr takes one of min_lr and min_lr_rate", "Set lr_scheduler_kwargs={'min_lr_rate': 0.1}.")
    if args.warmup_steps and args.warmup_ratio:
        raise ConfigError("warmup_steps and warmup_ratio were both given", "Leave one of them out.")
    if kind in ("constant", "reduce_lr_on_plateau") and (args.warmup_steps or args.warmup_ratio):
        instead = "Use constant_with_warmup." if kind == "constant" else "Leave warmup_steps and warmup_ratio out."
        raise ConfigError(f"warm-up has no effect with lr_scheduler_type={kind!r}", instead)
    if kind == "reduce_lr_on_plateau" and args.eval_strategy == "no":
        raise ConfigError("lr_scheduler_type='reduce_lr_on_plateau' follows evaluations, and there are none", "Use eval_strategy='steps' or 'epoch'.")


def _fits(value: Any, wanted: str) -> bool:
    if not wanted:
        return True
    if wanted == SHAPES:
        return value in ("linear", "cosine", "1-sqrt")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return {COUNT: isinstance(value, int) and value >= 1, SHARE: 0 <= value <= 1, RATE: value >= 0, CYCLES: value > 0}[wanted]
