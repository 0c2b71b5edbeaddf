"""What a kernel is given for each step: a row of numbers for every weight, and the keys of its noise. The same for every device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfstep.numerics import Settings

ROW = 8  # numbers of a row


def row(settings: Settings, factor: float) -> tuple[float, ...]:
    """A row of a kernel's table: what the gradient is multiplied by, then the rule's numbers, zeros behind them."""
    numbers = settings.scalars()
    return (-factor if settings.maximize else factor, *numbers, *(0.0,) * (ROW - 1 - len(numbers)))


def keys(seed: int, parameters: npt.NDArray[np.uint32], step: int) -> npt.NDArray[np.uint32]:
    """`Noise(seed, parameter, step).keys` of each weight, as a table of two columns."""
    at = np.array([step & 0xFFFFFFFF], dtype=np.uint32)
    first = _mix(np.uint32(seed & 0xFFFFFFFF) ^ _mix(parameters ^ _mix(at)))
    return np.stack((first, _mix(first ^ np.uint32(0x9E3779B9))), axis=1)


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
