"""How fast something went: the numbers that go into the metrics of training and evaluation, and how they are shown and kept."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError


def speed_metrics(prefix: str, seconds: float, samples: int | None = None, steps: int | None = None, tokens: int | None = None) -> dict[str, float]:
    """PREFIX_runtime in seconds, and samples, steps and tokens a second as far as they were counted."""
    found = {f"{prefix}_runtime": round(seconds, 4)}
    for what, count in (("samples", samples), ("steps", steps), ("tokens", tokens)):
        if count is not None:
            found[f"{prefix}_{what}_per_second"] = round(count / max(seconds, 1e-9), 3)
    return found


class Meter:
    """Counts what a call of `train()` has used, from its beginning on."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.samples = self.tokens = 0
        self.has_tokens = False  # whether the batches have input_ids

    def add(self, samples: int, tokens: int | None) -> None:
        """A micro-batch was used."""
        self.samples += samples
        if tokens is not None:
            self.tokens, self.has_tokens = self.tokens + tokens, True

    def metrics(self, steps: int) -> dict[str, float]:
        """train_runtime and the rates; steps: those that were applied."""
        seconds = time.perf_counter() - self.began
        return speed_metrics("train", seconds, self.samples, steps, self.tokens if self.has_tokens else None)


def shown(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Metrics as people read them: runtimes as h:mm:ss.cc, numbers to four places, NaN as nan."""
    return {key: _shown(key, value) for key, value in metrics.items()}


def _shown(key: str, value: Any) -> str:
    if key.endswith("_runtime"):
        minutes, seconds = divmod(float(value), 60)
        return f"{int(minutes // 60)}:{int(minutes % 60):02d}:{seconds:05.2f}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def write_metrics(folder: Path, split: str, metrics: Mapping[str, Any], combined: bool) -> None:
    """Write SPLIT_results.json, and add to all_results.json; NaN stands as NaN. Raises CheckpointError when the disk does not take it."""
    write_json(folder / f"{split}_results.json", dict(metrics))
    if combined:
        path = folder / "all_results.json"
        write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | dict(metrics))


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write plain values; the folder is made. Raises CheckpointError when the disk does not take them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2, sort_keys=True, default=float) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}", "Free some space or name another output_dir.") from error
