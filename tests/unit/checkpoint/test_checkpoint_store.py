"""A checkpoint folder is written whole and read back whole."""

import contextlib
import functools
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.checkpoint import checkpoints, latest, load, read_manifest, save
from halfstep.errors import CheckpointError

PARTS = {"model": {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}, "state": {"step": 3, "names": ("a", None)}}


def everything(folder: Path) -> dict[str, bytes]:
    """Every file under a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def is_parts(loaded: dict, number: float = 0.0) -> bool:
    return bool(
        torch.equal(loaded["model"]["weight"], PARTS["model"]["weight"] + number)
        and torch.equal(loaded["model"]["half"], PARTS["model"]["half"])
        and loaded["state"] == PARTS["state"]
    )


def changed(number: float) -> dict:
    return {"model": {**PARTS["model"], "weight": PARTS["model"]["weight"] + number}, "state": PARTS["state"]}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    about = {"policy": "fp32", "versions": {"torch": "x"}}
    folder = save(tmp_path / "deep" / "er" / "checkpoint-1", PARTS, about)
    loaded = load(folder)
    assert is_parts(loaded.parts)
    assert loaded.about == about
    assert loaded.folder == folder == (tmp_path / "deep" / "er" / "checkpoint-1")
    assert loaded.parts["model"]["half"].dtype == torch.bfloat16


def test_the_files_are_safetensors_and_json_that_anybody_can_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = save(tmp_path / "c", PARTS)
    assert {p.name for p in folder.iterdir()} == {"manifest.json", "model.json", "model.safetensors", "state.json"}
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], PARTS["model"]["weight"])
    assert json.loads((folder / "state.json").read_text())["step"] == 3
    manifest = read_manifest(folder)
    assert manifest.parts == ("model", "state")
    assert {name: facts.size for name, facts in manifest.files.items()} == {
        p.name: p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json"
    }


def test_the_same_values_give_the_same_files(tmp_path: Path) -> None:
    assert everything(save(tmp_path / "a", PARTS)) == everything(save(tmp_path / "b", PARTS))


def test_a_relative_folder_is_one_of_the_current_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("c", PARTS)
    assert is_parts(load("c").parts)


def test_saving_again_replaces_the_whole_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {**PARTS, "extra": {"x": torch.zeros(1)}})
    (folder / "stray.txt").write_text("not of this checkpoint")
    save(folder, changed(1.0))
    assert is_parts(load(folder).parts, 1.0)
    assert {p.name for p in folder.iterdir()} == {"manifest.json", "model.json", "model.safetensors", "state.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_leavings_of_a_killed_save_are_cleared_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".c.partial").mkdir()
    (tmp_path / ".c.partial" / "model.safetensors").write_bytes(b"half a file")
    save(tmp_path / "c", PARTS)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert is_parts(load(tmp_path / "c").parts)


# --- a save that fails ----------------------------------------------------------------------------------------------------


def refuses_a_value(target: Path) -> None:
    save(target, {"model": changed(9.0)["model"], "state": {"hook": object()}})


def fills_the_disk(target: Path) -> None:
    """Every file may have 2 kB from here on, as on a disk that fills up in the middle of the tensors."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        save(target, {"model": {"weight": torch.zeros(100_000)}, "state": {}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fills_the_disk_with_text(target: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        save(target, {"model": changed(9.0)["model"], "state": {"long": "x" * 10_000}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def gives_about_that_is_no_json(target: Path) -> None:
    save(target, changed(9.0), {"policy": object()})


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("failing", [refuses_a_value, fills_the_disk, fills_the_disk_with_text, gives_about_that_is_no_json])
def test_a_failing_save_leaves_the_older_checkpoint_whole_and_nothing_else(tmp_path: Path, failing: Callable, older: bool) -> None:
    if older:
        save(tmp_path / "checkpoint-1", PARTS)
    before = everything(tmp_path)
    with pytest.raises((CheckpointError, TypeError)) as caught:
        failing(tmp_path / "checkpoint-1")
    assert everything(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["checkpoint-1"] if older else [])
    assert isinstance(caught.value, CheckpointError) or failing is gives_about_that_is_no_json


def test_a_full_disk_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        fills_the_disk(tmp_path / "checkpoint-1")
    assert f"checkpoint {tmp_path / 'checkpoint-1'} could not be written" in caught.value.cause
    assert "Free some space or choose another folder; older checkpoints are unchanged" in caught.value.remedy


def test_a_place_that_cannot_hold_folders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written: .*(Not a directory|File exists)"):
        save(tmp_path / "file" / "checkpoint-1", PARTS)
    assert everything(tmp_path) == {"file": b"in the way"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(tmp_path / "checkpoint-1", PARTS)
    tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


CALLS = {"fsync": ("fsync",), "rename": ("rename", "replace"), "mkdir": ("mkdir",)}  # what the operating system is asked for


class Stop:
    """Lets calls of the operating system work `after` times, then does `act` once, as a full disk, a Ctrl-C or a kill would."""

    def __init__(self, patch: Callable[[object, str, Callable], object], name: str, after: int, act: Callable[[], object]) -> None:
        self.left, self.act, self.fired = after, act, False
        for call in CALLS[name]:
            patch(os, call, functools.partial(self.run, getattr(os, call)))

    def run(self, call: Callable, *args: object, **kwargs: object) -> object:
        self.left -= 1
        if self.left < 0 and not self.fired:
            self.fired = True
            self.act()
        return call(*args, **kwargs)


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir"])
def test_wherever_a_save_stops_the_older_or_the_newer_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    broken = []
    for after in range(20):
        place = tmp_path / str(after)
        place.mkdir()
        target = save(place / "checkpoint-1", PARTS)
        with monkeypatch.context() as patch, contextlib.suppress(CheckpointError, KeyboardInterrupt):
            stop = Stop(patch.setattr, name, after, lambda: throw(error))
            save(target, changed(1.0))
        try:
            loaded = load(target).parts
            whole = is_parts(loaded) or is_parts(loaded, 1.0)
        except CheckpointError:
            whole = False
        if not whole or [p.name for p in place.iterdir()] != ["checkpoint-1"]:
            broken.append((f"{name} number {after + 1}", "whole" if whole else "lost", sorted(p.name for p in place.iterdir())))
        if not stop.fired:
            break
    assert after >= 1, "the call was never made to fail"
    assert not broken


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_wherever_a_save_is_killed_the_older_or_the_newer_checkpoint_is_whole(tmp_path: Path, name: str) -> None:
    """As kill -9 or a power cut: no handler runs. The child ends itself at the n-th call, for every n."""
    lost, finished = [], 7
    for after in range(20):
        place = tmp_path / str(after)
        place.mkdir()
        target = save(place / "checkpoint-1", PARTS)
        child = os.fork()
        if child == 0:
            try:
                Stop(setattr, name, after, lambda: os._exit(0))
                save(target, changed(1.0))
            finally:
                os._exit(finished)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = latest(place)
        if found is None or not any(is_parts(load(found).parts, number) for number in (0.0, 1.0)):
            lost.append((f"{name} number {after + 1}", sorted(p.name for p in place.iterdir())))
        save(target, changed(2.0))  # and the next save works and clears up
        assert is_parts(load(target).parts, 2.0)
        assert [p.name for p in place.iterdir()] == ["checkpoint-1"]
        if status == finished:
            break
    assert after >= 2
    assert not lost


@pytest.mark.parametrize("look", [lambda run: latest(run), lambda run: checkpoints(run), lambda run: read_manifest(run / "checkpoint-1")])
def test_somebody_who_looks_while_a_checkpoint_is_replaced_does_not_disturb_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
) -> None:
    """Another process may list a run at any moment, between the two renames too."""
    for after in range(3):
        target = save(tmp_path / str(after) / "checkpoint-1", PARTS)
        with monkeypatch.context() as patch:
            act = Stop(patch.setattr, "rename", after, lambda run=target.parent: look_at(look, run))
            save(target, changed(1.0))
        assert is_parts(load(target).parts, 1.0)
        assert [p.name for p in target.parent.iterdir()] == ["checkpoint-1"]
    assert not act.fired, "the last round had no call left to stop at"


def look_at(look: Callable[[Path], object], run: Path) -> None:
    with contextlib.suppress(CheckpointError):  # between the renames there may be nothing to read
        look(run)


# --- the list of checkpoints ----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 10**6), max_size=6))
def test_checkpoints_are_in_order_of_their_steps(tmp_path_factory: pytest.TempPathFactory, steps: set[int]) -> None:
    run = tmp_path_factory.mktemp("run")
    for step in steps:
        (run / f"checkpoint-{step}").mkdir()
    for other in ("checkpoint", "checkpoint-", "checkpoint-x", "checkpoint-1.bak", "my-checkpoint-99999999", ".checkpoint-99999999.partial"):
        (run / other).mkdir()
    assert [p.name for p in checkpoints(run)] == [f"checkpoint-{s}" for s in sorted(steps)]
    assert latest(run) == (run / f"checkpoint-{max(steps)}" if steps else None)
    shutil.rmtree(run)


def test_nine_comes_before_ten(tmp_path: Path) -> None:
    for step in (10, 9, 2):
        save(tmp_path / f"checkpoint-{step}", PARTS)
    assert latest(tmp_path) == tmp_path / "checkpoint-10"


def test_a_run_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "nowhere") == []
    assert latest(tmp_path / "nowhere") is None


def test_a_save_that_is_going_on_is_not_the_latest(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", PARTS)
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / ".checkpoint-2.partial")
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / ".checkpoint-3.old")
    assert latest(tmp_path) == tmp_path / "checkpoint-1"
