"""What is refused: values of the wrong type or out of range, and settings that contradict each other or have no effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from halfstep.errors import ConfigError, suggest
from halfstep.trainer.arguments.optimizers import check_optimizer
from halfstep.trainer.arguments.schedules import check_schedule
from halfstep.trainer.arguments.texts import choices_of, options_of
from halfstep.trainer.arguments.values import SPACED

ARTICLES = {int: "an int", float: "a float", bool: "a bool", str: "a str"}
REPORTERS = ("none", "all", "tensorboard", "wandb", "mlflow")

AT_LEAST: dict[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "save_total_limit": 1,
    "max_bad_steps": 1,
    "scale_window": 1,
    "eval_accumulation_steps": 1,
    "dataloader_prefetch_factor": 1,
    "ddp_bucket_cap_mb": 1,
    "ddp_timeout": 1,
    "dataloader_num_workers": 0,
    "warmup_steps": 0,
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_ratio": 0,
    "eval_delay": 0,
    "adam_beta1": 0,
    "adam_beta2": 0,
    "adam_epsilon": 0,
    "label_smoothing_factor": 0,
    "neftune_noise_alpha": 0,
    "ema_decay": 0,
    "seed": 0,
    "data_seed": 0,
    "record_every": 0,
}
BELOW: dict[str, float] = {"ema_decay": 1, "adam_beta1": 1, "adam_beta2": 1, "label_smoothing_factor": 1, "seed": 2**32, "ddp_timeout": 2**31}
COUNTED = 2**63  # numbers that Python's and torch's counters hold are below it
NEVER_ZERO = ("logging_steps", "eval_steps", "save_steps", "neftune_noise_alpha")


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def check_types(kind: Any, settings: Mapping[str, Any]) -> None:
    """Refuse a value that is not of its field's type in the dataclass `kind`, or not among its choices."""
    for name, hint in hints_of(kind).items():
        value, options = settings[name], options_of(hint)
        if any(_fits(value, option) for option in options):
            continue
        choices = choices_of(hint)
        if choices and isinstance(value, str):
            raise ConfigError(f"{name}={value!r} is not known", suggest(value, choices))
        if list[str] in options and str not in options:
            raise ConfigError(f"{name}={value!r} is not a list of text", f"Write for example {name}=['{LISTED.get(name, 'name')}'].")
        wanted = f"one of {', '.join(choices)}" if choices else " or ".join(_article(o) for o in options if o is not type(None))
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}", f"Give it {wanted}.")


LISTED = {"label_names": "labels", "include_for_metrics": "inputs", "fp32_modules": "lm_head"}


def _fits(value: Any, option: Any) -> bool:
    origin = get_origin(option)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(option)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if origin is list:
        return isinstance(value, list) and all(isinstance(v, str) for v in value)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, option) and (option is bool or not isinstance(value, bool))


def _article(option: Any) -> str:
    return ARTICLES.get(option) or ("a dict" if get_origin(option) is dict else "a list of text")


def check_ranges(args: Any) -> None:
    """Refuse numbers out of their range."""
    if not args.output_dir:
        raise ConfigError("output_dir is empty", "Name a folder for the run.")
    for name, least in AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{name}={value} is too small", f"Use {least} or more.")
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{name}={value} is no finite number", "Give it one.")
    whole = {f.name: COUNTED for f in fields(args) if isinstance(getattr(args, f.name), int)}
    for name, limit in (whole | BELOW).items():
        value = getattr(args, name)
        if value is not None and not value < limit:
            raise ConfigError(f"{name}={value} is too large", f"Use less than {limit}.")
    for name in NEVER_ZERO:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value} is too small", "Use 1 or more, or a share of all steps." if name in SPACED else "Use more than 0.")
    for name in SPACED:
        value = getattr(args, name)
        if value is not None and not (0 <= value < 1 or (isinstance(value, int) and value >= 0)):
            raise ConfigError(f"{name}={value} is no whole number of steps", "Use a whole number, or less than 1 for a share of all steps.")
    if args.max_steps == 0 or args.max_steps < -1:
        raise ConfigError(f"max_steps={args.max_steps}", "Use 1 or more, or -1 for as many as num_train_epochs gives.")
    if not (0 <= args.num_train_epochs < math.inf) or (args.num_train_epochs == 0 and args.max_steps == -1):
        raise ConfigError(f"num_train_epochs={args.num_train_epochs} trains nothing", "Use more than 0.")
    if args.warmup_ratio > 1:
        raise ConfigError(f"warmup_ratio={args.warmup_ratio} is more than the whole run", "Use a share between 0 and 1.")


def check_together(args: Any) -> None:
    """Refuse settings that contradict each other or have no effect."""
    check_optimizer(args)
    check_schedule(args)
    _check_evaluation(args)
    _check_best(args)
    _check_logging(args)
    if args.ema_decay is None:
        for name, given, default in (("ema_warmup", args.ema_warmup, "none"), ("ema_in_evaluation", args.ema_in_evaluation, True)):
            if given != default:
                raise ConfigError(f"{name}={given!r} has no effect without ema_decay", "Use for example ema_decay=0.999.")
    if args.gradient_release != "no":
        _check_release(args)
    needs = {
        "gradient_checkpointing_kwargs": "gradient_checkpointing",
        "torch_compile_backend": "torch_compile",
        "torch_compile_mode": "torch_compile",
    }
    for name, switch in needs.items():
        if getattr(args, name) not in (None, {}) and not getattr(args, switch):
            raise ConfigError(f"{name}={getattr(args, name)!r} has no effect without {switch}", f"Use {switch}=True.")
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        value = getattr(args, name)
        if value and not args.dataloader_num_workers:
            raise ConfigError(f"{name}={value!r} has no effect without worker processes", "Use dataloader_num_workers=1 or more.")
    if args.bf16_full_eval and args.fp16_full_eval:
        raise ConfigError("bf16_full_eval=True and fp16_full_eval=True were both given", "Leave one of them out.")


def clip_of(args: Any) -> Literal["per_parameter", "last"] | None:
    """How released gradients are clipped; None for not at all."""
    if not args.max_grad_norm:
        return None
    return "per_parameter" if args.gradient_release == "per_parameter" else "last"


def _check_release(args: Any) -> None:
    """Checks on what needs gradients that stay."""
    asked = f"gradient_release={args.gradient_release!r}"
    if args.gradient_release == "per_parameter" and not args.max_grad_norm:
        raise ConfigError(f"{asked} says how to clip, and max_grad_norm={args.max_grad_norm} clips nothing", "Use gradient_release='last'.")
    if args.log_stalled:
        raise ConfigError(f"log_stalled=True compares weights around a step, and with {asked} they move before it", "Leave one of them out.")
    if args.gradient_checkpointing and dict(args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ConfigError(
            f"use_reentrant=True makes gradients of a weight in several parts, and {asked} uses each at once",
            "Use gradient_checkpointing_kwargs={'use_reentrant': False}.",
        )
    if args.on_overflow == "replay" and args.policy.scale.kind != "none":
        raise ConfigError(
            f"on_overflow='replay' (the default) runs a step again, and with {asked} it is half applied by then", "Use on_overflow='skip' or 'raise'."
        )


def _check_evaluation(args: Any) -> None:
    strategy = args.eval_strategy
    if args.eval_steps is not None and strategy != "steps":
        raise ConfigError(f"eval_steps={args.eval_steps} has no effect with eval_strategy={strategy!r}", "Use eval_strategy='steps'.")
    if args.eval_delay and strategy == "no":
        raise ConfigError(f"eval_delay={args.eval_delay} has no effect with eval_strategy='no'", "Use eval_strategy='steps' or 'epoch'.")
    if args.batch_eval_metrics and args.prediction_loss_only:
        raise ConfigError("batch_eval_metrics=True needs predictions, and prediction_loss_only=True gives none", "Leave one of them out.")


def _check_best(args: Any) -> None:
    """Checks on what depends on the best evaluation."""
    if args.save_strategy == "no" and args.save_total_limit is not None:
        raise ConfigError(f"save_total_limit={args.save_total_limit} has no effect with save_strategy='no'", "Leave it out.")
    for name, asked in (("load_best_model_at_end=True", args.load_best_model_at_end), ("save_strategy='best'", args.save_strategy == "best")):
        if asked and args.eval_strategy == "no":
            raise ConfigError(f"{name} needs evaluations, and eval_strategy='no' makes none", "Use eval_strategy='steps' or 'epoch'.")
    if args.eval_strategy == "no" and (args.metric_for_best_model is not None or args.greater_is_better is not None):
        name = "metric_for_best_model" if args.metric_for_best_model is not None else "greater_is_better"
        raise ConfigError(f"{name}={getattr(args, name)!r} has no effect with eval_strategy='no'", "Use eval_strategy='steps' or 'epoch'.")
    if not args.load_best_model_at_end or args.save_strategy == "best":
        return
    if args.save_strategy != args.eval_strategy:
        raise ConfigError(
            f"load_best_model_at_end=True needs a checkpoint of each evaluation, and eval_strategy={args.eval_strategy!r} "
            f"is not save_strategy={args.save_strategy!r}",
            f"Use save_strategy={args.eval_strategy!r} or 'best'.",
        )
    between = args.steps_between_evaluations
    if args.save_strategy == "steps" and not _is_multiple(args.save_steps, between):
        raise ConfigError(
            f"load_best_model_at_end=True needs checkpoints where evaluations are: save_steps={args.save_steps}, evaluations every {between} steps",
            "Make save_steps a multiple of eval_steps, or use save_strategy='best'.",
        )


def _is_multiple(number: float, of: float) -> bool:
    """Whether `number` is a multiple of `of`; two shares are compared in millionths, a share and a number of steps are not comparable."""
    if (number < 1) != (of < 1):
        return False
    return number % of == 0 if number >= 1 else round(number * 1e6) % max(1, round(of * 1e6)) == 0


def _check_logging(args: Any) -> None:
    if args.log_stalled and args.logging_strategy != "steps":
        raise ConfigError("log_stalled=True measures every logging_steps-th step", "Use logging_strategy='steps'.")
    if args.logging_first_step and args.logging_strategy == "no":
        raise ConfigError("logging_first_step=True has no effect with logging_strategy='no'", "Use logging_strategy='steps' or 'epoch'.")
    if args.logging_nan_inf_filter:
        raise ConfigError(
            "logging_nan_inf_filter=True would hide losses that are not finite",
            "Leave it out: they are logged as they are, and refused steps are counted.",
        )
    listed = reporters(args)
    for name in listed:
        if name not in REPORTERS:
            near = suggest(name, REPORTERS)
            raise ConfigError(
                f"report_to={args.report_to!r} is not supported", f"{near} metrics.jsonl has all numbers; others take a TrainerCallback."
            )
    if len(listed) > 1 and ("none" in listed or "all" in listed):
        raise ConfigError(f"report_to={args.report_to!r} says two things", "Leave 'none' and 'all' out of a list.")
    if args.logging_dir is not None and not {"tensorboard", "all"} & set(listed):
        raise ConfigError(f"logging_dir={args.logging_dir!r} has no effect without TensorBoard", "Use report_to='tensorboard'.")
    if args.run_name is not None and listed in ([], ["none"]):
        raise ConfigError(
            f"run_name={args.run_name!r} has no effect with report_to={args.report_to!r}", "Use report_to='tensorboard', 'wandb' or 'mlflow'."
        )


def reporters(args: Any) -> list[str]:
    """report_to as a list."""
    given = args.report_to
    return [] if given is None else [given] if isinstance(given, str) else list(given)
