"""One seed for all generators."""

from __future__ import annotations

import torch

from halfstep.checkpoint import seed_everything
from halfstep.distributed import rank_here
from halfstep.errors import ConfigError


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators on all devices.

    device_specific: the number of the process is added, so that processes draw other numbers. deterministic: torch runs deterministic kernels only,
    and raises where an op has none.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"seed={seed!r}", "Use a whole number of 0 or more.")
    seed_everything(seed + rank_here() if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
