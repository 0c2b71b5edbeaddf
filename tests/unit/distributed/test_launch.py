"""What the launcher's environment may lack, and one process alone."""

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halfstep.distributed import Solo, launch
from halfstep.errors import ConfigError

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def set_up(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    for name, value in (TORCHRUN | changed).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"MASTER_ADDR": None}, "WORLD_SIZE, RANK, MASTER_PORT, LOCAL_RANK are set and MASTER_ADDR are not"),
        ({"RANK": None}, "and RANK are not"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two', which is no number"),
    ],
)
def test_what_is_wrong_with_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], told: str) -> None:
    set_up(monkeypatch, **changed)
    with pytest.raises(ConfigError, match=told):
        launch(cpu=True)


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch)
    with pytest.raises(ConfigError, match="connects GPUs"):
        launch(cpu=True, backend="nccl")
    with pytest.raises(ConfigError, match="backend 'mpi'"):
        launch(cpu=True, backend="mpi")
    with pytest.raises(ConfigError, match="timeout of 0"):
        launch(cpu=True, timeout=0)


def test_one_process_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, WORLD_SIZE="1", MASTER_ADDR=None)
    ranks = launch(cpu=True)
    assert isinstance(ranks, Solo)
    assert ranks.is_main
    assert ranks.world == 1
    tree = {"a": torch.tensor(3.0), "b": [torch.arange(4)]}
    assert torch.equal(ranks.gather(tree)["a"], torch.tensor([3.0]))
    assert torch.equal(ranks.reduce(tree, "sum")["b"][0], torch.arange(4))
    assert ranks.split([1, 2, 3], padded=True) == [1, 2, 3]
    assert ranks.gather_object("x") == ["x"]
    assert ranks.any(True)
    assert not ranks.any(False)


GLOO = "Name:\tpt_gloo_runloop\nState:\t{} (there)\n"


@pytest.mark.parametrize(
    ("status", "waits"),
    [
        (GLOO.format("S") + "voluntary_ctxt_switches:\t7\n", 0.02),
        (GLOO.format("R") + "voluntary_ctxt_switches:\t7\n", 0.18),
        ("Name:\tpython\nState:\tR (running)\nvoluntary_ctxt_switches:\t7\n", 0.0),
        (GLOO.format("S"), 0.0),  # as a sandbox tells it
        ("", 0.0),
    ],
    ids=["asleep", "awake", "another", "sandboxed", "ended"],
)
def test_the_end_waits_for_threads_of_gloo_and_no_others(status: str, waits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launching = importlib.import_module("halfstep.distributed.launch")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "status").write_text(status)
    monkeypatch.setattr(launching, "TASKS", tmp_path)
    pauses, clock = list[float](), itertools.count()
    time = SimpleNamespace(sleep=pauses.append, monotonic=lambda: 0.02 * next(clock))
    monkeypatch.setattr(launching, "time", time)
    launching.settle(0.19)
    assert sum(pauses) == pytest.approx(waits)
