"""Folders that one process at a time may write: held as long as it lives, let go by the operating system when it is killed."""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halfstep.checkpoint.files import discard
from halfstep.errors import CheckpointError

# Windows has no such locks: everybody gets the folder
_fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None


class Held:
    """A folder held by this process. Processes forked from it do not hold it."""

    def __init__(self, handle: int = -1) -> None:
        self._handle, self._owner = handle, os.getpid()
        _all.add(self)

    def release(self) -> None:
        """Let go."""
        _all.discard(self)
        if self._handle >= 0:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = -1


_all: set[Held] = set()


def _forked() -> None:
    for held in list(_all):  # workers of a data loader outlive a killed run for some seconds: the folder is not theirs
        held.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def hold(folder: Path) -> Held | None:
    """Hold a folder that exists; None when another holds it. Where the file system knows no locks everybody gets it."""
    if _fcntl is None:
        return Held()
    handle = os.open(folder, os.O_RDONLY)
    try:
        _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        return None if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else Held()
    return Held(handle)


@contextmanager
def writing(folder: Path, begin: Callable[[], object]) -> Iterator[Path]:
    """A new, empty folder in place of what a killed process left there. Raises CheckpointError when a process writes to it now.

    begin: called when nobody does and before anything is removed.
    """
    left = hold(folder) if folder.is_dir() else Held()
    if left is None:
        raise CheckpointError(f"another process writes the checkpoint {folder.name} in {folder.parent} now", "Give each run a folder of its own.")
    begin()
    discard(folder)
    left.release()
    folder.mkdir()
    held = hold(folder) or Held()
    try:
        yield folder
    finally:
        held.release()
