"""`TrainingArguments`: the settings of a run, under the field names that users of transformers type."""

from __future__ import annotations

import functools
from dataclasses import FrozenInstanceError, asdict, dataclass, fields
from typing import Any

from halfstep.errors import ConfigError
from halfstep.policy import Policy, from_flags, parse
from halfstep.trainer.arguments import checks, values
from halfstep.trainer.arguments.learning import LossFields, OptimizerFields, ScheduleFields
from halfstep.trainer.arguments.machine import DistributedFields, PerformanceFields, PrecisionFields
from halfstep.trainer.arguments.names import NOT_CARRIED, translate
from halfstep.trainer.arguments.running import BatchFields, RunFields, SavingFields
from halfstep.trainer.arguments.watching import EvaluationFields, LoggingFields

GROUPS = (
    RunFields,
    BatchFields,
    OptimizerFields,
    ScheduleFields,
    LossFields,
    EvaluationFields,
    LoggingFields,
    SavingFields,
    PrecisionFields,
    PerformanceFields,
    DistributedFields,
)
"""The fields by topic, in the order in which help shows them."""

IN_THE_POLICY = {  # field: the policy's key for it
    "weights": "weights",
    "states": "states",
    "fp32_modules": "fp32",
    "loss_scale": "scale",
    "scale_strategy": "scale_strategy",
    "scale_window": "scale_window",
    "scale_floor": "scale_floor",
    "scale_ceiling": "scale_ceiling",
}


def finish(cls: type[TrainingArguments]) -> type[TrainingArguments]:
    """Let the constructor take old names (one note each) and refuse unknown ones; say how a frozen value is changed; tell every field."""
    made, known = cls.__init__, [f.name for f in fields(cls)]

    @functools.wraps(made)
    def __init__(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        made(self, *args, **translate(kwargs, known))

    def __setattr__(self: TrainingArguments, name: str, value: Any) -> None:  # noqa: N807
        raise FrozenInstanceError(f"{name} cannot be set: the settings of a run do not change. Use dataclasses.replace(args, {name}=...)")

    cls.__init__ = __init__  # type: ignore[method-assign]
    cls.__setattr__ = __setattr__  # type: ignore[method-assign,assignment]
    told = "\n\n".join((group.__doc__ or "").strip() for group in GROUPS)
    cls.__doc__ = f"{(cls.__doc__ or '').strip()}\n\n    {told}\n    "
    return cls


@finish
@dataclass(frozen=True)
class TrainingArguments(  # fields come in the order of the bases from the last one on
    DistributedFields,
    PerformanceFields,
    PrecisionFields,
    SavingFields,
    LoggingFields,
    EvaluationFields,
    LossFields,
    ScheduleFields,
    OptimizerFields,
    BatchFields,
    RunFields,
):
    """The settings of a training run; a frozen value (`dataclasses.replace` makes a changed one).

    Raises ConfigError for settings that contradict each other, that have no effect, or that are unknown.
    """

    def __post_init__(self) -> None:
        for name, value in values.plain(self):
            object.__setattr__(self, name, value)
        checks.check_types(self)
        checks.check_ranges(self)
        checks.check_together(self)
        _ = self.policy  # refuses what contradicts itself

    def __getattr__(self, name: str) -> Any:
        remedy = f" halfstep does not carry it. {NOT_CARRIED[name][1]}" if name in NOT_CARRIED else ""
        raise AttributeError(f"TrainingArguments has no {name!r}.{remedy}")

    @property
    def policy(self) -> Policy:
        """The precision policy that precision, fp16, bf16, tf32 and the fields beside them ask for."""
        policy = from_flags(precision=self.precision, fp16=self.fp16, bf16=self.bf16, tf32=self.tf32)
        extra = {key: values.as_text(given) for name, key in IN_THE_POLICY.items() if (given := getattr(self, name)) not in (None, [])}
        if not extra:
            return policy
        if policy.is_auto:
            raise ConfigError(f"precision='auto' and {next(iter(extra))}={next(iter(extra.values()))} were both given", "Name a precision.")
        text = str(policy)
        for name, key in IN_THE_POLICY.items():
            if key in extra and f",{key}=" in text:
                raise ConfigError(f"precision={self.precision!r} and {name}={extra[key]} were both given", "Leave one of them out.")
        return parse(",".join([text, *(f"{key}={value}" for key, value in extra.items())]))

    @property
    def order_seed(self) -> int:
        """What the order of the training data depends on: data_seed, or seed when that is not given."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def steps_between_evaluations(self) -> float:
        """eval_steps, or logging_steps when that is not given."""
        return self.eval_steps if self.eval_steps is not None else self.logging_steps

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)
