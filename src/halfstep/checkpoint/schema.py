"""What a checkpoint folder holds: parts of safetensors and JSON, and a manifest that names, sizes and seals them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from halfstep.errors import CheckpointError

FORMAT = "halfstep-checkpoint"
VERSION = 2  # 2: the random states of every rank, the positions of prepared loaders
OLDEST = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class File:
    """One file of a checkpoint: size in bytes and SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The last file to be written and the first to be read.

    files: every other file; parts: names of the parts, each PART.json (structure) and PART.safetensors (tensors).
    about: what the writer wants known before anything is loaded (policy, step, versions).
    """

    files: dict[str, File]
    parts: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with a seal over all of them."""
        plain = asdict(self) | {"parts": list(self.parts)}
        return plain | {"seal": _seal(plain)}


def manifest_from(data: Any, where: str) -> Manifest:
    """Read a manifest of this version or an older one. Raises CheckpointError when it is not ours, of a newer version, or altered."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not a halfstep checkpoint", f"Name a folder that holds a {MANIFEST} written by halfstep.")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not OLDEST <= version <= VERSION:
        writer = _writer(data)
        by = f", written by halfstep {writer}," if writer else ""
        raise CheckpointError(
            f"{where} has checkpoint version {version}{by or ','} and this halfstep reads versions {OLDEST} to {VERSION}",
            f"Use the halfstep that wrote it{', or a newer one: pip install ' + repr(f'halfstep>={writer}') if by else ''}.",
        )
    plain = {k: v for k, v in data.items() if k != "seal"}
    if data.get("seal") != _seal(plain):
        raise CheckpointError(f"checkpoint {where} is damaged: {MANIFEST} is not what was written", "Use another checkpoint of the run.")
    files = {name: File(**facts) for name, facts in plain["files"].items()}
    return Manifest(files, tuple(plain["parts"]), plain["about"], version=version)


def _writer(data: dict[str, Any]) -> str:
    """The version of halfstep that wrote a manifest, which may have any form; "" when it does not say."""
    about = data.get("about")
    versions = about.get("versions") if isinstance(about, dict) else None
    return str(versions.get("halfstep", "")) if isinstance(versions, dict) else ""


def _seal(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
