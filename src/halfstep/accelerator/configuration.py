"""The small objects that scripts give an accelerator, under accelerate's names. Objects of accelerate's own classes of these names do as well."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from halfstep.errors import ConfigError


class DistributedType(enum.StrEnum):
    """How a run is spread over processes: one, several on CPUs, or several with a GPU each."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    project_dir: the folder of the run. logging_dir: that of trackers which write files; project_dir when left out.
    automatic_checkpoint_naming: `save_state()` without a folder writes project_dir/checkpoints/checkpoint_N and `load_state()` reads the newest.
    total_limit: how many of those are kept; older ones are removed after a new one is whole. None: all.
    iteration: N of the next one; it counts up, and goes on from a checkpoint that was loaded.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0

    def __post_init__(self) -> None:
        if self.total_limit is not None and (isinstance(self.total_limit, bool) or self.total_limit < 1):
            raise ConfigError(f"total_limit={self.total_limit!r} would keep no checkpoint", "Use 1 or more, or None to keep all.")
        if self.total_limit is not None and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"total_limit={self.total_limit} has no effect without automatic_checkpoint_naming", "Pass automatic_checkpoint_naming=True."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set the folder of the run, and that of its logs where none is set."""
        self.project_dir = project_dir
        self.logging_dir = self.logging_dir if self.logging_dir is not None else project_dir


@dataclass(frozen=True)
class GradScalerKwargs:
    """How the loss scale begins and moves. growth_interval and init_scale as in `halfstep.amp.GradScaler`; all factors are powers of two."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass(frozen=True)
class DistributedDataParallelKwargs:
    """How gradients are brought together, in the words of DistributedDataParallel.

    comm_hook: the format in which they travel: "no" (their own), "fp16" or "bf16".
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    comm_hook: Literal["no", "fp16", "bf16"] = "no"


@dataclass(frozen=True)
class InitProcessGroupKwargs:
    """How processes find each other. backend: "nccl" or "gloo", None for the device's own; timeout: how long one waits for the others."""

    backend: str | None = None
    timeout: timedelta | None = None


@dataclass(frozen=True)
class AutocastKwargs:
    """For `accelerator.autocast(AutocastKwargs(enabled=False))`: a block in fp32."""

    enabled: bool = True


@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """Accumulation windows: num_steps micro-batches each. sync_with_dataloader: a window also ends with its loader."""

    num_steps: int = 1
    sync_with_dataloader: bool = True


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How loaders are shared out. split_batches: a batch of the loader is that of all processes together, not of each. even_batches: the last batches
    of a pass are filled up with samples from its beginning, so that every process has as many; `gather_for_metrics` drops those.
    """

    split_batches: bool = False
    even_batches: bool = True
    use_seedable_sampler: bool = False  # passes can be resumed in the same order either way
    non_blocking: bool = False  # pinned batches are always moved without waiting


@dataclass(frozen=True)
class TorchDynamoPlugin:
    """How `prepare` compiles models: the arguments of `torch.compile`. backend: None or "no" for not at all."""

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, object] | None = None
    disable: bool = False
