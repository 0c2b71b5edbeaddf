"""auto_find_batch_size: a run whose batches do not fit into memory begins again with half of them."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import pins, unpin
from halfstep.checkpoint import capture, read_manifest, restore
from halfstep.errors import ConfigError
from halfstep.optim import full_values, master_of
from halfstep.trainer.resume import BATCH

logger = logging.getLogger("halfstep")
SAYINGS = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")  # of torch's allocators, and of cuDNN short of workspace


class OutOfMemory(Exception):  # noqa: N818  it is no error yet: a smaller batch may do
    """A training step did not fit into memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAYINGS)


class FixedBatch:
    """The batch size that was asked for, whatever happens."""

    tried = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def begin(self, model: nn.Module, checkpoint: Path | None) -> None:
        """A run begins, from a checkpoint or from the model as it is."""

    def shrink(self, model: nn.Module, error: BaseException) -> None:
        """A step did not fit: raise what it raised."""
        raise error


class FittingBatch(FixedBatch):
    """A batch size that is halved until a step fits. The model begins again as it was, so that the run is the one that the smaller size gives.

    Memory: a copy of the model's weights and buffers on the CPU while it trains.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked = size
        self._weights: dict[str, Any] = {}
        self._random: dict[str, Any] = {}
        self._pinned: set[str] = set()

    def begin(self, model: nn.Module, checkpoint: Path | None) -> None:
        """Keep what a new attempt begins with. A run that goes on keeps the size that its checkpoint was made with."""
        self.tried = 0
        if checkpoint is not None:
            self.size = int(read_manifest(checkpoint).about.get("arguments", {}).get(BATCH, self.size))
        masters = {name: full_values(p) for name, p in model.named_parameters(remove_duplicate=False) if master_of(p) is not None}
        state = model.state_dict() | masters
        self._weights = {name: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for name, v in state.items()}
        self._random = capture()
        self._pinned = {p.module for p in pins(model)}

    def shrink(self, model: nn.Module, error: BaseException) -> None:
        """Halve the size and put the model and the random states back. Raises ConfigError when a single sample does not fit."""
        if self.size == 1:
            raise ConfigError(
                f"a batch of one sample does not fit into memory ({error})",
                "Use gradient_checkpointing=True, a *-lean precision, shorter samples or a smaller model.",
            ) from error
        self.size, self.tried = self.size // 2, self.tried + 1
        logger.warning("a step did not fit into memory: the run begins again with batches of %d samples instead of %d", self.size, self.asked)
        model.zero_grad()
        unpin(model, [p.module for p in pins(model) if p.module not in self._pinned])  # rules.yaml has them, which the new attempt follows and logs
        model.load_state_dict(self._weights)
        restore(self._random)
        error.__traceback__ = None  # it holds the tensors of the step
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
