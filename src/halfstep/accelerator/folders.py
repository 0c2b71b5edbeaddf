"""Folders that are named by number, PROJECT/checkpoints/checkpoint_N, and files that are written by one process."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halfstep import checkpoint
from halfstep.accelerator.configuration import ProjectConfiguration
from halfstep.errors import CheckpointError, ConfigError

NAME = re.compile(r"checkpoint_(\d+)")


def numbered(project: ProjectConfiguration) -> list[Path]:
    """The whole checkpoints of a project that are named by number, oldest first."""
    folder = _home(project)
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))] if folder.is_dir() else []
    return [path for _, path in sorted(found) if checkpoint.is_whole(path)]


def folder_to_save(project: ProjectConfiguration, wanted: str | Path | None) -> Path:
    """Where a checkpoint goes: the folder named, or the project's next. Raises ConfigError when there is neither, or both."""
    if not project.automatic_checkpoint_naming:
        if wanted is None:
            raise ConfigError(
                "save_state() was given no folder", "Name one, or pass project_config=ProjectConfiguration(..., automatic_checkpoint_naming=True)."
            )
        return Path(wanted)
    if wanted is not None:
        raise ConfigError(f"save_state() was given {str(wanted)!r}, and automatic_checkpoint_naming=True names it itself", "Leave one of them out.")
    target = _home(project) / f"checkpoint_{project.iteration}"
    if target.exists():
        raise ConfigError(
            f"{target} is there already, of an earlier run",
            "Go on from it with load_state(), name another project_dir, or set project_configuration.iteration.",
        )
    return target


def folder_to_load(project: ProjectConfiguration, wanted: str | Path | None) -> Path:
    """The folder named, or the newest of the project."""
    if wanted is not None:
        return Path(wanted)
    if not project.automatic_checkpoint_naming:
        raise ConfigError("load_state() was given no folder", "Name one, or pass ProjectConfiguration(..., automatic_checkpoint_naming=True).")
    if not (found := numbered(project)):
        raise CheckpointError(f"{_home(project)} holds no checkpoint", "Start without load_state(), or name another project_dir.")
    return found[-1]


def count_on(project: ProjectConfiguration, loaded: Path) -> None:
    """Number the next checkpoint after the one that was loaded."""
    number = NAME.fullmatch(loaded.name)
    if project.automatic_checkpoint_naming and number is not None:
        project.iteration = int(number[1]) + 1


def keep_newest(project: ProjectConfiguration) -> None:
    """Remove the oldest checkpoints of a project beyond its limit."""
    if project.automatic_checkpoint_naming and project.total_limit is not None:
        for folder in numbered(project)[: -project.total_limit]:
            checkpoint.remove(folder)


def _home(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ConfigError("automatic_checkpoint_naming=True needs a folder for the run", "Pass project_dir.")
    return Path(project.project_dir) / "checkpoints"


def write_object(value: Any, target: str | Path, safe: bool) -> None:
    """Write an object by `torch.save`, or a mapping of tensors as safetensors; whole or not at all.

    Raises CheckpointError when the disk does not take it, ConfigError for an object that safetensors cannot hold.
    """
    path = Path(target)
    partial = path.with_name(f".{path.name}.partial")
    if safe and not (isinstance(value, Mapping) and all(isinstance(v, torch.Tensor) for v in value.values())):
        raise ConfigError(f"safetensors hold tensors by name, and save() was given a {type(value).__name__}", "Use safe_serialization=False.")
    try:
        if safe:
            save_file({str(key): tensor.detach().cpu().clone().contiguous() for key, tensor in value.items()}, partial, {"format": "pt"})
        else:
            torch.save(value, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} could not be written: {error}", "Check that its folder is there, and free some space.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
