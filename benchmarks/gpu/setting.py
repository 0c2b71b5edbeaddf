"""What a part is told: where it runs, how large, and where its numbers go."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Setting:
    """device: where things run. small: a rehearsal of everything in seconds. rounds: turns of each contender. result: the file for the numbers."""

    device: torch.device
    small: bool
    rounds: int
    result: Path
    options: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"

    def tell(self, **found: Any) -> None:
        """Add numbers to the result and write it: what was found before a failure stays."""
        self.found |= found
        write_json(self.result, self.found)

    def add(self, key: str, name: str, value: Any) -> None:
        """Add one entry to a table in the result."""
        self.tell(**{key: self.found.get(key, {}) | {name: value}})


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, default=str) + "\n")
    os.replace(partial, path)


def error_text(error: BaseException) -> str:
    """An error in a line; no memory left is said in so many words."""
    kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return f"{kind}: {(str(error).strip().splitlines() or [''])[0][:300]}"
