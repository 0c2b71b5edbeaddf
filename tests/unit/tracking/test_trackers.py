"""Trackers: what arrives in their files and packages, NaN as NaN, and which are refused."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.errors import CheckpointError, ConfigError
from halfstep.tracking import GeneralTracker, LoggerType, chosen_trackers, is_installed, make_tracker, plain

RECORDS = [{"loss": torch.tensor(0.5), "note": "begun"}, {"loss": math.nan, "norm": math.inf, "rate": np.float32(0.25)}]


def test_json_lines_hold_every_record_with_nan_as_nan(tmp_path: Path) -> None:
    tracker = make_tracker("jsonl", "run", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.2, "of": "an earlier run"})
    tracker.store_init_configuration({"lr": 0.1, "shape": (2, 3), "path": Path("a")})
    for step, record in enumerate(RECORDS):
        tracker.log(record, step=step)
    tracker.log({"last": True})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"step": 0, "loss": 0.5, "note": "begun"}'
    assert lines[1] == '{"step": 1, "loss": NaN, "norm": Infinity, "rate": 0.25}'
    assert json.loads(lines[2]) == {"last": True}
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1, "shape": [2, 3], "path": "a"}


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    tracker = make_tracker("tensorboard", "run", tmp_path, {"flush_secs": 1})
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "betas": (0.9, 0.99)})
    for step, record in enumerate(RECORDS):
        tracker.log(record, step=step)
    tracker.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    losses = [(e.step, e.value) for e in events.Scalars("loss")]
    assert losses[0] == (0, 0.5)
    assert losses[1][0] == 1
    assert math.isnan(losses[1][1])
    assert [e.value for e in events.Scalars("norm")] == [math.inf]
    assert "note/text_summary" in events.Tags()["tensors"]


class Calls(ModuleType):
    """A package that writes down how it was called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any, Any]] = []
        self.active: Any = None  # a run that was begun before

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name == "active_run":
                return self.active
            return SimpleNamespace(log=self.log, finish=self.finish, config=SimpleNamespace(update=self.update)) if name == "init" else name

        return called


def test_wandb_gets_project_settings_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Calls("wandb")
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = make_tracker("wandb", "project", None, {"tags": ["a"]})
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log(RECORDS[1], step=3)
    tracker.finish()
    assert [(name, kwargs) for name, _, kwargs in package.calls][:2] == [
        ("init", {"project": "project", "tags": ["a"]}),
        ("update", {"allow_val_change": True}),
    ]
    name, (values,), kwargs = package.calls[2]
    assert (name, kwargs) == ("log", {"step": 3})
    assert math.isnan(values["loss"])
    assert package.calls[3][0] == "finish"


def test_mlflow_gets_numbers_as_metrics_and_texts_as_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Calls("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", package)
    tracker = make_tracker("mlflow", "experiment", None, {"run_name": "one", "tracking_uri": "file:x"})
    tracker.start()
    tracker.store_init_configuration({f"p{i}": i for i in range(150)})
    tracker.log({"loss": math.nan, "note": "begun", "by": {"a": 1, "b": 2.5}}, step=3)
    tracker.finish()
    names = [name for name, _, _ in package.calls if name != "active_run"]
    assert names == ["set_tracking_uri", "set_experiment", "start_run", "log_params", "log_params", "set_tag", "log_metrics", "end_run"]
    (metrics,), kwargs = package.calls[7][1:]
    assert math.isnan(metrics.pop("loss"))
    assert (metrics, kwargs) == ({"by/a": 1.0, "by/b": 2.5}, {"step": 3})
    assert package.calls[3][2] == {"run_name": "one"}


def test_a_run_of_mlflow_that_is_active_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Calls("mlflow")
    package.active = SimpleNamespace(name="the user's own")
    monkeypatch.setitem(sys.modules, "mlflow", package)
    tracker = make_tracker("mlflow", "experiment", None, {})
    tracker.start()
    assert tracker.tracker is package.active
    tracker.finish()
    assert [name for name, _, _ in package.calls] == ["active_run"]


class Own(GeneralTracker):
    name = "own"


def test_which_trackers_were_asked_for() -> None:
    own = Own()
    assert chosen_trackers(None) == []
    assert chosen_trackers("none") == []
    assert chosen_trackers("jsonl") == ["jsonl"]
    assert chosen_trackers(["jsonl", own, LoggerType.JSONL]) == ["jsonl", own]
    assert chosen_trackers("all") == [name for name in ("jsonl", "tensorboard", "wandb", "mlflow") if is_installed(name)]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("tensorbord", "Did you mean 'tensorboard'"),
        ("comet_ml", "is not supported"),
        (Own, "the class Own"),
        (3, "a int, which has no name, log"),
    ],
)
def test_other_trackers_are_refused(wanted: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen_trackers(wanted)


@pytest.mark.parametrize(("name", "line"), [("wandb", "pip install wandb"), ("tensorboard", r"pip install 'halfstep\[tensorboard\]'")])
def test_a_missing_package_is_named_with_the_line_that_installs_it(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.tracking.choose.is_installed", lambda wanted: wanted != name)
    with pytest.raises(ConfigError, match=line):
        chosen_trackers(["jsonl", name], "report_to")


def test_no_folder_and_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="project_dir"):
        make_tracker("jsonl", "run", None)
    with pytest.raises(ConfigError, match="flush"):
        make_tracker("jsonl", "run", tmp_path, {"flush": 3})


def test_a_folder_that_takes_no_files_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="could not be written"):
        make_tracker("jsonl", "run", tmp_path).start()


def test_values_become_plain_without_rounding() -> None:
    value = plain({"a": torch.tensor([1.5, 2.5]), "b": {"c": np.int64(3)}, 4: torch.tensor(True), "t": "text"})
    assert value == {"a": [1.5, 2.5], "b": {"c": 3}, "4": True, "t": "text"}
