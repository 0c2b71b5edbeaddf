"""Which kernels there are on this machine: the compiled ones for the CPU, or none."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

from torch import Tensor

SWITCH = "HALFSTEP_KERNELS"  # environment: "off" for the plain definitions everywhere

logger = logging.getLogger("halfstep")


def cpu_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.cpu`, or None where numba is not installed or the environment has HALFSTEP_KERNELS=off.

    None is no error: the plain definitions give the same bits, slower, and one line in the log says so, once per process.
    """
    switch = os.environ.get(SWITCH, "on").lower()
    if switch in ("off", "0", "false", "no"):
        _say(f"{SWITCH}={switch}: optimizers step by the plain definitions, which give the same bits and take several times as long")
        return None
    return _load()


def weight_kernels(of: Tensor) -> ModuleType | None:
    """The module `halfstep.kernels.convert`, under the same conditions, for a tensor on the CPU. None, and nothing said, for one elsewhere."""
    return importlib.import_module("halfstep.kernels.convert") if of.is_cpu and cpu_kernels() is not None else None


def averaging_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.averaging`, under the conditions of `cpu_kernels`."""
    return importlib.import_module("halfstep.kernels.averaging") if cpu_kernels() is not None else None


def activation_kernels(of: Tensor) -> ModuleType | None:
    """The module `halfstep.kernels.activations`, likewise."""
    return importlib.import_module("halfstep.kernels.activations") if of.is_cpu and cpu_kernels() is not None else None


@functools.cache
def _load() -> ModuleType | None:
    try:
        importlib.import_module("numba")
    except ImportError as error:
        _say(
            f"numba cannot be imported ({error}): optimizers step by the plain definitions, which give the same bits and take several "
            "times as long. Install the compiled kernels with: pip install 'halfstep[cpu]'"
        )
        return None
    return importlib.import_module("halfstep.kernels.cpu")


@functools.cache
def _say(line: str) -> None:
    logger.warning(line)
