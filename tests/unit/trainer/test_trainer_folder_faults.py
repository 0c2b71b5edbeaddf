"""A run's folder under two runs at once, a damaged checkpoint, a foreign one, a disk that fills up on the way."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from halfstep import Trainer, TrainerCallback, TrainingArguments
from halfstep.checkpoint import checkpoints, hold, is_whole
from halfstep.diagnostics.writing import FILES as RECORDED
from halfstep.errors import CheckpointError, ConfigError


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.layer(x).squeeze(-1), labels)}


DATA = [{"x": torch.tensor([float(i), 1.0]), "labels": float(i)} for i in range(8)]


def trainer(folder: Path, callbacks: tuple = (), **settings) -> Trainer:
    defaults = {"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "max_steps": 6, "save_steps": 2, "logging_steps": 1}
    args = TrainingArguments(**{**defaults, "per_device_train_batch_size": 2, "learning_rate": 0.01, **settings})
    return Trainer(Regression(), args, train_dataset=DATA, callbacks=callbacks)


def names(folder: Path) -> list[str]:
    """What is in a folder, without the records of a run (test_trainer_records.py has these)."""
    return sorted(p.name for p in folder.iterdir() if p.name not in RECORDED)


class At(TrainerCallback):
    """Acts after a step."""

    def __init__(self, step: int, act) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            self.act()


# --- two runs -------------------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_folder_of_one_that_goes_on_is_refused(tmp_path: Path) -> None:
    """In each way that a run may begin, and the first one ends as if nothing had been."""
    told = []

    def second() -> None:
        for settings, resume in (({"overwrite_output_dir": True}, None), ({}, True)):
            with pytest.raises(ConfigError) as caught:
                trainer(tmp_path / "run", **settings).train(resume_from_checkpoint=resume)
            told.append(caught.value)

    trainer(tmp_path / "run", callbacks=(At(4, second),)).train()
    assert [e.cause for e in told] == [f"another run is going on in {tmp_path / 'run'}"] * 2
    assert told[0].remedy == "Name another output_dir, or wait until it has ended."
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "config.yaml", "metrics.jsonl"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in line for line in lines) == 6


def test_the_folder_is_free_after_a_run_that_failed(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path / "run", callbacks=(At(3, fail),)).train()
    held = hold(tmp_path / "run")
    assert held is not None
    held.release()
    assert trainer(tmp_path / "run").train(resume_from_checkpoint=True).global_step == 6


def test_evaluating_and_saving_a_model_need_no_hold(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run")
    made.train()
    held = hold(tmp_path / "run")
    made.save_model()
    assert "eval_loss" in made.evaluate(DATA)
    held.release()


# --- what is kept ---------------------------------------------------------------------------------------------------------


def test_a_limit_never_removes_the_only_whole_checkpoint(tmp_path: Path) -> None:
    """The newer one was damaged by something else: it does not count, and both are kept."""

    def damage() -> None:
        (tmp_path / "run" / "checkpoint-4" / "model.safetensors").unlink()
        made.run.keep_newest(1)

    made = trainer(tmp_path / "run", save_total_limit=2)
    made.add_callback(At(5, damage))
    made.train()
    found = checkpoints(tmp_path / "run")
    assert [(p.name, is_whole(p)) for p in found] == [("checkpoint-2", True), ("checkpoint-4", False), ("checkpoint-6", True)]


def test_what_cannot_be_removed_stays_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def deny(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr("halfstep.checkpoint.remove", deny)
    assert trainer(tmp_path / "run", save_total_limit=1).train().global_step == 6
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert "checkpoint-2 could not be removed" in caplog.text
    assert "It takes room beyond save_total_limit" in caplog.text


def test_checkpoints_of_another_library_are_not_touched(tmp_path: Path) -> None:
    foreign = tmp_path / "run" / "checkpoint-4"
    foreign.mkdir(parents=True)
    (foreign / "trainer_state.json").write_text("{}")
    for settings in ({}, {"overwrite_output_dir": True}):
        with pytest.raises(ConfigError, match=r"checkpoint-4 was not written by halfstep, and a checkpoint of this run could have its name"):
            trainer(tmp_path / "run", **settings).train()
    assert (foreign / "trainer_state.json").exists()


def test_going_on_from_elsewhere_over_a_run_that_is_given_up_leaves_nothing_of_it(tmp_path: Path) -> None:
    trainer(tmp_path / "one", max_steps=4).train()
    trainer(tmp_path / "two", max_steps=20).train()
    made = trainer(tmp_path / "two", overwrite_output_dir=True)
    made.train(resume_from_checkpoint=tmp_path / "one" / "checkpoint-4")
    assert names(tmp_path / "two") == ["checkpoint-6", "config.yaml", "metrics.jsonl"], "a later resume would take checkpoint-20"


def test_what_a_killed_save_left_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    trainer(tmp_path / "run", max_steps=4).train()
    (tmp_path / "run" / ".checkpoint-5.partial").mkdir()
    (tmp_path / "run" / ".checkpoint-5.partial" / "model.safetensors").write_bytes(b"half")
    trainer(tmp_path / "run").train(resume_from_checkpoint=True)
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "config.yaml", "metrics.jsonl"]


# --- the small files ------------------------------------------------------------------------------------------------------


class FullAt:
    """os.write on a disk that is full at the n-th call."""

    def __init__(self, at: int) -> None:
        self.left, self.write = at, os.write

    def __call__(self, handle: int, data: bytes) -> int:
        self.left -= 1
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(handle, data)


def test_a_full_disk_at_a_resume_leaves_the_log_and_the_settings_whole(tmp_path: Path) -> None:
    trainer(tmp_path / "run", max_steps=4).train()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    for at in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", FullAt(at))
            with pytest.raises((CheckpointError, ConfigError)) as caught:
                trainer(tmp_path / "run").train(resume_from_checkpoint=True)
        assert "No space left on device" in caught.value.cause
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines
        assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["max_steps"] in (4, 6)
        assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "config.yaml", "metrics.jsonl"]
    assert trainer(tmp_path / "run").train(resume_from_checkpoint=True).global_step == 6


def test_an_output_folder_that_cannot_be_written_is_refused_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(ConfigError, match=r"the run folder .*run cannot be written: Read-only file system. Name another output_dir"):
        trainer(tmp_path / "run").train()
