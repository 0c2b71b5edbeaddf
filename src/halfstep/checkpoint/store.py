"""Write and read checkpoint folders: whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from halfstep.checkpoint import files
from halfstep.checkpoint.foreign import refuse_foreign
from halfstep.checkpoint.held import writing
from halfstep.checkpoint.migrations import migrate
from halfstep.checkpoint.schema import MANIFEST, Manifest, manifest_from
from halfstep.checkpoint.tensors import pieces, tensor_bytes
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
    removed, an older checkpoint stays as it was, and CheckpointError says why; a value that cannot be saved, and a disk that has
    too little room left, are refused before anything is written. Of the tensors at most one is copied at a time.
    """
    given = Path(folder).absolute()
    target = given.resolve() if given.is_symlink() else given  # a folder that was moved to another disk is written there
    content = _content(parts)
    text = _plain(about or {})
    needed = sum(_size(c) for c in content.values()) + len(text)
    try:
        if target.is_file() or (target.is_dir() and not (target / MANIFEST).exists() and any(target.iterdir())):
            raise CheckpointError(f"{target} is not a checkpoint and is not empty, and a checkpoint would replace it", "Name a new folder.")
        files.make_folder(target.parent)
        files.refuse_full_disk(f"checkpoint {target}", target.parent, needed)
        with writing(_beside(target, "partial"), lambda: _recover(target)) as partial:
            try:
                _write(partial, content, tuple(parts), json.loads(text))
                if target.exists():
                    files.discard(_beside(target, "old"))
                    target.rename(_beside(target, "old"))
                partial.rename(target)
                files.sync(target.parent)
            finally:
                _recover(target)
                for leftover in (partial, _beside(target, "old")):
                    files.discard(leftover)
    except OSError as error:
        raise files.write_error(f"checkpoint {target}", target.parent, error, needed) from error
    return given


def _content(parts: Mapping[str, Any]) -> dict[str, bytes | dict[str, Tensor]]:
    """What each file of the parts will hold: the structure as JSON, and the tensors."""
    content: dict[str, bytes | dict[str, Tensor]] = {}
    for name, value in parts.items():
        structure, tensors = encode(value)
        content[f"{name}.json"] = json.dumps(structure).encode()
        if tensors:
            content[f"{name}.safetensors"] = tensors
    return content


def _size(content: bytes | dict[str, Tensor]) -> int:
    return len(content) if isinstance(content, bytes) else tensor_bytes(content)


def _plain(about: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(about))
    except TypeError as error:
        raise CheckpointError(f"about holds a value that JSON has not: {error}", "Give it numbers, text, lists and dicts.") from error


def _write(folder: Path, content: Mapping[str, bytes | dict[str, Tensor]], parts: tuple[str, ...], about: dict[str, Any]) -> None:
    """Write every file, and last of all the manifest with their seals."""
    sealed = {name: files.write(folder / name, [c] if isinstance(c, bytes) else pieces(c)) for name, c in content.items()}
    manifest = json.dumps(Manifest(sealed, parts, about).as_dict(), indent=1)
    files.write(folder / MANIFEST, [manifest.encode()])
    files.sync(folder)


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
        if files.digest_of(path) != facts.sha256:
            raise CheckpointError(f"checkpoint {source} is damaged: the content of {name} is not what was written", _others(source))
    parts: dict[str, Any] = {}
    for part in manifest.parts:
        tensors = load_file(source / f"{part}.safetensors") if f"{part}.safetensors" in manifest.files else {}
        parts[part] = decode(json.loads((source / f"{part}.json").read_text()), tensors)
    migrate(manifest.version, manifest.about, parts)
    return Loaded(source, manifest.about, parts)


def read_manifest(source: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError when there is none or it is not readable."""
    path = source / MANIFEST
    if not path.exists():
        refuse_foreign(source)
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


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint's files are all there with the sizes that its manifest tells. The contents are checked by `load`."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == facts.size for name, facts in manifest.files.items())


def remove(folder: Path) -> None:
    """Remove a checkpoint folder, or the link to one. Killed on the way it leaves no half checkpoint under a checkpoint's name."""
    gone = _beside(folder, "gone")
    files.discard(gone)
    folder.rename(gone)
    files.discard(gone)


def tidy(run: Path) -> None:
    """Remove what killed saves and removals left in a run's folder, in which nobody saves now. A checkpoint moved aside gets its name back."""
    for aside in run.glob(".checkpoint-*.old"):
        _recover(run / aside.name.removeprefix(".").removesuffix(".old"))
    for left in (p for what in ("partial", "old", "gone") for p in run.glob(f".checkpoint-*.{what}")):
        files.discard(left)


def latest(run: str | Path) -> Path | None:
    """The newest checkpoint folder of a run, or None."""
    found = checkpoints(run)
    return found[-1] if found else None


def _others(source: Path) -> str:
    others = [str(p) for p in checkpoints(source.parent) if p != source and (p / MANIFEST).exists()]
    return f"Other checkpoints of this run: {', '.join(others)}." if others else "There is no other checkpoint beside it: start anew."
