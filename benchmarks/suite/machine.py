"""The machine: what it is, what runs on it, and its two rates, from which floors are made."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.hardware import doctor

PACKAGES = ("halfstep", "torch", "numpy", "numba", "transformers", "accelerate", "lightning-fabric")


@dataclass(frozen=True)
class Rates:
    """bandwidth: bytes read and written per second where a large tensor is changed in place.

    products: fp32 operations per second of a large product.
    """

    bandwidth: float
    products: float

    def floor(self, operations: float, moved: float) -> float:
        """Seconds that so many operations and so many bytes take one after the other."""
        return operations / self.products + moved / self.bandwidth


def rates(small: bool = False) -> Rates:
    """Measure both with the threads that torch has."""
    count = 200_000 if small else 20_000_000
    numbers = torch.ones(count)
    change = _least(lambda: numbers.add_(1.0), 15)  # a copy would also read what it is about to overwrite
    width = 128 if small else 1024
    left, right, out = torch.randn(width, width), torch.randn(width, width), torch.empty(width, width)
    product = _least(lambda: torch.mm(left, right, out=out), 15)
    return Rates(8 * count / change, 2 * width**3 / product)


def _least(call: Callable[[], Any], times: int) -> float:
    """Least seconds, after two calls that warm up: what the machine can do, whoever else is on it."""
    taken = []
    for _ in range(times + 2):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return min(taken[2:])


def about() -> dict[str, Any]:
    """The machine and the versions of what is compared."""
    found = doctor("cpu").capabilities
    return {
        "name": found.name,
        "level": found.level,
        "memory_gib": round(found.memory_bytes / 2**30, 1),
        "threads": torch.get_num_threads(),
        "native": [f for f in ("bf16", "fp16") if f in found.native],
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    known = {}
    for name in PACKAGES:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known
