"""The block in which every operation gives the same bits each time."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch

from halfstep.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")


class Deterministic:
    """Inside, torch uses only algorithms that give the same bits each time, and raises RuntimeError for an operation that has none.

    The switches are put back at the end. Raises ConfigError on a GPU whose cuBLAS was begun with a workspace of another kind.
    """

    def __init__(self) -> None:
        self._before: list[tuple[bool, bool, bool, bool]] = []

    def __enter__(self) -> Deterministic:
        backend = torch.backends.cudnn
        if os.environ.get(WORKSPACE) not in FIXED:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                raise ConfigError(
                    f"full_determinism=True needs {WORKSPACE}={FIXED[0]} before the first use of the GPU, and it is {os.environ.get(WORKSPACE)!r}",
                    "Set it in the environment of the process.",
                )
            os.environ[WORKSPACE] = FIXED[0]
        switches = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        self._before.append((*switches, backend.deterministic, backend.benchmark))
        torch.use_deterministic_algorithms(True)
        backend.deterministic, backend.benchmark = True, False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        enabled, warn, deterministic, benchmark = self._before.pop()
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        backend: Any = torch.backends.cudnn
        backend.deterministic, backend.benchmark = deterministic, benchmark
