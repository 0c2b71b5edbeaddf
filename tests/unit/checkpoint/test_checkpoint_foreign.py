"""Folders of other libraries, written by those libraries, are refused with the way their weights can be used."""

from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.checkpoint import load
from halfstep.errors import CheckpointError


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


DATA = [{"x": torch.ones(2), "labels": 1.0}] * 4


def test_a_checkpoint_of_the_transformers_trainer_is_refused_and_its_weights_load_as_said(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=1, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = transformers.Trainer(Regression(), args, train_dataset=DATA)
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    error = refusal(folder)
    assert error.cause.startswith(f"{folder} is a checkpoint of transformers.Trainer, and optimizer states")
    fresh = Regression()
    run(error.remedy, fresh)
    assert torch.equal(fresh.layer.weight, trainer.model.layer.weight)


def test_a_checkpoint_of_a_transformers_model_names_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))
    model.save_pretrained(tmp_path / "model")
    error = refusal(tmp_path / "model")
    assert error.cause.startswith(f"{tmp_path / 'model'} holds the weights of a model and no checkpoint")
    assert f"from_pretrained({str(tmp_path / 'model')!r})" in error.remedy


def test_a_checkpoint_of_accelerate_is_refused_and_its_weights_load_as_said(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), Regression()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(tmp_path / "state")
    error = refusal(tmp_path / "state")
    assert error.cause.startswith(f"{tmp_path / 'state'} is a checkpoint of accelerate, and")
    fresh = Regression()
    run(error.remedy, fresh)
    assert torch.equal(fresh.layer.weight, prepared.layer.weight)


def run(remedy: str, model: nn.Module) -> None:
    """Do what a remedy says."""
    import safetensors.torch

    code = remedy.partition("from its weights: ")[2].partition(", then train()")[0]
    exec(code, {"model": model, "torch": torch, "safetensors": safetensors})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_distributed_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "state"), no_dist=True)
    error = refusal(tmp_path / "state")
    assert error.cause.startswith(f"{tmp_path / 'state'} is a checkpoint of torch.distributed.checkpoint")
    assert "take the weights out of it with that library" in error.remedy


def test_a_folder_of_nobody_known_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("hello")
    assert refusal(tmp_path / "notes").cause == f"checkpoint {tmp_path / 'notes'} holds no manifest, so it is not a whole checkpoint"
