"""Checkpoints that are named by number, hooks, single files, and trackers of a run."""

import json
import math
from pathlib import Path

import accelerate.utils as theirs
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from halfstep import Accelerator
from halfstep import accelerator as ours
from halfstep.errors import CheckpointError, ConfigError, StepOrderError


def run(**kwargs) -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(cpu=True, **kwargs)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return accelerator, model


def named(folder: Path, library=ours, **kwargs) -> dict:
    return {"project_config": library.ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **kwargs)}


@pytest.mark.parametrize("library", [ours, theirs])
def test_checkpoints_are_numbered_and_the_newest_kept(tmp_path: Path, library) -> None:
    accelerator, model = run(**named(tmp_path, library, total_limit=2))
    for value in range(4):
        nn.init.constant_(model.weight, value)
        assert accelerator.save_state().name == f"checkpoint_{value}"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    again, model = run(**named(tmp_path, library))
    with pytest.raises(ConfigError, match=r"names it itself"):
        again.save_state(tmp_path / "x")
    again.load_state()
    assert model.weight.tolist() == [[3.0, 3.0]]
    assert again.save_iteration == 4
    assert again.save_state().name == "checkpoint_4"
    again.load_state(tmp_path / "checkpoints" / "checkpoint_2")
    assert model.weight.tolist() == [[2.0, 2.0]]
    with pytest.raises(ConfigError, match=r"checkpoint_3 is there already"):
        again.save_state()


def test_a_half_written_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    accelerator, _ = run(**named(tmp_path))
    accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_7").mkdir()
    again, _ = run(**named(tmp_path))
    again.load_state()
    assert again.save_iteration == 1


@pytest.mark.parametrize(
    ("kwargs", "call", "error", "says"),
    [
        ({}, lambda a: a.save_state(), ConfigError, "automatic_checkpoint_naming"),
        ({}, lambda a: a.load_state(), ConfigError, "automatic_checkpoint_naming"),
        ({}, lambda a: a.save_state("x", safe_serialization=False), ConfigError, "pickles"),
        ({}, lambda a: a.save_model(a._models[0], "x", safe_serialization=False), ConfigError, "pickles"),
        ({}, lambda a: a.register_save_state_pre_hook(3), ConfigError, "Give it a function"),
        ({}, lambda a: a.save([1], "x.safetensors", safe_serialization=True), ConfigError, "tensors by name"),
        ({}, lambda a: a.save([1], "none/x.pt"), CheckpointError, "none/x.pt could not be written"),
        (named(Path("empty")), lambda a: a.load_state(), CheckpointError, "holds no checkpoint"),
        ({"project_config": ours.ProjectConfiguration(automatic_checkpoint_naming=True)}, lambda a: a.save_state(), ConfigError, "Pass project_dir"),
    ],
)
def test_folders_that_are_not_there_are_named(kwargs, call, error, says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        call(run(**kwargs)[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("limit", "naming", "says"), [(0, True, "would keep no checkpoint"), (3, False, "no effect without")])
def test_a_limit_that_limits_nothing_is_refused(limit: int, naming: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ours.ProjectConfiguration("x", automatic_checkpoint_naming=naming, total_limit=limit)


def test_hooks_add_files_to_a_whole_checkpoint(tmp_path: Path) -> None:
    accelerator, model = run()
    told: list[object] = []

    def save(models: list, weights: list, folder: str) -> None:
        told.append([models == [model], sorted(weights[0]), (Path(folder) / "manifest.json").exists()])
        weights.pop()
        (Path(folder) / "own.json").write_text("{}")

    saving = accelerator.register_save_state_pre_hook(save)
    loading = accelerator.register_load_state_pre_hook(lambda models, folder: told.append((Path(folder) / "own.json").exists()))
    accelerator.save_state(tmp_path / "one")
    accelerator.load_state(tmp_path / "one")
    saving.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "two")
    accelerator.load_state(tmp_path / "two")
    assert told == [[True, ["bias", "weight"], True], True]


def test_single_objects_are_written_whole(tmp_path: Path) -> None:
    accelerator, _ = run()
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["a"], torch.ones(2))
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.ones(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "a.safetensors"]


# --- trackers ---------------------------------------------------------------------------------------------------------------


class Own(ours.GeneralTracker):
    name = "own"

    def __init__(self) -> None:
        self.told: list[object] = []

    def store_init_configuration(self, values) -> None:
        self.told.append(dict(values))

    def log(self, values, step=None, **kwargs) -> None:
        self.told.append((dict(values), step, kwargs))

    def finish(self) -> None:
        self.told.append("closed")


def test_trackers_are_told_and_closed(tmp_path: Path) -> None:
    own = Own()
    accelerator, _ = run(log_with=["jsonl", own], project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(math.nan)}, step=2, log_kwargs={"own": {"extra": 1}})
    assert accelerator.get_tracker("own") is own
    assert accelerator.get_tracker("jsonl", unwrap=True) == tmp_path / "run" / "metrics.jsonl"
    accelerator.end_training()
    accelerator.end_training()
    assert own.told[0] == {"lr": 0.1}
    assert own.told[1][1:] == (2, {"extra": 1})
    assert own.told[2:] == ["closed"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 2, "loss": NaN}\n'
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1}


def test_numbers_are_never_lost_in_silence(tmp_path: Path) -> None:
    accelerator, _ = run(log_with="jsonl", project_dir=tmp_path)
    with pytest.raises(StepOrderError, match=r"init_trackers\(project_name\)"):
        accelerator.log({"loss": 1.0})
    with pytest.raises(StepOrderError, match="was not started"):
        accelerator.get_tracker("jsonl")
    with pytest.raises(ConfigError, match="there is no tracker 'wandb'"):
        accelerator.get_tracker("wandb")
    with pytest.raises(ConfigError, match="init_kwargs has 'wandb'"):
        accelerator.init_trackers("run", init_kwargs={"wandb": {}})
    accelerator.init_trackers("run")
    with pytest.raises(ConfigError, match="a float"):
        accelerator.log(3.0)
    run()[0].log({"loss": 1.0})  # nobody was asked to listen


def test_a_tracker_that_needs_a_folder_says_so() -> None:
    accelerator, _ = run(log_with="jsonl")
    with pytest.raises(ConfigError, match="project_dir"):
        accelerator.init_trackers("run")


def test_other_processes_have_trackers_that_do_nothing(tmp_path: Path) -> None:
    accelerator, _ = run(log_with="jsonl", project_dir=tmp_path)
    accelerator.ranks = type("Second", (), {"world": 2, "rank": 1, "local_rank": 1, "is_main": False, "is_local_main": False})()
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    assert type(accelerator.get_tracker("jsonl")) is ours.GeneralTracker
    assert not list(tmp_path.iterdir())
