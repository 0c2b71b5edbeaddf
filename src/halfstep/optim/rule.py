"""What is different between the optimizers that step in one pass: their states, and the settings of a step."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import ConfigError, suggest
from halfstep.numerics import Settings
from halfstep.optim.codec import Role


class Rule(ABC):
    """An update rule. Stateless. Its formula, and its plain definition, are those of the settings that it makes (`halfstep.numerics`)."""

    name: ClassVar[str]  # as people write it
    roles: ClassVar[Mapping[str, Role]]  # what it keeps with one value per weight, and what each is
    counts: ClassVar[bool] = False  # whether it needs to know how many steps a weight has taken: state "step", fp32

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ConfigError for settings of a group that no step can be taken with."""
        for name in ("lr", "eps", "weight_decay"):
            if name in group and not 0 <= as_number(group[name]) < math.inf:
                raise out_of_range(name, group[name], "It is a number of 0 or more.")
        if "betas" in group:
            betas = tuple(group["betas"]) if isinstance(group["betas"], Iterable) else ()
            if len(betas) != 2 or not all(0 <= as_number(b) < 1 for b in betas):
                raise out_of_range("betas", group["betas"], "They are two numbers in [0, 1).")

    def kept(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that a step under a group's settings reads and writes, in the order of the definition."""
        return tuple(self.roles)

    @abstractmethod
    def settings(self, group: Mapping[str, Any], count: int, first: bool) -> Settings:
        """The settings of step `count` (0 where none are counted) of a weight in a group. first: its states are new, and zeros."""

    def gradient(self, p: Tensor, number: int) -> Tensor:
        """The gradient of parameter `number`, dense. Raises ConfigError for one that the rule has no meaning for."""
        gradient = p.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ConfigError(
                f"parameter {number} of shape {tuple(p.shape)} has a sparse gradient, and {self.name} updates every element",
                "Use sparse=False in its embedding, or torch.optim.SparseAdam.",
            )
        return gradient.detach()


def as_number(value: Any) -> float:
    """A setting as a number; NaN, which lies in no range, for what is none: a text, a truth value, a tensor of several elements."""
    try:
        return math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def out_of_range(name: str, value: Any, lies: str) -> ConfigError:
    """The error for a setting that is not where it lies."""
    return ConfigError(f"{name}={value!r} is out of range", lies)


def refuse_misspelt(keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for a key of a group that is nearly a setting's name. Others are the user's own (a label, lr_scale)."""
    names = [*known, "params"]
    for key in keys:
        parts = any(key.startswith(f"{name}_") or key.endswith(f"_{name}") for name in names)
        if key not in names and not parts and difflib.get_close_matches(key, names, n=1, cutoff=0.75):
            raise ConfigError(f"a parameter group has the key {key!r}, which no step reads", suggest(key, names))
