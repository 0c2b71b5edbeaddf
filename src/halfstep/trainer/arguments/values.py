"""What people write for a setting, as plain values: texts, numbers, lists and dicts that YAML and JSON can hold."""

from __future__ import annotations

import ast
import enum
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from halfstep.errors import ConfigError
from halfstep.policy import Policy

TEXTS = ("output_dir", "resume_from_checkpoint", "precision", "rules", "plan", "logging_dir")
SPACED = ("logging_steps", "eval_steps", "save_steps", "warmup_steps")  # numbers of steps, or shares of all steps
SWITCHED = {"include_num_input_tokens_seen": "all", "gradient_release": "last"}  # choices that may be given as a switch: what true means
DICTS = ("optim_args", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs")


def plain(args: Any) -> Iterator[tuple[str, Any]]:
    """(field, plain value) for every field of `args` that was given in another form.

    Paths and policies become text, members of enumerations their value, optimizer classes their name, whole floats of steps ints, texts
    of arguments dicts. Raises ConfigError for a text of arguments that cannot be read.
    """
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        new = _plain(name, value)
        if new is not value:
            yield name, new


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if name in TEXTS and isinstance(value, os.PathLike | Policy):
        return str(value)
    if name == "plan" and value is not None and not isinstance(value, str | dict):
        return _plan(value)
    if name in SPACED and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "optim" and isinstance(value, type):
        return name_of(value)
    if name in DICTS and isinstance(value, str):
        return arguments_in(name, value)
    if name in SWITCHED and str(value).lower() in ("true", "false"):
        return SWITCHED[name] if str(value).lower() == "true" else "no"
    if isinstance(value, tuple):
        return list(value)
    return value


def _plan(value: Any) -> Any:
    """A plan as the plain values that its file has; anything else as it is."""
    from halfstep.diagnostics.planned import Plan  # only for those who have one

    return value.as_dict() if isinstance(value, Plan) else value


def name_of(kind: type) -> str:
    """The name by which a class is found again. Raises ConfigError for one inside of a function."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise ConfigError(
            f"optim={kind.__qualname__} is a class that cannot be found by its name in {kind.__module__}",
            "Define it at the top of a module, or give the Trainer optimizers=(optimizer, None).",
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def arguments_in(name: str, text: str) -> dict[str, Any]:
    """A text of arguments as a dict: JSON, or `a=1,b=(0.9, 0.99),c=name`. Raises ConfigError for anything else."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name}={text!r} is not JSON: {error}", 'Write {"name": value}, or name=value,name=value.') from error
        return dict(found)
    result: dict[str, Any] = {}
    for part in re.split(r",(?![^(\[]*[)\]])", text) if text.strip() else ():
        key, sign, value = (p.strip() for p in part.partition("="))
        if not sign or not key.isidentifier() or key in result:
            twice = "stands twice" if key in result else "is no name=value"
            raise ConfigError(f"{part.strip()!r} in {name}={text!r} {twice}", "Write name=value,name=value.")
        result[key] = _value(value)
    return result


def _value(text: str) -> Any:
    """A number, truth value, list or None where the text is one, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return list(value) if isinstance(value, tuple) else value


def as_text(value: Any) -> str:
    """A setting as the text that a policy has for it."""
    if isinstance(value, list):
        return "|".join(value)
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def spaced(every: float, total: int) -> int:
    """Steps between two events: `every` itself, or that share of `total` where it is below 1, rounded up."""
    return int(every) if every >= 1 else max(1, math.ceil(every * total))
