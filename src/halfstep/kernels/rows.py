"""What a kernel is given for each step: a row of numbers for every weight, and the keys of its noise. The same for every device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.kernels.codes import FORMATS
from halfstep.kernels.items import Item, check_gradient
from halfstep.numerics import Settings
from halfstep.numerics.noise import FIRST, GOLDEN, SECOND, WORD

ROW = 8  # numbers of a row


def row(settings: Settings, factor: float) -> tuple[float, ...]:
    """A row of a kernel's table: what the gradient is multiplied by, then the rule's numbers, zeros behind them."""
    numbers = settings.scalars()
    return (-factor if settings.maximize else factor, *numbers, *(0.0,) * (ROW - 1 - len(numbers)))


def tables(
    items: Sequence[Item], rule: str, gradients: Sequence[Tensor | None], steps: Sequence[Settings], factor: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """What a step of `items` by `rule` reads: addresses of the gradients (0: none), their formats, and the `row` of each.

    Raises ConfigError for other numbers of gradients or steps than of items, for settings of another rule, and for a gradient that does not lie as
    its weight does.
    """
    if len(gradients) != len(items) or len(steps) != len(items):
        counts = f"{len(gradients)} gradients and {len(steps)} steps were given for {len(items)} weights"
        raise ConfigError(counts, "Give one of each for each weight.")
    other = {step.rule for step in steps} - {rule}
    if other:
        raise ConfigError(f"settings of {other.pop()} were given to a plan of {rule}", "Give those of the plan's rule.")
    addresses, forms = np.zeros(len(items), dtype=np.int64), np.zeros(len(items), dtype=np.int32)
    for i, (gradient, item) in enumerate(zip(gradients, items, strict=True)):
        if gradient is not None:
            check_gradient(gradient, item, i)
            addresses[i], forms[i] = gradient.data_ptr(), FORMATS[gradient.dtype]
    rows = {step: row(step, factor) for step in set(steps)}
    return addresses, forms, np.array([rows[step] for step in steps], dtype=np.float32).reshape(-1, ROW)


def keys(seed: int, parameters: npt.NDArray[np.uint32], step: int) -> npt.NDArray[np.uint32]:
    """`Noise(seed, parameter, step).keys` of each weight, as a table of two columns."""
    at = np.array([step & WORD], dtype=np.uint32)
    first = _mix(np.uint32(seed & WORD) ^ _mix(parameters ^ _mix(at)))
    return np.stack((first, _mix(first ^ np.uint32(GOLDEN))), axis=1)


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(FIRST)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(SECOND)
    return x ^ (x >> np.uint32(16))
