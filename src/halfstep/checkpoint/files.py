"""Files that are on the disk when a call returns, and errors of the disk with what was needed and what there is."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from halfstep.checkpoint.schema import File
from halfstep.errors import CheckpointError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write(path: Path, content: Iterable[bytes | memoryview]) -> File:
    """Write a new file and wait until the disk has it. Returns its size and the SHA-256 of its content, made on the way."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for piece in content:
            digest.update(piece)
            rest = memoryview(piece)
            while rest:  # the operating system may take a part only
                rest = rest[os.write(handle, rest) :]
            size += len(piece)
        os.fsync(handle)
    finally:
        os.close(handle)
    return File(size, digest.hexdigest())


def replace(path: Path, content: str) -> None:
    """Give a small file a new content, whole or not at all: whoever reads it, after a kill too, finds the old or the new."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        write(partial, [content.encode()])
        os.replace(partial, path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, and wait until the disk has their names."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def discard(folder: Path) -> None:
    """Remove a folder and what is in it, or a link to one and not what it points to. What cannot be removed stays."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_full_disk(what: str, folder: Path, needed: int) -> None:
    """Raise CheckpointError when the disk of `folder` has fewer than `needed` bytes left, before any is written."""
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < needed:  # some network file systems tell 0 of 0
        raise write_error(what, folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed)


def write_error(what: str, folder: Path, error: OSError, needed: int) -> CheckpointError:
    """The error of writing `what`, of `needed` bytes, to a disk that does not take it."""
    room = f": {_room(folder, needed)}" if error.errno in FULL else ""
    way = "Free some space or choose another folder" if error.errno in FULL else "Choose a folder that can be written"
    return CheckpointError(f"{what} could not be written: {error}{room}", f"{way}; older checkpoints are unchanged.")


def amount(count: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _room(folder: Path, needed: int) -> str:
    standing = next(p for p in (folder, *folder.parents) if p.is_dir())
    return f"it takes {amount(needed)}, and {amount(shutil.disk_usage(standing).free)} are free in {standing}"
