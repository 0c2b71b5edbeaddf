"""The interface of a tracker, and the plain values that trackers take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class GeneralTracker:
    """Base of trackers, with the methods that accelerate's have: override what you need, and give the class a `name`.

    The accelerator calls them on the main process only, unless `main_process_only` is False.
    """

    name = ""
    requires_logging_directory = False
    main_process_only = True

    @property
    def tracker(self) -> Any:
        """The object of the package behind it: a SummaryWriter, a W&B run; the tracker itself where there is none."""
        return self

    def start(self) -> None:
        """Open the run. Called once, before anything is stored or logged."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and texts at a step. NaN and inf are recorded as they are."""

    def finish(self) -> None:
        """Close the run."""


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with tensors and numpy numbers as Python numbers (those of several elements as lists); nothing is rounded, NaN stays NaN."""
    return {str(key): _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    return value
