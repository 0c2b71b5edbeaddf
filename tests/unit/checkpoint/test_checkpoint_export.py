"""`export`: the model of a checkpoint, each weight its fp32 master rounded once, loadable without halfstep."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from halfstep import Accelerator, ema
from halfstep.checkpoint import export, save
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import full_values
from halfstep.policy import DTYPES


class Net(nn.Module):
    """A convolution, a batch norm with counters, a tied pair of layers, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 9)
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.table(x).mean(1, keepdim=True)))
        return self.second(self.first(h).tanh())


def trained(place: Path, precision: str, loaded: torch.dtype = torch.float32, steps: int = 4) -> Net:
    """A net after some steps, and its checkpoint at `place`."""
    torch.manual_seed(1)
    accelerator, net = Accelerator(precision=precision, cpu=True), Net().to(loaded)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    for _ in range(steps):
        accelerator.backward(net(torch.randint(0, 7, (5, 4))).float().square().mean())
        assert optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(place)
    return net


def values(net: nn.Module) -> dict[str, Tensor]:
    """What should be written, before rounding: full values of weights, and buffers."""
    known = dict(net.named_parameters(remove_duplicate=False))
    return {key: full_values(known[key]) if key in known else value for key, value in net.state_dict().items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "precision",
    [
        "fp32",
        "bf16-mixed",
        "bf16-lean",
        "fp16-lean",
        "bf16-true",
        "fp16-true",
        "bf16-lean,weights=split24,states=bf16",
        "bf16-true,weights=stochastic",
    ],
)
def test_values_are_the_masters_rounded_once(tmp_path: Path, precision: str, dtype: str) -> None:
    net = trained(tmp_path / "state", precision)
    assert export(tmp_path / "state", tmp_path / "out", dtype) == tmp_path / "out"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    written, expected = load_file(tmp_path / "out" / "model.safetensors"), values(net)
    assert sorted(written) == sorted(set(expected) - {"second.weight"})
    for name, tensor in written.items():
        wanted = expected[name].to(DTYPES[dtype]) if expected[name].is_floating_point() else expected[name]
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)
    fresh = Net().to(DTYPES[dtype])
    load_model(fresh, tmp_path / "out" / "model.safetensors")
    assert fresh.second.weight is fresh.first.weight
    assert torch.equal(fresh.conv.weight, values(net)["conv.weight"].to(DTYPES[dtype]))


@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-lean", "fp16-mixed"])
def test_a_model_that_was_loaded_in_16_bits_is_exported_in_fp32_in_full(tmp_path: Path, precision: str, loaded: torch.dtype) -> None:
    net = trained(tmp_path / "state", precision, loaded)
    export(tmp_path / "state", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in values(net).items():
        if name != "second.weight":
            assert torch.equal(written[name], value.float() if value.is_floating_point() else value), name
    assert not torch.equal(written["conv.weight"], written["conv.weight"].to(loaded).float()), "more bits than 16 were trained"


def test_weights_outside_the_optimizer_are_exported_in_full(tmp_path: Path) -> None:
    accelerator, net = Accelerator(precision="bf16-lean", cpu=True), Net()
    first = net.conv.weight.detach().clone()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.first.parameters()))
    accelerator.backward(net(torch.randint(0, 7, (5, 4))).square().mean())
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    export(tmp_path / "state", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["conv.weight"], first)


def test_frozen_weights_are_exported_as_they_are(tmp_path: Path) -> None:
    accelerator, net = Accelerator(precision="bf16-lean", cpu=True), Net()
    net.conv.requires_grad_(False)
    first = net.conv.weight.detach().clone()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad]))
    accelerator.backward(net(torch.randint(0, 7, (5, 4))).square().mean())
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    export(tmp_path / "state", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["conv.weight"], first)


def test_exporting_changes_nothing_and_gives_the_same_bytes_again(tmp_path: Path) -> None:
    trained(tmp_path / "state", "bf16-lean")
    before = {p.name: p.read_bytes() for p in (tmp_path / "state").iterdir()}
    export(tmp_path / "state", tmp_path / "one", "bf16")
    export(tmp_path / "state", tmp_path / "two", "bf16")
    assert {p.name: p.read_bytes() for p in (tmp_path / "state").iterdir()} == before
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()


# --- refused, with a remedy, and nothing written --------------------------------------------------------------------------


def refused(place: Path, kind: type, words: str, checkpoint: str = "state", dtype: str = "fp32", out: str = "out") -> None:
    before = sorted(str(p) for p in place.rglob("*"))
    with pytest.raises(kind, match=words) as caught:
        export(place / checkpoint, place / out, dtype)
    assert caught.value.remedy
    assert sorted(str(p) for p in place.rglob("*")) == before


def test_a_folder_that_is_missing_foreign_or_no_model_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, CheckpointError, "nowhere does not exist", "nowhere")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.bin").write_text("x")
    refused(tmp_path, CheckpointError, "holds no manifest", "foreign")
    (tmp_path / "foreign" / "manifest.json").write_text("{}")
    refused(tmp_path, CheckpointError, "is not a halfstep checkpoint", "foreign")
    (tmp_path / "file").write_text("x")
    refused(tmp_path, CheckpointError, "file", "file")
    save(tmp_path / "other", {"numbers": {"a": torch.ones(2)}})
    refused(tmp_path, CheckpointError, "holds no model. Name a folder that Accelerator.save_state or Trainer wrote", "other")


def test_an_unknown_format_is_refused_with_those_there_are(tmp_path: Path) -> None:
    trained(tmp_path / "state", "bf16-lean", steps=1)
    refused(tmp_path, ConfigError, "dtype='fp8' is not known. Use one of fp32, bf16, fp16", dtype="fp8")


def test_an_output_that_holds_something_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "state", "bf16-lean", steps=1)
    export(tmp_path / "state", tmp_path / "out")
    refused(tmp_path, ConfigError, "is not empty. Name a new folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path, ConfigError, "is a file. Name a new folder", out="file")
    refused(tmp_path, ConfigError, "is a file|in a file|cannot be written", out="file/below")
    refused(tmp_path, ConfigError, "state", out="state")


def test_a_configuration_that_lies_there_is_not_overwritten(tmp_path: Path) -> None:
    trained(tmp_path / "state", "bf16-lean", steps=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    refused(tmp_path, ConfigError, "Name a new folder")
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


def test_values_that_fp16_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    accelerator, net = Accelerator(precision="bf16-lean,fp32=first", cpu=True), Net()
    with torch.no_grad():
        net.table.weight[3, 2] = 1e5
    accelerator.prepare(net)
    accelerator.save_state(tmp_path / "state")
    refused(tmp_path, ConfigError, r"table.weight has values up to 100000, which float16 cannot hold. Use --dtype bf16 or fp32", dtype="fp16")
    export(tmp_path / "state", tmp_path / "out", "bf16")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "optimizer.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    trained(tmp_path / "state", "bf16-lean", steps=1)
    path = tmp_path / "state" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    refused(tmp_path, CheckpointError, "is damaged")
    path.write_bytes(bytes(data[:-3]))
    refused(tmp_path, CheckpointError, "is damaged|is truncated")
    path.unlink()
    refused(tmp_path, CheckpointError, "is truncated|holds no manifest")


def test_of_two_averages_none_is_taken(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    averages = [ema(model, decay) for decay in (0.5, 0.9)]
    for average in averages:
        average.update()
    for count, average in enumerate(averages):
        accelerator.register_for_checkpointing(average)
        accelerator.save_state(tmp_path / str(count))
    assert load_file(export(tmp_path / "0", tmp_path / "one", weights="average") / "model.safetensors").keys() == model.state_dict().keys()
    with pytest.raises(CheckpointError, match=r"holds 2 averages of its model\. .*register one halfstep\.ema"):
        export(tmp_path / "1", tmp_path / "two", weights="average")
    assert not (tmp_path / "two").exists()
