"""Write and read checkpoint folders: whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from halfstep.checkpoint.schema import MANIFEST, File, Manifest, manifest_from
from halfstep.checkpoint.tree import decode, encode
from halfstep.errors import CheckpointError

NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and found whole."""

    folder: Path
    about: dict[str, Any]
    parts: dict[str, Any]


def save(folder: str | Path, parts: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> Path:
    """Write `parts` (name to nested value) as a checkpoint folder, atomically; an older folder of that name is replaced.

    Everything is written beside the target, synced to disk and renamed. When that fails (a full disk) the leavings are
    removed, an older checkpoint stays as it was, and CheckpointError says why.
    """
    target = Path(folder).absolute()
    partial, old = _beside(target, "partial"), _beside(target, "old")
    try:
        if target.is_file() or (target.is_dir() and not (target / MANIFEST).exists() and any(target.iterdir())):
            raise CheckpointError(f"{target} is not a checkpoint and is not empty, and a checkpoint would replace it", "Name a new folder.")
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        files = _write(partial, parts)
        manifest = Manifest(files, tuple(parts), dict(about or {}))
        (partial / MANIFEST).write_text(json.dumps(manifest.as_dict(), indent=1))
        _sync(partial / MANIFEST)
        _sync(partial)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error}", "Free some space or choose another folder; older checkpoints are unchanged."
        ) from error
    finally:
        _recover(target)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return target


def _write(folder: Path, parts: Mapping[str, Any]) -> dict[str, File]:
    """Write every part as JSON and safetensors; returns the files with their seals."""
    files: dict[str, File] = {}
    for name, value in parts.items():
        structure, tensors = encode(value)
        (folder / f"{name}.json").write_text(json.dumps(structure))
        files[f"{name}.json"] = _seal(folder / f"{name}.json")
        if tensors:
            save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
            files[f"{name}.safetensors"] = _seal(folder / f"{name}.safetensors")
    return files


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _standing(target: Path) -> Path:
    """`target`, or the older checkpoint that a save, going on or killed, has moved aside and not yet replaced.

    Readers only look: moving it back would break a save that is going on.
    """
    old = _beside(target, "old")
    moved = not target.exists() and (old / MANIFEST).exists() and _beside(target, "partial").exists()
    return old if moved else target


def _recover(target: Path) -> None:
    """Give an older checkpoint its name back when a save ended between moving it away and putting the new one there."""
    standing = _standing(target)
    if standing != target:
        standing.rename(target)


def load(folder: str | Path) -> Loaded:
    """Read a checkpoint folder. Every file is checked against the manifest before anything is decoded.

    Raises CheckpointError for a folder that is missing, foreign, truncated or altered.
    """
    source = _standing(Path(folder))
    manifest = read_manifest(source)
    for name, facts in manifest.files.items():
        path = source / name
        found = path.stat().st_size if path.is_file() else -1
        if found != facts.size:
            state = "is missing" if found < 0 else f"holds {found} bytes of {facts.size}"
            raise CheckpointError(f"checkpoint {source} is truncated: {name} {state}", _others(source))
        if _digest(path) != facts.sha256:
            raise CheckpointError(f"checkpoint {source} is damaged: the content of {name} is not what was written", _others(source))
    parts: dict[str, Any] = {}
    for part in manifest.parts:
        tensors = load_file(source / f"{part}.safetensors") if f"{part}.safetensors" in manifest.files else {}
        parts[part] = decode(json.loads((source / f"{part}.json").read_text()), tensors)
    return Loaded(source, manifest.about, parts)


def read_manifest(source: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError when there is none or it is not readable."""
    path = source / MANIFEST
    if not path.exists():
        what = "holds no manifest, so it is not a whole checkpoint" if source.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {source} {what}", _others(source))
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"checkpoint {source} is damaged: {MANIFEST} is not JSON ({error})", _others(source)) from error
    return manifest_from(data, str(source))


def checkpoints(run: str | Path) -> list[Path]:
    """The checkpoint folders of a run, `checkpoint-STEP`, oldest first. Unfinished ones have other names and are left out."""
    folder = Path(run)
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    names |= {n.removeprefix(".").removesuffix(".old") for n in names if n.endswith(".old")}
    found = [(int(m[1]), p) for n in names if (m := NAME.fullmatch(n)) and (p := _standing(folder / n)).exists()]
    return [p for _, p in sorted(found)]


def latest(run: str | Path) -> Path | None:
    """The newest checkpoint folder of a run, or None."""
    found = checkpoints(run)
    return found[-1] if found else None


def _others(source: Path) -> str:
    others = [str(p) for p in checkpoints(source.parent) if p != source and (p / MANIFEST).exists()]
    return f"Other checkpoints of this run: {', '.join(others)}." if others else "There is no other checkpoint beside it: start anew."


def _seal(path: Path) -> File:
    _sync(path)
    return File(path.stat().st_size, _digest(path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
