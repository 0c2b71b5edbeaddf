"""Checkpoints that older versions of halfstep wrote: folders under written/, made by the code of their time.

first-*: by the first one, 0.1.0 (commit 721f45d): no masters, no watch, fewer fields of the run's state. last-lean: by the last one of version 1
(commit 92a2298): masters, encoded states. Each is of step 3 of 6 of the run below, in the middle of its first pass.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from halfstep import Trainer, TrainingArguments
from halfstep.checkpoint import export, load, migrations, read_manifest, schema
from halfstep.errors import CheckpointError

WRITTEN = Path(__file__).parent / "written"
RUNS = {"first-fp32": ("fp32", "sgd"), "first-fp16": ("fp16-mixed", "adamw_torch"), "last-lean": ("bf16-lean", "auto")}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.drop, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.out(self.drop(self.norm(self.hidden(x)).relu())).squeeze(-1), labels)}


DATA = [{"x": torch.tensor([i / 8, 1.0, -i / 4, 0.5]), "labels": float(i % 3)} for i in range(16)]


def trainer(folder: Path, name: str, **settings) -> Trainer:
    precision, optim = RUNS[name]
    torch.manual_seed(99)
    defaults = {"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "max_steps": 6, "save_steps": 3, "logging_steps": 2}
    defaults |= {"per_device_train_batch_size": 4, "learning_rate": 0.01, "warmup_steps": 2, "precision": precision, "optim": optim}
    return Trainer(Regression(), TrainingArguments(**{**defaults, **settings}), train_dataset=DATA)


def test_all_written_folders_are_tested_and_of_an_older_version() -> None:
    assert sorted(p.name for p in WRITTEN.iterdir()) == sorted(RUNS)
    assert {read_manifest(WRITTEN / name).version for name in RUNS} == {1}
    assert sorted(migrations.CHANGES) == list(range(schema.OLDEST, schema.VERSION)), "there is a way from every old version to the newest"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_it(tmp_path: Path, name: str) -> None:
    made = trainer(tmp_path / "run", name, max_steps=3)
    made.train(resume_from_checkpoint=WRITTEN / name)
    assert made.state.global_step == 3, "nothing was left to do"
    stored, random = load_file(WRITTEN / name / "model.safetensors"), json.loads((WRITTEN / name / "custom.json").read_text())
    assert all(torch.equal(v, stored[k]) and v.dtype == stored[k].dtype for k, v in made.model.state_dict().items())
    assert made.state.skipped_steps == random["skipped_steps"]
    assert made.state.log_history[: len(random["log_history"])] == random["log_history"]
    if name == "first-fp16":
        assert made.accelerator.scaler.get_scale() == json.loads((WRITTEN / name / "scaler.json").read_text())["scale"]
    on = trainer(tmp_path / "on", name)
    assert on.train(resume_from_checkpoint=WRITTEN / name).global_step == 6
    assert all(torch.isfinite(p).all() for p in on.model.parameters())
    assert read_manifest(tmp_path / "on" / "checkpoint-6").version == schema.VERSION


def test_it_goes_on_with_the_numbers_of_its_time(tmp_path: Path) -> None:
    """In fp32: the loss of steps 5 and 6 as 0.1.0 had it, with its dropout and its order of the data."""
    made = trainer(tmp_path / "run", "first-fp32")
    made.train(resume_from_checkpoint=WRITTEN / "first-fp32")
    assert [r["loss"] for r in made.state.log_history if "loss" in r][-1] == pytest.approx(1.7489894032478333, rel=1e-6)


def test_random_states_are_those_of_one_rank() -> None:
    old = json.loads((WRITTEN / "last-lean" / "random.json").read_text())
    assert len(old["python"]["$tuple"]) == 3
    loaded = load(WRITTEN / "last-lean").parts["random"]
    assert list(loaded) == ["ranks"]
    assert loaded["ranks"][0]["python"][1] == tuple(old["python"]["$tuple"][1]["$tuple"])


def test_a_model_is_exported_from_it(tmp_path: Path) -> None:
    export(WRITTEN / "last-lean", tmp_path / "out")
    full, narrow = load_file(tmp_path / "out" / "model.safetensors"), load_file(WRITTEN / "last-lean" / "model.safetensors")
    assert narrow["hidden.weight"].dtype == torch.bfloat16
    assert full["hidden.weight"].dtype == torch.float32
    assert torch.equal(full["hidden.weight"].bfloat16(), narrow["hidden.weight"])
    assert not torch.equal(full["hidden.weight"], narrow["hidden.weight"].float())


def test_reading_an_old_one_changes_no_file(tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / "first-fp16", tmp_path / "checkpoint-3")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    load(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_run_of_a_newer_version_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / "first-fp32", tmp_path / "checkpoint-3")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["version"] = 7
    (folder / "manifest.json").write_text(json.dumps(manifest))
    made = trainer(tmp_path / "run", "first-fp32")
    weights = [p.clone() for p in made.model.parameters()]
    with pytest.raises(CheckpointError, match=r"has checkpoint version 7.* and this halfstep reads versions 1 to 2"):
        made.train(resume_from_checkpoint=folder)
    assert all(torch.equal(a, b) for a, b in zip(weights, made.model.parameters(), strict=True))
    assert not (tmp_path / "run").exists()
