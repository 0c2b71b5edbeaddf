"""`TrainingArguments`: the settings of a run, under the field names that users of transformers type."""

from __future__ import annotations

import functools
import math
import os
import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from halfstep.errors import ConfigError, suggest
from halfstep.policy import Policy, from_flags

OLD_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
Strategy = Literal["no", "steps", "epoch"]


def accept_spellings(cls: type[TrainingArguments]) -> type[TrainingArguments]:
    """Let the constructor take old names (one note each) and refuse unknown ones with the nearest match."""
    plain = cls.__init__

    @functools.wraps(plain)
    def __init__(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        plain(self, *args, **translate(kwargs))

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def translate(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` under today's names. Raises ConfigError for an unknown name, or for one given in both spellings."""
    known = {f.name for f in fields(TrainingArguments)}
    result: dict[str, Any] = {}
    for name, value in settings.items():
        new = OLD_NAMES.get(name, name)
        if new not in known:
            raise ConfigError(f"TrainingArguments has no field {name!r}", suggest(name, known | set(OLD_NAMES)))
        if new in result or (new != name and new in settings):
            raise ConfigError(f"{name} is the old name of {new}, and both were given", f"Leave {name} out.")
        if new != name:
            warnings.warn(f"{name} is now called {new}; it is read as that", DeprecationWarning, stacklevel=3)
        result[new] = value
    return result


@accept_spellings
@dataclass(frozen=True)
class TrainingArguments:
    """The settings of a training run; a frozen value (`dataclasses.replace` makes a changed one).

    Raises ConfigError for settings that contradict each other, that have no effect, or that are unknown.

    Args:
        output_dir: the run folder: config.yaml, metrics.jsonl, checkpoint-STEP.
        overwrite_output_dir: remove an earlier run's files from output_dir first.
        per_device_train_batch_size: samples per micro-batch.
        per_device_eval_batch_size: samples per evaluation batch.
        gradient_accumulation_steps: micro-batches per optimizer step.
        num_train_epochs: passes over the training data, when max_steps is not given.
        max_steps: optimizer steps to apply; -1 means as many as the epochs have.
        learning_rate: at its highest, after warm-up.
        weight_decay: decoupled; not on biases and norms (parameters of fewer than two dimensions).
        adam_beta1: decay of AdamW's first moment.
        adam_beta2: decay of AdamW's second moment.
        adam_epsilon: AdamW's epsilon.
        max_grad_norm: clip unscaled gradients to this norm; 0 for no clipping.
        optim: adamw_torch_fused, adamw_torch, adamw_halfstep (halfstep.optim.AdamW) or sgd; auto is adamw_torch_fused for fp32 weights and states,
            adamw_halfstep for 16-bit weights or other states. A torch optimizer is wrapped where weights or states need it.
        lr_scheduler_type: linear, cosine, constant or constant_with_warmup; advances with applied steps.
        warmup_steps: steps over which the learning rate rises from 0.
        warmup_ratio: the same as a share of all steps.
        eval_strategy: evaluate never (no), every eval_steps (steps) or after each epoch.
        eval_on_start: evaluate before the first step too.
        eval_steps: applied steps between evaluations; logging_steps when not given.
        logging_strategy: log never, every logging_steps or after each epoch.
        logging_steps: applied steps between log lines.
        log_stalled: at each of these, measure and log the share of updates that rounded away (a copy of the weights during that step).
        save_strategy: save checkpoints never, every save_steps or after each epoch; and at the end.
        save_steps: applied steps between checkpoints.
        save_total_limit: keep so many of the newest checkpoints; all when not given.
        seed: of Python's, numpy's and torch's random numbers.
        data_seed: of the order of the training data; seed when not given.
        fp16: the same as precision=fp16-mixed.
        bf16: the same as precision=bf16-mixed.
        tf32: fp32 products on the GPU in tf32; refused where the device has none.
        precision: a policy such as bf16-mixed or "fp16-mixed,scale=static:1024,fp32=lm_head".
        on_overflow: what follows when fp16 gradients overflow: "replay" the step's micro-batches at a lower loss scale, "skip" the
            step, or "raise" StepRefusedError.
        heal: what follows when a module's outputs do not fit 16 bits: "pin" holds it in fp32 from then on, runs the step again, and writes the
            module to rules.yaml; "skip" the step, naming the module; or "raise" StepRefusedError.
        rules: a rules.yaml of an earlier run: its modules are held in fp32 from the start. Not given: with
            heal="pin" that of output_dir, if there is one (overwrite_output_dir leaves it there; remove it to begin without).
        max_bad_steps: so many steps in a row that could not be applied end the run with DivergedError.
        use_cpu: train on the CPU although there is a GPU.
        disable_tqdm: no progress bar.
        dataloader_drop_last: leave out a last, smaller batch.
        dataloader_num_workers: worker processes of the data loaders.
        remove_unused_columns: leave out columns that the model's forward does not take.
        label_names: the columns that are labels; "labels" when not given.
        resume_from_checkpoint: a checkpoint folder to go on from.
        report_to: "none": the numbers go to metrics.jsonl.
    """

    output_dir: str = "trainer_output"
    overwrite_output_dir: bool = False
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: Literal["auto", "adamw_torch_fused", "adamw_torch", "adamw_halfstep", "sgd"] = "auto"
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    eval_strategy: Strategy = "no"
    eval_on_start: bool = False
    eval_steps: int | None = None
    logging_strategy: Strategy = "steps"
    logging_steps: int = 500
    log_stalled: bool = False
    save_strategy: Strategy = "steps"
    save_steps: int = 500
    save_total_limit: int | None = None
    seed: int = 42
    data_seed: int | None = None
    fp16: bool = False
    bf16: bool = False
    tf32: bool | None = None
    precision: str | None = None
    on_overflow: Literal["replay", "skip", "raise"] = "replay"
    heal: Literal["pin", "skip", "raise"] = "pin"
    rules: str | None = None
    max_bad_steps: int = 50
    use_cpu: bool = False
    disable_tqdm: bool = False
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    resume_from_checkpoint: str | None = None
    report_to: str | list[str] | None = "none"

    def __post_init__(self) -> None:
        for name in ("output_dir", "resume_from_checkpoint", "precision", "rules"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike | Policy):
                object.__setattr__(self, name, str(value))
        _check_types(self)
        if not self.output_dir:
            raise ConfigError("output_dir is empty", "Name a folder for the run.")
        _check_numbers(self)
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError("warmup_steps and warmup_ratio were both given", "Leave one of them out.")
        if self.eval_steps is not None and self.eval_strategy != "steps":
            raise ConfigError(f"eval_steps={self.eval_steps} has no effect with eval_strategy={self.eval_strategy!r}", "Use eval_strategy='steps'.")
        if self.log_stalled and self.logging_strategy != "steps":
            raise ConfigError("log_stalled=True measures every logging_steps-th step", "Use logging_strategy='steps'.")
        if self.report_to not in (None, "none", [], ["none"]):
            raise ConfigError(f"report_to={self.report_to!r} is not supported", "Use 'none' and read metrics.jsonl, or write a TrainerCallback.")
        _ = self.policy  # refuses what contradicts itself

    @property
    def policy(self) -> Policy:
        """The precision policy that precision, fp16, bf16 and tf32 ask for."""
        return from_flags(precision=self.precision, fp16=self.fp16, bf16=self.bf16, tf32=self.tf32)

    @property
    def order_seed(self) -> int:
        """What the order of the training data depends on: data_seed, or seed when that is not given."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def steps_between_evaluations(self) -> int:
        """eval_steps, or logging_steps when that is not given."""
        return self.eval_steps if self.eval_steps is not None else self.logging_steps

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


def _check_types(args: TrainingArguments) -> None:
    """Refuse a value that is not of its field's type, or not among its choices."""
    for name, hint in get_type_hints(TrainingArguments).items():
        value = getattr(args, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ConfigError(f"{name}={value!r} is not known", suggest(str(value), get_args(hint)))
        if name == "label_names" and not (value is None or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))):
            raise ConfigError(f"label_names={value!r} is not a list of column names", "Write for example label_names=['labels'].")
        kind = next((t for t in (int, float, bool, str) if hint in (t, t | None)), None)
        if kind is None or (value is None and hint != kind):
            continue
        fits = isinstance(value, (int, kind) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
        if not fits:
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}", f"Give it {ARTICLES[kind]}.")


ARTICLES = {int: "an int", float: "a float", bool: "a bool", str: "a str"}

AT_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "save_steps": 1,
    "eval_steps": 1,
    "save_total_limit": 1,
    "max_bad_steps": 1,
    "dataloader_num_workers": 0,
    "warmup_steps": 0,
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_ratio": 0,
}


def _check_numbers(args: TrainingArguments) -> None:
    for name, least in AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{name}={value} is too small", f"Use {least} or more.")
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{name}={value} is no finite number", "Give it one.")
    if args.max_steps == 0 or args.max_steps < -1:
        raise ConfigError(f"max_steps={args.max_steps}", "Use 1 or more, or -1 for as many as num_train_epochs gives.")
    if args.max_steps == -1 and not args.num_train_epochs > 0:
        raise ConfigError(f"num_train_epochs={args.num_train_epochs} trains nothing", "Use more than 0.")
    if args.warmup_ratio > 1:
        raise ConfigError(f"warmup_ratio={args.warmup_ratio} is more than the whole run", "Use a share between 0 and 1.")
