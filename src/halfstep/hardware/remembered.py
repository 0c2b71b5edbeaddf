"""Measurements in a file of the user's cache, for other processes on the same machine. A file with anything wrong is as good as none."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("halfstep")
Stored = dict[str, list[float]]


def cache_folder() -> Path | None:
    """$XDG_CACHE_HOME/halfstep, by default ~/.cache/halfstep; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"  # the standard says to ignore a relative one
    except RuntimeError:
        return None
    return base / "halfstep"


class Memory:
    """Lists of numbers by name, kept for one machine.

    key: what they depend on; with another key another file is read. folder: None for the user's cache.
    """

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        self.key = dict(key)
        where = folder if folder is not None else cache_folder()
        name = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = where / f"rates-{name}.json" if where is not None else None

    def read(self) -> Stored:
        """What is kept; {} when there is no file, or none that can be read and is whole."""
        if self.path is None:
            return {}
        try:
            data = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(data, dict) or data.get("key") != self.key or not isinstance(data.get("rates"), dict):
            return {}
        return {str(name): [float(n) for n in numbers] for name, numbers in data["rates"].items() if _are_numbers(numbers)}

    def add(self, more: Stored) -> None:
        """Keep these too. The file is replaced as a whole, so that a reader sees the old or the new; where that cannot be done nothing is kept."""
        if self.path is None:
            return
        content = json.dumps({"key": self.key, "rates": self.read() | more}, indent=1)
        try:
            self._write(self.path, content)
        except OSError as error:
            _say(f"{self.path.parent} cannot be written ({error.strerror})")

    def _write(self, path: Path, content: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=".rates-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(content)
            os.replace(partial, path)
        except OSError:
            os.unlink(partial)
            raise


@functools.cache
def _say(cause: str) -> None:
    logger.warning(
        "%s, so each process measures anew how fast 16-bit products are, and two runs may choose differently. Let XDG_CACHE_HOME name a folder that "
        "can be written, or say products=emulated or products=native in the precision",
        cause,
    )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in value)
