"""`TrainingArguments`: the settings of a run, under the field names that users of transformers type."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError
from halfstep.policy import Policy, from_flags, parse
from halfstep.trainer.arguments import checks, texts, values
from halfstep.trainer.arguments.here import Here
from halfstep.trainer.arguments.learning import AverageFields, LossFields, OptimizerFields, ScheduleFields
from halfstep.trainer.arguments.machine import DistributedFields, PerformanceFields, PrecisionFields
from halfstep.trainer.arguments.names import NOT_CARRIED, translate
from halfstep.trainer.arguments.running import BatchFields, RunFields, SavingFields
from halfstep.trainer.arguments.watching import EvaluationFields, LoggingFields

GROUPS = (
    RunFields,
    BatchFields,
    OptimizerFields,
    ScheduleFields,
    AverageFields,
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
    "activations": "activations",
    "fp32_modules": "fp32",
    "loss_scale": "scale",
    "scale_strategy": "scale_strategy",
    "scale_window": "scale_window",
    "scale_floor": "scale_floor",
    "scale_ceiling": "scale_ceiling",
}


PLANNED = "_planned"  # the attribute with the policies of the plan: as it is to be trained in, and without the modules and the scale found


def _policy_planned(plan: Any) -> tuple[Policy, Policy] | None:
    """The policies of a plan that is given as a file or as plain values; None for none."""
    if plan is None:
        return None
    from halfstep.diagnostics.planned import Plan  # only for those who have one

    found = Plan.load(plan) if isinstance(plan, str) else Plan.from_dict(plan, "plan=")
    return found.policy, parse(found.precision)


def _shown(plan: Any) -> str:
    return plan if isinstance(plan, str) else "Plan(...)"


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
    AverageFields,
    ScheduleFields,
    OptimizerFields,
    BatchFields,
    RunFields,
    Here,
):
    """The settings of a training run; a frozen value (`dataclasses.replace` makes a changed one).

    Raises ConfigError for settings that contradict each other, that have no effect, or that are unknown.
    """

    def __post_init__(self) -> None:
        for name, value in values.plain(self):
            object.__setattr__(self, name, value)
        checks.check_types(type(self), vars(self))
        object.__setattr__(self, PLANNED, _policy_planned(self.plan))
        checks.check_ranges(self)
        checks.check_together(self)
        kept = self.policy.activations  # the policy refuses what contradicts itself
        if self.torch_compile and kept != "full":
            raise ConfigError(
                f"activations={kept} has no effect with torch_compile=True, whose graphs decide what they keep",
                "Leave one of them out; gradient_checkpointing=True saves memory in a compiled model.",
            )

    def __getattr__(self, name: str) -> Any:
        remedy = f" halfstep does not carry it. {NOT_CARRIED[name][1]}" if name in NOT_CARRIED else ""
        raise AttributeError(f"TrainingArguments has no {name!r}.{remedy}")

    @property
    def policy(self) -> Policy:
        """The precision policy that precision, fp16, bf16, tf32 and the fields beside them ask for."""
        policy = self._base()
        extra = {key: values.as_text(given) for name, key in IN_THE_POLICY.items() if (given := getattr(self, name)) not in (None, [])}
        if not extra:
            return policy
        if policy.is_auto:
            raise ConfigError(f"precision='auto' and {next(iter(extra))}={next(iter(extra.values()))} were both given", "Name a precision.")
        text = str(policy)
        for name, key in IN_THE_POLICY.items():
            if key in extra and f",{key}=" in text:
                whose = f"plan={_shown(self.plan)}" if self.plan is not None else f"precision={self.precision!r}"
                raise ConfigError(f"{whose} and {name}={extra[key]} were both given", "Leave one of them out.")
        return parse(",".join([text, *(f"{key}={value}" for key, value in extra.items())]))

    def _base(self) -> Policy:
        """The policy of the plan, or that which precision, fp16, bf16 and tf32 ask for. Raises ConfigError where they contradict each other."""
        asked = from_flags(precision=self.precision, fp16=self.fp16, bf16=self.bf16, tf32=self.tf32)
        planned: tuple[Policy, Policy] | None = getattr(self, PLANNED)
        if planned is None:
            return asked
        if self.precision is None and not (self.fp16 or self.bf16 or self.tf32):
            return planned[0]
        if asked not in planned:
            raise ConfigError(
                f"plan={_shown(self.plan)} is for {planned[1]}, and {asked} was asked for beside it",
                "Leave the precision out, or make a plan for it: halfstep plan --precision TEXT.",
            )
        return planned[0]

    @property
    def order_seed(self) -> int:
        """What the order of the training data depends on: data_seed, or seed when that is not given."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def steps_between_evaluations(self) -> float:
        """eval_steps, or logging_steps when that is not given."""
        return self.eval_steps if self.eval_steps is not None else self.logging_steps

    @property
    def train_batch_size(self) -> int:
        """Samples per micro-batch on this rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples per evaluation batch on this rank."""
        return self.per_device_eval_batch_size

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of warm-up in a run of so many: warmup_steps, or the share of all steps that it or warmup_ratio says, rounded up."""
        share = self.warmup_steps or self.warmup_ratio
        return int(share) if self.warmup_steps >= 1 else math.ceil(share * num_training_steps)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> TrainingArguments:
        """Arguments from a mapping of names and values; texts are read by the types of their fields, as on a command line.

        Raises ConfigError as the constructor does.
        """
        kind: Any = cls
        return cls(**texts.read_all(checks.hints_of(kind), settings))

    @classmethod
    def from_file(cls, path: str | Path) -> TrainingArguments:
        """Arguments from a YAML or JSON file, such as the config.yaml of a run. Raises ConfigError when it cannot be read, and as the constructor."""
        return cls.from_dict(texts.read_file(Path(path)))

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, which YAML and JSON hold and `from_dict` reads."""
        return asdict(self)

    def to_json_string(self) -> str:
        """All fields as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All fields as numbers, truth values and texts, for loggers that take no others; lists, dicts and None as text."""
        plain = self.to_dict() | {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in plain.items()}
