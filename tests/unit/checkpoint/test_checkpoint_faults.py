"""A save that is cut off at any call of the operating system, by a kill or by a full disk, leaves the older checkpoint usable."""

import errno
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfstep.checkpoint import checkpoints, hold, is_whole, latest, load, remove, save, tidy
from halfstep.errors import CheckpointError

MEMORY = Path("/dev/shm")  # hundreds of saves, each of which waits for its disk


@pytest.fixture
def tmp_path():
    """A place in memory where there is one."""
    place = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    yield place
    shutil.rmtree(place)


CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")  # of os, that a save makes


def parts(number: float) -> dict:
    return {"model": {"weight": torch.full((300,), number), "half": torch.ones(3, dtype=torch.bfloat16)}, "state": {"step": int(number)}}


def number_in(folder: Path) -> float:
    loaded = load(folder).parts
    number = float(loaded["state"]["step"])
    assert torch.equal(loaded["model"]["weight"], torch.full((300,), number)), "parts of two checkpoints"
    return number


class Cut:
    """Counts the calls of the operating system; at number `at` it acts, before the call or after it."""

    def __init__(self, patch: Callable, at: int, act: Callable[[], object], after: bool = False, only: tuple[str, ...] = CALLS) -> None:
        self.at, self.act, self.after, self.made = at, act, after, 0
        for name in only:
            patch(os, name, functools.partial(self.run, getattr(os, name)))

    def run(self, call: Callable, *args: object, **kwargs: object) -> object:
        self.made += 1
        mine = self.made == self.at
        if mine and not self.after:
            self.act()
        result = call(*args, **kwargs)
        if mine and self.after:
            self.act()
        return result


def calls_of_a_save(place: Path, target: str) -> int:
    """How many calls a save makes that replaces a checkpoint, or makes a new one."""
    save(place / "checkpoint-1", parts(1.0))
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch.setattr, 0, lambda: None)
        save(place / target, parts(2.0))
    shutil.rmtree(place)
    return cut.made


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("target", ["checkpoint-1", "checkpoint-2"], ids=["replaces", "beside"])
def test_a_save_killed_at_any_call_leaves_a_whole_checkpoint_and_the_next_save_clears_up(tmp_path: Path, target: str) -> None:
    total = calls_of_a_save(tmp_path / "counted", target)
    assert total > 25
    for at in range(1, total + 1):
        place = tmp_path / str(at)
        save(place / "checkpoint-1", parts(1.0))
        child = os.fork()
        if child == 0:  # as kill -9: no handler and no finally runs
            try:
                Cut(setattr, at, lambda: os._exit(9), after=at % 2 == 0)
                save(place / target, parts(2.0))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, at
        found = latest(place)
        assert number_in(found) in (1.0, 2.0), at
        assert all(is_whole(c) for c in checkpoints(place)), at
        save(place / target, parts(3.0))
        assert number_in(place / target) == 3.0
        tidy(place)
        assert sorted(p.name for p in place.iterdir()) == sorted({"checkpoint-1", target}), at


FULL = OSError(errno.ENOSPC, "No space left on device")


def fails(error: BaseException) -> None:
    raise error


def outcome_of_save(target: Path) -> CheckpointError | None:
    try:
        save(target, parts(2.0))
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("target", ["checkpoint-1", "checkpoint-2"], ids=["replaces", "beside"])
def test_a_disk_full_at_any_call_ends_in_an_error_with_the_room_it_takes(tmp_path: Path, target: str) -> None:
    grown = ("write", "fsync", "mkdir", "rename")
    at, told = 0, 0
    while True:
        at += 1
        place = tmp_path / str(at)
        save(place / "checkpoint-1", parts(1.0))
        with pytest.MonkeyPatch.context() as patch:
            cut = Cut(patch.setattr, at, lambda: fails(FULL), only=grown)
            error = outcome_of_save(place / target)
        if error is not None:
            told += 1
            assert error.cause.startswith(f"checkpoint {place / target} could not be written: [Errno 28] No space left on device: it takes ")
            assert "are free in" in error.cause
            assert error.remedy == "Free some space or choose another folder; older checkpoints are unchanged."
        assert number_in(latest(place)) in (1.0, 2.0), at
        assert number_in(place / "checkpoint-1") in (1.0, 2.0), at
        assert {p.name for p in place.iterdir()} <= {"checkpoint-1", target}, at
        if cut.made < at:
            break
    assert told >= 9, "every write and every sync of the files, the new folder and the renames"


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "checkpoint-1", parts(1.0))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 999))
    made = Cut(monkeypatch.setattr, 0, lambda: None, only=("write", "rename"))
    with pytest.raises(CheckpointError, match=r"could not be written: .*: it takes 1\.\d kB, and 999 bytes are free in") as caught:
        save(tmp_path / "checkpoint-2", parts(2.0))
    assert made.made == 0
    assert str(tmp_path / "checkpoint-2") in caught.value.cause
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_file_system_that_tells_no_size_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    assert number_in(save(tmp_path / "checkpoint-2", parts(2.0))) == 2.0


def test_a_write_that_takes_a_part_only_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: whole(handle, data[:7]))
    assert number_in(save(tmp_path / "checkpoint-2", parts(2.0))) == 2.0


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    Cut(monkeypatch.setattr, 2, lambda: fails(OSError(number, os.strerror(number))), only=("mkdir",))  # after that of the run's folder
    with pytest.raises(CheckpointError, match=r"could not be written: .*Choose a folder that can be written; older checkpoints are unchanged"):
        save(tmp_path / "checkpoint-2", parts(2.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs the right to become another user; test_checkpoint_store has it for others")
def test_a_folder_of_another_user_is_refused() -> None:
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    child = os.fork()
    if child == 0:
        try:
            os.seteuid(65534)
            save(place / "checkpoint-1", parts(1.0))
        except CheckpointError as error:
            os._exit(3 if "Permission denied" in error.cause else 4)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert list(place.iterdir()) == []
    place.rmdir()


# --- two at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_that_save_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    """The second is told, and the first one ends its save."""
    inside, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Cut(setattr, 3, lambda: (os.write(inside[1], b"x"), os.read(go_on[0], 1)), only=("fsync",))
            save(tmp_path / "checkpoint-1", parts(1.0))
            os._exit(0)
        finally:
            os._exit(1)
    os.read(inside[0], 1)
    with pytest.raises(CheckpointError, match=r"another process writes the checkpoint .*Give each run a folder of its own"):
        save(tmp_path / "checkpoint-1", parts(2.0))
    os.write(go_on[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert number_in(tmp_path / "checkpoint-1") == 1.0
    for handle in (*inside, *go_on):
        os.close(handle)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_held_folder_is_free_when_its_process_is_killed_although_workers_live_on(tmp_path: Path) -> None:
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        hold(tmp_path)
        if os.fork() == 0:  # a worker of a data loader
            os.write(ready[1], b"x")
            os.read(end[0], 1)
            os._exit(0)
        signal.pause()
    os.read(ready[0], 1)
    assert hold(tmp_path) is None
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    held = hold(tmp_path)
    assert held is not None
    assert hold(tmp_path) is None, "one at a time, also in one process"
    held.release()
    again = hold(tmp_path)
    assert again is not None
    again.release()
    os.write(end[1], b"x")
    for handle in (*ready, *end):
        os.close(handle)


# --- links and removals ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_was_moved_and_linked_is_replaced_where_it_lies(tmp_path: Path) -> None:
    other = save(tmp_path / "other disk" / "moved", parts(1.0))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-1").symlink_to(other)
    assert number_in(latest(tmp_path / "run")) == 1.0
    assert save(tmp_path / "run" / "checkpoint-1", parts(2.0)) == tmp_path / "run" / "checkpoint-1"
    assert number_in(other) == 2.0
    assert (tmp_path / "run" / "checkpoint-1").is_symlink()
    assert [p.name for p in other.parent.iterdir()] == ["moved"]


def test_a_run_in_a_linked_folder_saves_and_is_found(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tmp_path / "link" / "checkpoint-1", parts(1.0))
    assert number_in(latest(tmp_path / "link")) == 1.0
    assert (tmp_path / "real" / "checkpoint-1" / "manifest.json").exists()


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    other = save(tmp_path / "other" / "moved", parts(1.0))
    (tmp_path / "checkpoint-1").symlink_to(other)
    remove(tmp_path / "checkpoint-1")
    assert not (tmp_path / "checkpoint-1").is_symlink()
    assert number_in(other) == 1.0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_removal_that_is_killed_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    for at in range(1, 20):
        place = tmp_path / str(at)
        save(place / "checkpoint-1", parts(1.0))
        save(place / "checkpoint-2", parts(2.0))
        child = os.fork()
        if child == 0:
            try:
                Cut(setattr, at, lambda: os._exit(9), only=("rename", "unlink", "rmdir"))
                remove(place / "checkpoint-1")
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert all(is_whole(c) for c in checkpoints(place)), at
        assert number_in(latest(place)) == 2.0
        tidy(place)
        assert {p.name for p in place.iterdir()} <= {"checkpoint-1", "checkpoint-2"}
        if status == 1:
            break
    assert at > 5
