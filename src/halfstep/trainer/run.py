"""The run folder: config.yaml, metrics.jsonl and checkpoints, and the rules about entering one that is not empty."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from halfstep import checkpoint
from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.callbacks import TrainerCallback
from halfstep.trainer.state import TrainerControl, TrainerState

CONFIG, METRICS = "config.yaml", "metrics.jsonl"


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entered = False

    @property
    def metrics(self) -> Path:
        """The file with one JSON record per logged step."""
        return self.path / METRICS

    def holds_run(self) -> bool:
        """Whether an earlier run left numbers or checkpoints here."""
        return self.metrics.exists() or bool(checkpoint.checkpoints(self.path))

    def enter(self, args: TrainingArguments, resume: Path | None) -> None:
        """Make the folder ready for a run, new or resumed.

        Raises ConfigError when an earlier run is here and the caller neither resumes nor overwrites it.
        """
        if resume is None and self.holds_run():
            if not args.overwrite_output_dir:
                newest = checkpoint.latest(self.path)
                go_on = f"trainer.train(resume_from_checkpoint=True) or --resume goes on from {newest.name}; " if newest else ""
                raise ConfigError(
                    f"the folder {self.path} already holds a run",
                    f"{go_on}overwrite_output_dir=True or --overwrite starts anew and removes it; another output_dir keeps both.",
                )
            self.clear()
        self.path.mkdir(parents=True, exist_ok=True)
        self.entered = True
        if not (self.path / CONFIG).exists():
            write_yaml(self.path / CONFIG, args.to_dict())

    def clear(self) -> None:
        """Remove what a run writes, and nothing else."""
        for folder in checkpoint.checkpoints(self.path):
            shutil.rmtree(folder)
        for name in (METRICS, CONFIG):
            (self.path / name).unlink(missing_ok=True)

    def find(self, wanted: bool | str | Path) -> Path:
        """The checkpoint to resume from: the newest of this run for True, else the folder named. Raises CheckpointError when there is none."""
        if not isinstance(wanted, bool):
            return Path(wanted)
        newest = checkpoint.latest(self.path)
        if newest is None:
            raise CheckpointError(f"{self.path} holds no checkpoint to resume from", "Start without resuming, or name another output_dir.")
        return newest

    def rewind(self, history: list[dict[str, Any]]) -> None:
        """Make metrics.jsonl what it was at a checkpoint: lines that an interrupted run wrote after it are dropped."""
        partial = self.metrics.with_suffix(".partial")
        partial.write_text("".join(as_line(record) for record in history))
        os.replace(partial, self.metrics)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(as_line(record))

    def keep_newest(self, limit: int | None) -> None:
        """Remove all but the `limit` newest checkpoints."""
        for folder in checkpoint.checkpoints(self.path)[: -limit if limit else 0]:
            shutil.rmtree(folder)


class MetricsWriter(TrainerCallback):
    """Writes every logged record to metrics.jsonl."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Append the newest record; an evaluation before the first train() belongs to no run and is not written."""
        if self.run.entered:
            self.run.append(state.log_history[-1])


def as_line(record: dict[str, Any]) -> str:
    """A record as a line of metrics.jsonl: `lr` for learning_rate; NaN and inf stand as such."""
    return json.dumps({"lr" if k == "learning_rate" else k: v for k, v in record.items()}) + "\n"


def write_yaml(path: Path, data: dict[str, Any]) -> None:
    """Write plain values as YAML in the order given."""
    path.write_text(yaml.safe_dump(data, sort_keys=False))
