"""Every exception that halfstep raises on purpose.

    HalfstepError
    |-- ConfigError         (ValueError)    a setting that is unknown, contradictory or without effect
    |   `-- PolicyError                     a precision that cannot work with this device or this model
    |-- DataError           (ValueError)    training data that cannot be used
    |-- StepOrderError      (RuntimeError)  scale, backward, unscale, clip, step or update in an order that gives wrong numbers
    |-- StepRefusedError    (RuntimeError)  a step could not be applied, and on_overflow="raise" was asked for
    |-- DivergedError       (RuntimeError)  too many bad steps in a row
    |-- CheckpointError     (RuntimeError)  a checkpoint that cannot be written, or is truncated, foreign or from another run
    `-- MissingExtraError   (ImportError)   an optional package is needed and not installed

Each carries `cause` (what was given and why it cannot work) and `remedy` (what to do), and prints both.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class HalfstepError(Exception):
    """Base of all errors raised on purpose: `cause` says what is wrong, `remedy` what to do."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{cause}. {remedy}".strip() if remedy else cause)


class ConfigError(HalfstepError, ValueError):
    """A setting is unknown, contradicts another one or would have no effect."""


class PolicyError(ConfigError):
    """The precision asked for cannot work with this device or this model."""


class DataError(HalfstepError, ValueError):
    """The training data cannot be used."""


class StepOrderError(HalfstepError, RuntimeError):
    """Calls came in an order that would give wrong gradients."""


class StepRefusedError(HalfstepError, RuntimeError):
    """A step could not be applied. `result` is its StepResult."""

    def __init__(self, cause: str, remedy: str = "", result: Any = None) -> None:
        super().__init__(cause, remedy)
        self.result = result


class DivergedError(HalfstepError, RuntimeError):
    """Too many steps in a row could not be applied. `result` is the StepResult of the last of them."""

    def __init__(self, cause: str, remedy: str = "", result: Any = None) -> None:
        super().__init__(cause, remedy)
        self.result = result


class CheckpointError(HalfstepError, RuntimeError):
    """A checkpoint cannot be written or cannot be used."""


class MissingExtraError(HalfstepError, ImportError):
    """An optional package is needed for this feature."""


def refuse_unknown(who: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first of the `unknown` arguments of `who`, with the nearest of the `known` ones."""
    names = [name for name in known if name not in ("self", "unknown")]
    for name in unknown:
        raise ConfigError(f"{who} has no argument {name!r}", suggest(name, names))


def suggest(word: str, known: Iterable[str]) -> str:
    """Remedy for an unknown `word`: the nearest of `known` names, or all of them when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known: {', '.join(names)}."
