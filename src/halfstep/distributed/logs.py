"""Log messages that come once and not once per process."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist


def rank_here() -> int:
    """The number of this process: in torch's process group if there is one, else what torchrun has set, else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


class OnceLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages come from process 0 only.

    Further arguments of each call: main_process_only=False for a message of every process, in_order=True for one after the other.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """As it is."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, main_process_only: bool = True, in_order: bool = False, **kwargs: Any) -> None:  # type: ignore[override]
        """One message, if it is this process's to give."""
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        mine = rank_here()
        if in_order and dist.is_available() and dist.is_initialized():
            for rank in range(dist.get_world_size()):
                if rank == mine:
                    self.logger.log(level, msg, *args, **kwargs)
                dist.barrier()
        elif in_order or not main_process_only or mine == 0:
            self.logger.log(level, msg, *args, **kwargs)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """A warning that is given the first time only."""
        said = self.__dict__.setdefault("_said", set())
        if (str(msg), args) not in said:
            said.add((str(msg), args))
            self.warning(msg, *args, stacklevel=kwargs.pop("stacklevel", 1) + 1, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> OnceLogger:
    """The logger of that name, whose messages come from process 0 only.

    log_level: "DEBUG", "INFO", ... for this logger; by default what the environment has as ACCELERATE_LOG_LEVEL, else the logger keeps its own.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
    return OnceLogger(logger, {})
