"""Which kernels there are on this machine: the compiled ones for the CPU, those of Triton for CUDA devices, or none."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

import torch
from torch import Tensor

SWITCH = "HALFSTEP_KERNELS"  # environment: "off" for the plain definitions everywhere

logger = logging.getLogger("halfstep")


def cpu_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.cpu`, or None where numba is not installed or the environment has HALFSTEP_KERNELS=off.

    None is no error: the plain definitions give the same bits, slower, and one line in the log says so, once per process.
    """
    return None if _is_off() else _load()


def cuda_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.cuda`, or None where triton is not installed or compiles nothing, or with HALFSTEP_KERNELS=off.

    To be called where there are CUDA tensors. As with `cpu_kernels`, None is no error, and one line in the log says so.
    """
    return None if _is_off() else _load_cuda()


def kernels_for(device: torch.device) -> ModuleType | None:
    """The kernels for tensors on this device, under the same conditions. None, and nothing said, for a kind of device that has none."""
    if device.type == "cpu":
        return cpu_kernels()
    return cuda_kernels() if device.type == "cuda" else None


def weight_kernels(of: Tensor) -> ModuleType | None:
    """The module `halfstep.kernels.convert`, under the same conditions, for a tensor on the CPU. None, and nothing said, for one elsewhere."""
    return importlib.import_module("halfstep.kernels.convert") if of.is_cpu and cpu_kernels() is not None else None


def averaging_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.averaging`, under the conditions of `cpu_kernels`."""
    return importlib.import_module("halfstep.kernels.averaging") if cpu_kernels() is not None else None


def activation_kernels(of: Tensor) -> ModuleType | None:
    """The module `halfstep.kernels.activations`, likewise."""
    return importlib.import_module("halfstep.kernels.activations") if of.is_cpu and cpu_kernels() is not None else None


def loss_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.cross_entropy`, likewise."""
    return importlib.import_module("halfstep.kernels.cross_entropy") if cpu_kernels() is not None else None


def bernoulli_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.bernoulli`, likewise."""
    return importlib.import_module("halfstep.kernels.bernoulli") if cpu_kernels() is not None else None


def gelu_kernels() -> ModuleType | None:
    """The module `halfstep.kernels.gelu`, likewise."""
    return importlib.import_module("halfstep.kernels.gelu") if cpu_kernels() is not None else None


def _is_off() -> bool:
    switch = os.environ.get(SWITCH, "on").lower()
    if switch in ("off", "0", "false", "no"):
        _say(f"{SWITCH}={switch}: optimizers step by the plain definitions, which give the same bits and take several times as long")
        return True
    return False


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
def _load_cuda() -> ModuleType | None:
    instead = "optimizers step on a GPU by the plain definitions, which give the same bits and take several times as long"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        _say(f"triton cannot be imported ({error}): {instead}. Install it with: pip install 'halfstep[triton]'")
        return None
    if torch.version.hip is not None:
        _say(f"the Triton kernels are for NVIDIA's GPUs: {instead}")
        return None
    kernels = importlib.import_module("halfstep.kernels.cuda")
    try:
        kernels.squares([torch.ones(1, dtype=torch.float32, device=kernels.DEVICE)])
    except Exception as error:  # noqa: BLE001  whatever a compiler raises, as without a C compiler: the definitions need none
        _say(f"triton compiles nothing here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}): {instead}")
        return None
    return kernels


@functools.cache
def _say(line: str) -> None:
    logger.warning(line)
