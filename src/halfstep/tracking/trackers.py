"""One tracker per package, and JSON lines, which need none. A package is imported when its tracker starts."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import CheckpointError
from halfstep.tracking.tracker import GeneralTracker, plain

SHOWN = ("log2max", "underflow", "overflow")  # of the numbers of a layer


class JSONLinesTracker(GeneralTracker):
    """One JSON object a line in FOLDER/RUN_NAME/metrics.jsonl, the settings in config.json beside it. NaN stands as NaN.

    A line is written whole when `log` returns. Raises CheckpointError when the disk does not take it.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        self.folder = Path(logging_dir) / run_name

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.folder / "metrics.jsonl"

    def start(self) -> None:
        """Make the folder; an older file is added to."""
        self._write(self.tracker, "")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write config.json; values that JSON does not know stand as their text."""
        (self.folder / "config.json").unlink(missing_ok=True)
        self._write(self.folder / "config.json", json.dumps(plain(values), indent=1, default=str) + "\n")

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add one line, with `step` where it is given."""
        record = ({} if step is None else {"step": step}) | plain(values)
        self._write(self.tracker, json.dumps(record, default=str) + "\n")

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error.strerror}", "Free some space or name another folder.") from error


class TensorBoardTracker(GeneralTracker):
    """Event files in LOGGING_DIR/RUN_NAME. Numbers are scalars, texts are texts, mappings of numbers are groups of scalars.

    kwargs go to `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        self.folder, self._settings = Path(logging_dir) / run_name, kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    def start(self) -> None:
        """Open an event file."""
        self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self.folder), **self._settings)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """The settings as hyper-parameters and as one text."""
        shown = plain(values)
        simple = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in shown.items()}
        self.writer.add_hparams(simple, metric_dict={}, run_name=".")
        self.writer.add_text("config", "```json\n" + json.dumps(shown, indent=1, default=str) + "\n```")
        self.writer.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a scalar per number, also for NaN and inf, and flush."""
        for key, value in plain(values).items():
            if isinstance(value, bool | int | float):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            elif value is not None:
                self.writer.add_text(key, str(value), global_step=step, **kwargs)
        self.writer.flush()

    def log_layers(self, kind: str, layers: Mapping[str, Mapping[str, float]], step: int) -> None:
        """What was measured on each layer: scalars KIND/LAYER/NUMBER, and over all layers a histogram KIND/NUMBER. Shares, and magnitudes as log2.

        Layers that are all zero, or not finite, have no place in a histogram of magnitudes; their scalars tell.
        """
        for number in SHOWN:
            values = []
            for name, found in layers.items():
                self.writer.add_scalar(f"{kind}/{name or 'model'}/{number}", found[number], global_step=step)
                values.append(found[number])
            finite = [v for v in values if math.isfinite(v)]
            if finite:
                self.writer.add_histogram(f"{kind}/{number}", torch.tensor(finite), global_step=step)
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


class WandBTracker(GeneralTracker):
    """A run of Weights & Biases. kwargs go to `wandb.init`."""

    name = "wandb"

    def __init__(self, project: str, /, **kwargs: Any) -> None:
        self._settings = {"project": project} | kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    def start(self) -> None:
        """Open the run."""
        self.run = importlib.import_module("wandb").init(**self._settings)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """The settings as the run's config."""
        self.run.config.update(plain(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and texts as they are."""
        self.run.log(plain(values), step=step, **kwargs)

    def finish(self) -> None:
        """Close the run."""
        self.run.finish()


class MLflowTracker(GeneralTracker):
    """A run of MLflow in the experiment of that name. kwargs go to `mlflow.start_run`; `tracking_uri` to `mlflow.set_tracking_uri`."""

    name = "mlflow"

    def __init__(self, experiment: str, /, *, tracking_uri: str | None = None, **kwargs: Any) -> None:
        self.experiment, self._uri, self._settings = experiment, tracking_uri, kwargs
        self._mlflow: Any = None
        self._opened = False
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.run

    def start(self) -> None:
        """Go on with the run that is active, which `finish` leaves open, else open one."""
        self._mlflow = importlib.import_module("mlflow")
        if self._uri is not None:
            self._mlflow.set_tracking_uri(self._uri)
        active = self._mlflow.active_run()
        self._opened = active is None
        if active is None:
            self._mlflow.set_experiment(self.experiment)
        self.run = active if active is not None else self._mlflow.start_run(**self._settings)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """The settings as parameters, cut at the 6000 characters that MLflow takes."""
        texts = [(key, str(value)[:6000]) for key, value in plain(values).items()]
        for i in range(0, len(texts), 100):  # it takes 100 at once
            self._mlflow.log_params(dict(texts[i : i + 100]))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, the entries of a mapping under KEY/NAME, texts as tags: MLflow has no texts at a step."""
        metrics: dict[str, float] = {}
        for key, value in plain(values).items():
            if isinstance(value, dict):
                metrics |= {f"{key}/{name}": float(v) for name, v in value.items()}
            elif isinstance(value, bool | int | float):
                metrics[key] = float(value)
            elif value is not None:
                self._mlflow.set_tag(key, str(value))
        self._mlflow.log_metrics(metrics, step=step, **kwargs)

    def finish(self) -> None:
        """Close the run, if it was opened here."""
        if self._opened:
            self._mlflow.end_run()
