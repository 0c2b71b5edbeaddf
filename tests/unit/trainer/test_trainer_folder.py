"""The run folder: what is written, what is kept, and what an earlier run's folder is protected from."""

import contextlib
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import nn

from halfstep import Trainer, TrainingArguments
from halfstep.checkpoint import checkpoints, load
from halfstep.demo import GPT, GPTConfig
from halfstep.diagnostics.writing import FILES as RECORDED
from halfstep.errors import CheckpointError, ConfigError, DataError, HalfstepError, PolicyError


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.layer(x).squeeze(-1), labels)}


DATA = [{"x": torch.tensor([float(i), 1.0]), "labels": float(i)} for i in range(8)]


def trainer(folder: Path, data: list = DATA, model: nn.Module | None = None, **settings) -> Trainer:
    defaults = {"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "max_steps": 6, "save_steps": 2, "logging_steps": 1}
    args = TrainingArguments(**{**defaults, "per_device_train_batch_size": 2, "learning_rate": 0.01, **settings})
    return Trainer(model or Regression(), args, train_dataset=data)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    """What is in a folder, without the records of a run (test_trainer_records.py has these)."""
    return sorted(p.name for p in folder.iterdir() if p.name not in RECORDED)


def test_a_run_leaves_its_settings_its_numbers_and_its_checkpoints(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", precision="bf16-mixed")
    made.train()
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "config.yaml", "metrics.jsonl"]
    assert TrainingArguments(**yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())) == made.args
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6, 6]
    assert ["train_loss" in r for r in records] == [False] * 6 + [True]
    assert load(tmp_path / "run" / "checkpoint-4").about["policy"] == "bf16-mixed"


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"save_steps": 4}, [4, 6]),
        ({"save_steps": 100}, [6]),
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}, [4, 8]),
        ({"save_total_limit": 2}, [4, 6]),
        ({"save_total_limit": 1, "save_steps": 4}, [6]),
    ],
)
def test_checkpoints_are_kept_as_the_settings_say(tmp_path: Path, settings: dict, steps: list[int]) -> None:
    trainer(tmp_path / "run", **settings).train()
    assert [p.name for p in checkpoints(tmp_path / "run")] == [f"checkpoint-{s}" for s in steps]


def test_the_limit_counts_the_newest_by_number_and_removes_checkpoints_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    (run / "checkpoint-best").mkdir()
    trainer(run, max_steps=12, save_total_limit=2, save_steps=3).train()
    assert names(run) == ["checkpoint-12", "checkpoint-9", "checkpoint-best", "config.yaml", "metrics.jsonl", "notes.txt"]


def test_a_folder_that_holds_a_run_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    trainer(tmp_path / "run").train()
    before = files(tmp_path)
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path / "run", learning_rate=0.5).train()
    assert caught.value.cause == f"the folder {tmp_path / 'run'} already holds a run"
    for way in (
        "resume_from_checkpoint=True",
        "--resume goes on from checkpoint-6",
        "overwrite_output_dir=True",
        "--overwrite",
        "another output_dir",
    ):
        assert way in caught.value.remedy
    assert files(tmp_path) == before


def test_overwriting_removes_what_the_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run).train()
    (run / "notes.txt").write_text("mine")
    (run / "report.html").write_text("of the run that was here")
    (run / "data").mkdir()
    (run / "data" / "checkpoint-1").write_text("not a checkpoint of this run")
    trainer(run, max_steps=1, learning_rate=0.5, overwrite_output_dir=True).train()
    assert names(run) == ["checkpoint-1", "config.yaml", "data", "metrics.jsonl", "notes.txt"]
    assert (run / "data" / "checkpoint-1").exists()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2, "the step and the end"
    assert yaml.safe_load((run / "config.yaml").read_text())["learning_rate"] == 0.5


def test_overwriting_removes_what_killed_and_given_up_steps_left_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run).train()
    trainer(run).train(resume_from_checkpoint=run / "checkpoint-2")
    shutil.copytree(run / "checkpoint-6", run / ".checkpoint-8.partial")
    trainer(run, max_steps=1, overwrite_output_dir=True).train()
    assert names(run) == ["checkpoint-1", "config.yaml", "metrics.jsonl"]


def test_going_on_from_another_runs_checkpoint_does_not_write_over_the_run_that_is_here(tmp_path: Path) -> None:
    trainer(tmp_path / "one").train()
    trainer(tmp_path / "two").train()
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="two already holds a run"):
        trainer(tmp_path / "two").train(resume_from_checkpoint=tmp_path / "one" / "checkpoint-4")
    assert files(tmp_path) == before
    trainer(tmp_path / "three").train(resume_from_checkpoint=tmp_path / "one" / "checkpoint-4")
    assert names(tmp_path / "three") == ["checkpoint-6", "config.yaml", "metrics.jsonl"]
    assert {k: v for k, v in files(tmp_path).items() if not k.startswith("three")} == before


def test_overwriting_an_empty_place_is_no_error(tmp_path: Path) -> None:
    trainer(tmp_path / "run", overwrite_output_dir=True).train()
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "data", "error"),
    [({"tf32": True}, DATA, PolicyError), ({}, [], DataError), ({"warmup_steps": 2, "lr_scheduler_type": "constant"}, DATA, ConfigError)],
)
def test_a_run_that_is_refused_leaves_nothing_that_is_in_the_way_of_the_next(tmp_path: Path, settings: dict, data: list, error: type) -> None:
    with pytest.raises(error):
        trainer(tmp_path / "run", data, learning_rate=0.5, **settings).train()
    trainer(tmp_path / "run", learning_rate=0.25).train()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["learning_rate"] == 0.25, "the settings are those of the run that ran"


def test_a_path_is_a_place_too(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=tmp_path / "run", use_cpu=True, disable_tqdm=True, max_steps=1)
    Trainer(Regression(), args, train_dataset=DATA).train()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["output_dir"] == str(tmp_path / "run")


@contextlib.contextmanager
def small_files():
    """Lets a test say: from here on, no file may grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_too_full_for_a_checkpoint_ends_the_run_with_a_remedy_and_the_older_one_whole(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", save_total_limit=1)
    with small_files() as limit:
        made.add_callback(Fill(lambda: limit(4096)))
        with pytest.raises(CheckpointError, match=r"checkpoint-4 could not be written: .*Free some space or choose another folder"):
            made.train()
    assert names(tmp_path / "run") == ["checkpoint-2", "config.yaml", "metrics.jsonl"]
    assert trainer(tmp_path / "run").train(resume_from_checkpoint=True).global_step == 6


def test_a_disk_too_full_for_a_record_ends_the_run_with_a_remedy(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run")
    with small_files() as limit:
        made.add_callback(Fill(lambda: limit((tmp_path / "run" / "metrics.jsonl").stat().st_size + 9)))
        with pytest.raises(HalfstepError, match=r"metrics.jsonl"):
            made.train()
    assert trainer(tmp_path / "run").train(resume_from_checkpoint=True).global_step == 6
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6, 6]
    assert ["train_loss" in r for r in records] == [False] * 6 + [True]


class Fill:
    """A callback need not be a TrainerCallback. This one acts after the first checkpoint."""

    def __init__(self, act) -> None:
        self.act = act

    def on_save(self, args, state, control, **kwargs) -> None:
        self.act()


# --- save_model -----------------------------------------------------------------------------------------------------------


def test_the_saved_model_is_read_by_anybody(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", precision="bf16-mixed")
    made.train()
    made.save_model(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {k: v.dtype for k, v in stored.items()} == {"layer.weight": torch.float32, "layer.bias": torch.float32}
    fresh = Regression()
    fresh.load_state_dict(stored)
    assert torch.equal(fresh.layer.weight, made.model.layer.weight)


def test_without_a_folder_the_model_goes_into_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", max_steps=1)
    made.train()
    made.save_model()
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_tied_weights_are_saved_and_load_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    torch.manual_seed(1)
    config = GPTConfig(block_size=8, layers=1, heads=1, width=8)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    made = trainer(tmp_path / "run", rows, GPT(config), max_steps=2)
    made.train()
    made.save_model()
    fresh = GPT(config)
    load_model(fresh, tmp_path / "run" / "model.safetensors")
    assert fresh.head.weight is fresh.bytes.weight
    made.model.eval()
    fresh.eval()
    assert torch.equal(fresh(rows[0]["input_ids"][None])["logits"], made.model(rows[0]["input_ids"][None])["logits"])


def test_a_models_own_way_to_save_is_used(tmp_path: Path) -> None:
    class Own(Regression):
        def save_pretrained(self, folder: Path) -> None:
            (folder / "own.txt").write_text("saved")

    trainer(tmp_path / "run", model=Own()).save_model(tmp_path / "model")
    assert names(tmp_path / "model") == ["own.txt"]
