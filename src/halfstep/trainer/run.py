"""The run folder: config.yaml, metrics.jsonl, further records and checkpoints, and the rules about entering one that is not empty."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import yaml

from halfstep import checkpoint
from halfstep.diagnostics.writing import FILES as RECORDED
from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.callbacks import TrainerCallback
from halfstep.trainer.state import TrainerControl, TrainerState

logger = logging.getLogger("halfstep")

CONFIG, METRICS, REPORT = "config.yaml", "metrics.jsonl", "report.html"
HEADER = "# settings of a halfstep run\n"  # tells our config.yaml from another's


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entered = False
        self._held = checkpoint.Held()  # by this process, while it trains here

    @property
    def metrics(self) -> Path:
        """The file with one JSON record per logged step."""
        return self.path / METRICS

    def holds_run(self) -> bool:
        """Whether an earlier run left numbers or checkpoints here."""
        return any((self.path / name).exists() for name in (METRICS, *RECORDED)) or bool(checkpoint.checkpoints(self.path))

    def owns(self, folder: Path) -> bool:
        """Whether a checkpoint folder is one of this run's."""
        return folder.resolve().parent == self.path.resolve()

    def check(self, overwrite: bool) -> None:
        """Refuse a folder that a new run cannot use: a file, or one that holds an earlier run that is not to be overwritten."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file, and a run needs a folder", "Name another output_dir.")
        foreign = self.path / CONFIG
        if foreign.exists() and not foreign.read_text(errors="replace").startswith(HEADER):
            raise ConfigError(f"{foreign} was not written by halfstep, and a run would replace it", "Name another output_dir, or move that file.")
        for found in checkpoint.checkpoints(self.path):
            if not (found / checkpoint.MANIFEST).exists() and any(found.iterdir()):
                raise ConfigError(
                    f"{found} was not written by halfstep, and a checkpoint of this run could have its name", "Name another output_dir, or move it."
                )
        if self.holds_run() and not overwrite:
            newest = checkpoint.latest(self.path)
            go_on = f"trainer.train(resume_from_checkpoint=True) or --resume goes on from {newest.name}; " if newest else ""
            raise ConfigError(
                f"the folder {self.path} already holds a run",
                f"{go_on}overwrite_output_dir=True or --overwrite starts anew and removes it; another output_dir keeps both.",
            )

    def begin(self, settings: dict[str, Any], overwrite: bool) -> None:
        """Make the folder ready for a new run. Called when nothing can be refused any more but for a run that goes on in it."""
        self._hold()
        self.check(overwrite)  # again: another run may have come and gone since
        if overwrite:
            self.clear()
        self._open(settings)

    def go_on(self, settings: dict[str, Any], folder: Path, history: list[dict[str, Any]]) -> None:
        """Make the folder ready for a run that goes on from the checkpoint `folder`, at which the log was `history`.

        Lines and checkpoints that an interrupted run wrote after it belong to steps that are given up: the lines are
        dropped, the checkpoints renamed to given-up-checkpoint-STEP.
        """
        self._hold()
        if not self.owns(folder):  # a run that was here is to be overwritten, or there was none
            self.clear()
        self._open(settings)
        self._write(self.metrics, "".join(as_line(record) for record in history))
        own = checkpoint.checkpoints(self.path)
        if folder.resolve() in [c.resolve() for c in own]:
            step = [c.resolve() for c in own].index(folder.resolve())
            for later in own[step + 1 :]:
                aside = later.with_name(f"given-up-{later.name}")
                checkpoint.discard(aside)
                later.rename(aside)
        checkpoint.tidy(self.path)

    def leave(self) -> None:
        """Another run may use the folder."""
        self._held.release()

    def _hold(self) -> None:
        """Take the folder for this process. Raises ConfigError while another trains in it, or when it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = checkpoint.hold(self.path)
        except OSError as error:
            raise self._not_writable(error) from error
        if held is None:
            raise ConfigError(f"another run is going on in {self.path}", "Name another output_dir, or wait until it has ended.")
        self._held = held

    def _not_writable(self, error: OSError) -> ConfigError:
        return ConfigError(f"the run folder {self.path} cannot be written: {error.strerror}", "Name another output_dir.")

    def _open(self, settings: dict[str, Any]) -> None:
        try:
            checkpoint.replace(self.path / CONFIG, as_yaml(settings))
        except OSError as error:
            raise self._not_writable(error) from error
        self.entered = True

    def _write(self, path: Path, text: str) -> None:
        try:
            checkpoint.replace(path, text)
        except OSError as error:
            raise checkpoint.write_error(str(path), self.path, error, len(text)) from error

    def clear(self) -> None:
        """Remove what a run writes, and nothing else; rules.yaml stays, for the next run to read."""
        for folder in [*checkpoint.checkpoints(self.path), *self._given_up(), *self.path.glob(".checkpoint-*")]:
            checkpoint.discard(folder)
        own = [self.path / name for name in (METRICS, CONFIG, REPORT, *RECORDED)]
        for file in (*own, *(self.path / "runs").glob("events.out.tfevents.*")):
            file.unlink(missing_ok=True)

    def find(self, wanted: bool | str | Path) -> Path:
        """The checkpoint to resume from: the newest of this run for True, else the folder named. Raises CheckpointError when there is none."""
        if not isinstance(wanted, bool):
            return Path(wanted)
        newest = checkpoint.latest(self.path)
        if newest is None:
            raise CheckpointError(f"{self.path} holds no checkpoint to resume from", "Start without resuming, or name another output_dir.")
        return newest

    def append(self, record: dict[str, Any]) -> None:
        """Add one record to metrics.jsonl. Raises CheckpointError when the disk does not take it."""
        try:
            with self.metrics.open("a") as file:
                file.write(as_line(record))
        except OSError as error:
            raise CheckpointError(
                f"{self.metrics} could not be written: {error.strerror}", "Free some space, then resume from the last checkpoint."
            ) from error

    def keep_newest(self, limit: int | None, best: Path | None = None) -> None:
        """Remove all but the `limit` newest whole checkpoints, and then those that were given up, too.

        best: it is kept and counts as one of them; the newest is kept beside it in any case, to go on from.
        One that is not whole does not count and is not removed: somebody may want to look at it. What cannot be removed stays, with a warning.
        """
        if limit is None:
            return
        whole = [c for c in checkpoint.checkpoints(self.path) if checkpoint.is_whole(c)]
        for folder in self._given_up() if whole else ():
            checkpoint.discard(folder)
        others = [c for c in whole if c != best]
        for folder in others[: -(limit if len(others) == len(whole) else max(1, limit - 1))]:
            self._remove(folder)

    def keep_only(self, best: Path) -> None:
        """Remove all whole checkpoints but one."""
        for folder in checkpoint.checkpoints(self.path):
            if folder != best and checkpoint.is_whole(folder):
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        try:
            checkpoint.remove(folder)
        except OSError as error:
            logger.warning("%s could not be removed: %s. It takes room beyond save_total_limit", folder, error)

    def _given_up(self) -> list[Path]:
        """Checkpoints of steps that a resumed run gave up."""
        return list(self.path.glob("given-up-checkpoint-*"))


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


def as_yaml(data: dict[str, Any]) -> str:
    """Plain values as YAML in the order given."""
    return HEADER + yaml.safe_dump(data, sort_keys=False)
