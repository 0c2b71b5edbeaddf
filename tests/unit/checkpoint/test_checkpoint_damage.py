"""A checkpoint that is not what was written is refused: the message names the file and the checkpoints that are left."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.checkpoint import load, save
from halfstep.errors import CheckpointError

PARTS = {"model": {"weight": torch.arange(6.0), "bias": torch.ones(2, dtype=torch.float16)}, "state": {"step": 3, "lr": 0.1}}
ABOUT = {"policy": "bf16-mixed"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint-10", PARTS, ABOUT)


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value


FILES = ["model.json", "model.safetensors", "state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_with_its_sizes(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for kept in {0, 1, len(data) // 2, len(data) - 1}:
        (folder / name).write_bytes(data[:kept])
        error = refusal(folder)
        assert error.cause == f"checkpoint {folder} is truncated: {name} holds {kept} bytes of {len(data)}"
        assert error.remedy == "There is no other checkpoint beside it: start anew."


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert refusal(folder).cause == f"checkpoint {folder} is truncated: {name} is missing"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_grew_is_refused(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(b"\n")
    assert name in refusal(folder).cause


def test_a_file_that_became_a_folder_is_refused(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").mkdir()
    assert "state.json is missing" in refusal(folder).cause


def test_other_checkpoints_of_the_run_are_named(folder: Path) -> None:
    save(folder.parent / "checkpoint-2", PARTS)
    save(folder.parent / "checkpoint-9", PARTS)
    (folder.parent / "checkpoint-11").mkdir()  # not whole: nothing to recommend
    (folder / "model.safetensors").unlink()
    assert refusal(folder).remedy == f"Other checkpoints of this run: {folder.parent / 'checkpoint-2'}, {folder.parent / 'checkpoint-9'}."


@pytest.fixture(scope="module")
def original() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        return {p.name: p.read_bytes() for p in save(Path(place) / "checkpoint-10", PARTS, ABOUT).iterdir()}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_in_a_file_is_refused(original: dict[str, bytes], name: str, data: st.DataObject) -> None:
    content = bytearray(original[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as place:
        for other, bytes_ in original.items():
            (Path(place) / other).write_bytes(content if other == name else bytes_)
        assert refusal(Path(place)).cause == f"checkpoint {place} is damaged: the content of {name} is not what was written"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_in_the_manifest_is_refused_or_changes_nothing(original: dict[str, bytes], data: st.DataObject) -> None:
    content = bytearray(original["manifest.json"])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as place:
        for other, bytes_ in original.items():
            (Path(place) / other).write_bytes(content if other == "manifest.json" else bytes_)
        try:
            loaded = load(place)
        except CheckpointError:
            return  # any other error is a fault
    assert torch.equal(loaded.parts["model"]["weight"], PARTS["model"]["weight"])
    assert loaded.parts["state"] == PARTS["state"]
    assert loaded.about == ABOUT


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return act


@pytest.mark.parametrize(
    "damage",
    [
        edited(lambda m: m.pop("files")),
        edited(lambda m: m.pop("parts")),
        edited(lambda m: m.pop("about")),
        edited(lambda m: m.update(files=[])),
        edited(lambda m: m["files"]["model.json"].pop("size")),
        edited(lambda m: m["files"]["model.json"].update(extra=1)),
        edited(lambda m: m["files"].pop("model.json")),
        edited(lambda m: m["parts"].append("optimizer")),
        edited(lambda m: m.update(parts=None)),
        lambda folder: (folder / "manifest.json").write_text(""),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
    ],
)
def test_a_damaged_manifest_is_a_damaged_checkpoint(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    error = refusal(folder)
    assert str(folder) in error.cause
    assert "damaged" in error.cause or "truncated" in error.cause
    assert error.remedy


def test_a_manifest_without_its_last_bytes_is_refused(folder: Path) -> None:
    whole = (folder / "manifest.json").read_bytes()
    for kept in range(0, len(whole), 7):
        (folder / "manifest.json").write_bytes(whole[:kept])
        assert "manifest.json is not JSON" in refusal(folder).cause


@pytest.mark.parametrize("version", [3, 0, -1, None, "1", True, 1.0])
def test_another_version_is_refused_with_what_to_use(folder: Path, version: object) -> None:
    edited(lambda m: m.update(version=version))(folder)
    error = refusal(folder)
    assert error.cause == f"{folder} has checkpoint version {version}, and this halfstep reads versions 1 to 2"
    assert error.remedy == "Use the halfstep that wrote it."


def test_a_newer_version_is_refused_with_the_halfstep_that_wrote_it(folder: Path) -> None:
    edited(lambda m: m.update(version=3, about={"versions": {"halfstep": "9.1"}}))(folder)
    error = refusal(folder)
    assert error.cause == f"{folder} has checkpoint version 3, written by halfstep 9.1, and this halfstep reads versions 1 to 2"
    assert error.remedy == "Use the halfstep that wrote it, or a newer one: pip install 'halfstep>=9.1'."


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"format": "pt"}', '{"version": 1}', "{}"])
def test_a_foreign_manifest_is_refused(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    error = refusal(folder)
    assert error.cause == f"{folder} is not a halfstep checkpoint"
    assert "manifest.json written by halfstep" in error.remedy


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", PARTS)
    error = refusal(tmp_path / "checkpoint-4")
    assert error.cause == f"checkpoint {tmp_path / 'checkpoint-4'} does not exist"
    assert str(tmp_path / "checkpoint-3") in error.remedy


def test_reading_changes_nothing(folder: Path) -> None:
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    loaded = load(folder)
    loaded.parts["model"]["weight"].zero_()
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before
    assert torch.equal(load(folder).parts["model"]["weight"], PARTS["model"]["weight"])


def test_loaded_tensors_outlive_the_folder(folder: Path) -> None:
    loaded = load(folder)
    shutil.rmtree(folder)
    assert torch.equal(loaded.parts["model"]["weight"], PARTS["model"]["weight"])
