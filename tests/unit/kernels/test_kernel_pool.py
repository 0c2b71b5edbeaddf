"""The threads that share the pieces of a call."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

from halfstep.kernels import pool


@pytest.fixture(autouse=True, params=["torch's", "Python's"])
def whose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The threads that take part: those of torch's OpenMP library, and those where it cannot be entered."""
    if request.param == "Python's":
        monkeypatch.setattr(pool, "_team", lambda: None)
    elif pool._team() is None:
        pytest.skip("torch's OpenMP library cannot be entered here")
    return str(request.param)


@pytest.fixture
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 50])
def test_every_piece_is_done_once(threads: int, pieces: int) -> None:
    done: list[int] = []
    pool.share(done.append, pieces)
    assert sorted(done) == list(range(pieces))


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_one_thread_makes_no_others(threads: int) -> None:
    seen = set()
    pool.share(lambda piece: seen.add(threading.current_thread()), 20)
    assert seen == {threading.current_thread()}


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_several_threads_take_part_and_are_daemons(threads: int) -> None:
    meeting = threading.Barrier(3, timeout=30)  # nobody gets on until three threads are here
    seen = set()

    def work(piece: int) -> None:
        seen.add(threading.current_thread())
        meeting.wait()

    pool.share(work, 3)
    assert len(seen) == 3
    assert all(thread.daemon for thread in seen - {threading.current_thread()})


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_an_error_of_a_piece_reaches_the_caller_and_the_pool_goes_on(threads: int) -> None:
    def work(piece: int) -> None:
        if piece == 2:
            raise ZeroDivisionError("piece 2")

    with pytest.raises(ZeroDivisionError, match="piece 2"):
        pool.share(work, 40)
    done: list[int] = []
    pool.share(done.append, 10)
    assert sorted(done) == list(range(10))


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_calls_from_two_threads_do_not_mix(threads: int) -> None:
    results: dict[int, list[int]] = {0: [], 1: []}

    def caller(number: int) -> None:
        for _ in range(200):
            pool.share(results[number].append, 7)

    callers = [threading.Thread(target=caller, args=(number,)) for number in (0, 1)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert all(sorted(found) == sorted([*range(7)] * 200) for found in results.values())


def _in_child(done: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(2)
    found: list[int] = []
    pool.share(found.append, 9)
    done.put(sorted(found))


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_an_interrupt_between_two_pieces_reaches_the_caller(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take = pool._Call._next

    def interrupted(call: pool._Call) -> int | None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return take(call)

    monkeypatch.setattr(pool._Call, "_next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.share(lambda piece: None, 40)
    monkeypatch.undo()
    done: list[int] = []
    pool.share(done.append, 10)
    assert sorted(done) == list(range(10))


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_torch_and_the_pool_take_turns_in_several_threads(threads: int) -> None:
    x, found = torch.ones(300_000), dict[int, list[float]]()

    def caller(number: int) -> None:
        torch.set_num_threads(2)
        sums = found.setdefault(number, [])
        for _ in range(20):
            pool.share(lambda piece: sums.append(float(x[piece::4].sum())), 4)
            sums.append(float((x * 2).sum()))

    callers = [threading.Thread(target=caller, args=(number,)) for number in (0, 1)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert [sorted(sums) for sums in found.values()] == [[75_000.0] * 80 + [600_000.0] * 20] * 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_a_forked_process_has_a_pool_of_its_own(threads: int) -> None:
    pool.share(lambda piece: None, 4)  # the parent's threads are there
    context = multiprocessing.get_context("fork")
    done = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(done,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert done.get() == list(range(9))


ALONE = """
import os
import torch
from halfstep.kernels import pool
if {used}:
    torch.ones(1_000_000).mul_(2.0)  # the team is there
child = os.fork()
if not child:
    found = []
    pool.share(found.append, 9)
    os._exit(0 if sorted(found) == list(range(9)) and pool._enterable is not {used} else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("used", [False, True], ids=["before torch's threads are there", "after"])
def test_a_fork_enters_the_team_only_where_its_process_had_none(used: bool, whose: str) -> None:
    if whose == "Python's":
        pytest.skip("it is about torch's")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}  # OpenBLAS has threads of its own
    ended = subprocess.run([sys.executable, "-c", ALONE.format(used=used)], env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
