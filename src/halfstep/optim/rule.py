"""What is different between the optimizers that step in one pass: their states, and the settings of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics import Settings
from halfstep.optim.codec import Role


class Rule:
    """An update rule. Stateless. Its formula, and its plain definition, are those of the settings that it makes (`halfstep.numerics`)."""

    name: ClassVar[str]  # as people write it
    roles: ClassVar[Mapping[str, Role]]  # what it keeps with one value per weight, and what each is
    counts: ClassVar[bool] = False  # whether it needs to know how many steps a weight has taken: state "step", fp32

    def kept(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that a step under a group's settings reads and writes, in the order of the definition."""
        return tuple(self.roles)

    def settings(self, group: Mapping[str, Any], count: int, first: bool) -> Settings:
        """The settings of step `count` (0 where none are counted) of a weight in a group. first: its states are new, and zeros."""
        raise NotImplementedError

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


def in_range(lies: str, **checks: tuple[Any, bool]) -> None:
    """Raise ConfigError for the first setting, given as (value, whether it is good), that is not."""
    for name, (value, good) in checks.items():
        if not good:
            raise ConfigError(f"{name}={value} is out of range", lies)
