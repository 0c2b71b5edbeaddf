"""Models in several files: no file over the size asked for, an index that transformers reads, nothing left of an earlier model."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from halfstep import Accelerator
from halfstep.checkpoint import export
from halfstep.checkpoint.export import size_of
from halfstep.errors import CheckpointError, ConfigError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_large_model_becomes_several_files_and_a_small_one_replaces_them(tmp_path: Path) -> None:
    accelerator, net = Accelerator(cpu=True), Tied()
    accelerator.save_model(accelerator.prepare(net), tmp_path / "out", max_shard_size=700)
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(tmp_path / "out") == [*parts, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 16 * 8 * 4 + 4 * (64 + 8) * 4
    read = {}
    for part in parts:
        tensors = load_file(tmp_path / "out" / part)
        assert sum(t.nbytes for t in tensors.values()) <= 700
        assert {index["weight_map"][k] for k in tensors} == {part}
        read |= tensors
    assert sorted(read) == sorted(index["weight_map"])
    assert "head.weight" not in read, "tied: written once"
    assert all(torch.equal(read[k], v) for k, v in net.state_dict().items() if k != "head.weight")
    accelerator.save_model(net, tmp_path / "out")
    assert names(tmp_path / "out") == ["model.safetensors"]


def test_a_tensor_over_the_size_has_a_file_of_its_own(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(Tied(), tmp_path, max_shard_size="300B")
    assert len(names(tmp_path)) == 5 + 1
    assert load_file(tmp_path / "model-00001-of-00005.safetensors")["table.weight"].nbytes == 512


def test_a_transformers_model_in_several_files_is_read_by_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    accelerator = Accelerator(precision="bf16-lean", cpu=True)
    model, optimizer = accelerator.prepare(net := transformers.GPT2LMHeadModel(config), torch.optim.AdamW(net.parameters(), lr=0.01))
    rows = torch.arange(16)[None]
    accelerator.backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step()
    accelerator.save_model(model, tmp_path / "model", max_shard_size="10KB")
    accelerator.save_state(tmp_path / "state")
    export(tmp_path / "state", tmp_path / "exported", "fp32", "10KB")
    for folder in ("model", "exported"):
        assert len(list((tmp_path / folder).glob("model-*.safetensors"))) > 2
        assert (tmp_path / folder / "model.safetensors.index.json").exists()
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert again.lm_head.weight is again.transformer.wte.weight
        full = accelerator.get_state_dict(model)
        assert all(v.dtype == torch.float32 and torch.equal(v, full[k]) for k, v in again.state_dict().items())


def test_a_full_disk_leaves_the_earlier_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(Tied(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match=r"the model in .* could not be written: .*it takes 2.2 kB, and .* are free in .*Free some space"):
        accelerator.save_model(Tied(), tmp_path)
    assert names(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "size"),
    [(700, 700), ("700", 700), ("5GB", 5 * 10**9), ("5 GiB", 5 * 2**30), ("1.5mb", 1_500_000), ("2kB", 2000), ("10B", 10), ("3T", 3 * 10**12)],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1", 0, "0GB", None, True, 1.5e-9, "5GB "[::-1]])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"max_shard_size=.*Use a number of bytes, or text such as '500MB'"):
        size_of(text)
