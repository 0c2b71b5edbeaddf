"""The learning rate over a run, on torch's schedulers. Times are applied steps; factors multiply the learning rate of the arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from halfstep.errors import ConfigError
from halfstep.trainer.arguments import TrainingArguments

Factor = Callable[[int], float]


def make_scheduler(optimizer: Optimizer, args: TrainingArguments, steps: int) -> LRScheduler:
    """The schedule of `args.lr_scheduler_type` over `steps` applied steps, warm-up included.

    Raises ConfigError where its arguments do not go with this learning rate or this number of steps.
    """
    extra = dict(args.lr_scheduler_kwargs) if isinstance(args.lr_scheduler_kwargs, dict) else {}
    if args.lr_scheduler_type == "reduce_lr_on_plateau":
        return _plateau(optimizer, args, extra)
    make = COURSES[args.lr_scheduler_type]
    course = make(args.get_warmup_steps(steps), steps, float(optimizer.defaults["lr"]), **extra)
    return LambdaLR(optimizer, course)


def follows_metric(scheduler: Any) -> bool:
    """Whether a schedule moves with evaluations and not with steps."""
    return isinstance(getattr(scheduler, "scheduler", scheduler), ReduceLROnPlateau)


def _plateau(optimizer: Optimizer, args: TrainingArguments, extra: dict[str, Any]) -> ReduceLROnPlateau:
    try:
        return ReduceLROnPlateau(optimizer, **{"mode": "max" if args.best_is_greatest else "min"} | extra)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reduce_lr_on_plateau refuses lr_scheduler_kwargs={extra}: {error}", "Change them.") from error


def _course(after: Callable[..., float], warmup: int, steps: int, rate: float, **extra: Any) -> Factor:
    """A rise from 0 over the warm-up, then `after`, a function of the share of the remaining steps that is done."""
    return functools.partial(_up_then, functools.partial(after, **extra), warmup, steps)


def _up_then(after: Factor, warmup: int, steps: int, step: int) -> float:
    if step < warmup:
        return step / warmup
    return after(min(1.0, (step - warmup) / max(1, steps - warmup)))  # type: ignore[arg-type]  # a share


def _linear(share: float) -> float:
    return 1.0 - share


def _level(share: float) -> float:
    return 1.0


def _cosine(share: float, num_cycles: float = 0.5, floor: float = 0.0) -> float:
    """Waves of a cosine between 1 and `floor`, `num_cycles` of them: half a wave goes down once."""
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * share))
    return max(0.0, wave * (1.0 - floor) + floor)


def _restarts(share: float, num_cycles: float = 1) -> float:
    """Half a cosine down to 0, `num_cycles` times, each from 1 again. Source: Loshchilov and Hutter, arXiv:1608.03983."""
    return 0.0 if share >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * (num_cycles * share % 1.0)))


def _polynomial(warmup: int, steps: int, rate: float, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    """Down to the rate lr_end along (1 - share)^power."""
    if not lr_end < rate:
        raise ConfigError(f"lr_end={lr_end} is not below learning_rate={rate}", "Use a smaller lr_end in lr_scheduler_kwargs.")
    return functools.partial(_up_then, functools.partial(_fall, low=lr_end, high=rate, power=power), warmup, steps)


def _fall(share: float, low: float, high: float, power: float) -> float:
    return ((high - low) * math.pow(1.0 - share, power) + low) / high


def _cosine_above(
    warmup: int, steps: int, rate: float, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> Factor:
    """Half a cosine down to min_lr, or to that share of the learning rate."""
    floor = min_lr / rate if min_lr is not None and rate else min_lr_rate or 0.0
    if not floor <= 1.0:
        raise ConfigError(f"min_lr={min_lr} is above learning_rate={rate}", "Use a smaller min_lr in lr_scheduler_kwargs.")
    return _course(_cosine, warmup, steps, rate, num_cycles=num_cycles, floor=floor)


def _inverse_root(warmup: int, steps: int, rate: float, timescale: int | None = None) -> Factor:
    """1 / sqrt(time), 1 at the end of the warm-up. Source: Vaswani et al., arXiv:1706.03762; timescale is how long it takes to fall to 0.7."""
    return functools.partial(_root, warmup, timescale or warmup or 10_000)


def _root(warmup: int, timescale: int, step: int) -> float:
    return step / warmup if step < warmup else 1.0 / math.sqrt((step - warmup + timescale) / timescale)


SHAPES: dict[str, Callable[[float], float]] = {  # from 0 to 1
    "linear": lambda share: share,
    "cosine": lambda share: 0.5 * (1.0 - math.cos(math.pi * share)),
    "1-sqrt": lambda share: 1.0 - math.sqrt(1.0 - share),
}


def _stable(
    warmup: int,
    steps: int,
    rate: float,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    """Up, level, down (WSD). Source: Hu et al., MiniCPM, arXiv:2404.06395."""
    level = num_stable_steps if num_stable_steps is not None else steps - warmup - num_decay_steps
    if level < 0:
        raise ConfigError(
            f"warm-up of {warmup} and decay of {num_decay_steps} steps are more than the {steps} of the run",
            "Use fewer num_decay_steps in lr_scheduler_kwargs.",
        )
    return functools.partial(_three, warmup, level, num_decay_steps, rise=warmup_type, fall=decay_type, floor=min_lr_ratio, num_cycles=num_cycles)


def _three(warmup: int, level: int, decay: int, step: int, *, rise: str, fall: str, floor: float, num_cycles: float) -> float:
    if step < warmup:
        factor = SHAPES[rise](step / warmup)
    elif step < warmup + level:
        return 1.0
    elif step < warmup + level + decay:
        share = (step - warmup - level) / decay
        down = {"linear": 1.0 - share, "cosine": _cosine(share, num_cycles), "1-sqrt": 1.0 - math.sqrt(share)}
        factor = down[fall]
    else:
        return floor
    return max(0.0, factor * (1.0 - floor) + floor)


COURSES: dict[str, Callable[..., Factor]] = {
    "linear": functools.partial(_course, _linear),
    "cosine": functools.partial(_course, _cosine),
    "cosine_with_restarts": functools.partial(_course, _restarts),
    "polynomial": _polynomial,
    "constant": functools.partial(_course, _level),
    "constant_with_warmup": functools.partial(_course, _level),
    "inverse_sqrt": _inverse_root,
    "cosine_with_min_lr": _cosine_above,
    "warmup_stable_decay": _stable,
}
"""What gives the factor of each kind: of (steps of warm-up, all steps, learning rate, **lr_scheduler_kwargs)."""
