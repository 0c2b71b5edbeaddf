"""Contenders in processes of their own: turns, errors, deaths. Every law runs in a fresh process, as workers are forked from one without threads."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BEGIN = """
import json, multiprocessing, os, select, signal, sys, threading, time
from benchmarks.suite import method
from benchmarks.suite.method import Contender, OursFailedError, Turn, TurnFailedError, take_turns
from benchmarks.suite.workers import Worker, apart, elsewhere

method.repeats, method.WARM_STEPS = lambda _: 1, 2

def say(found):
    print(json.dumps(found))

def ours(**more):
    return Contender("ours", lambda: Turn(lambda: None, **more), "ours")

def in_step(number, act):
    "A peer that does something in the step of this number."
    steps = []
    def run():
        steps.append(1)
        if len(steps) == number:
            act()
    return Contender("peer", lambda: Turn(run))
"""


def fresh(code, *words):
    """What the last line of a program says, and what it wrote to stderr."""
    command = [sys.executable, "-W", "error", "-c", BEGIN + textwrap.dedent(code), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_workers_take_turns_never_two_at_once(tmp_path):
    """A contender holds a file while it runs that nobody else may find."""
    excluded, rounds, losses, own = fresh(
        """
        folder = sys.argv[1]

        def turn(name):
            def run():
                os.close(os.open(f"{folder}/busy", os.O_CREAT | os.O_EXCL))  # fails where another one is at it
                with open(f"{folder}/seen", "a") as seen:
                    seen.write(f"{name} {os.getpid()}\\n")
                time.sleep(0.002)
                os.unlink(f"{folder}/busy")
            return Turn(run, loss=lambda: float(os.getpid()))

        every = [Contender(name, lambda name=name: turn(name), role) for name, role in (("a", "ours"), ("b", "peer"), ("c", "peer"))]
        taken, excluded = take_turns(apart(every), 4, 60.0)
        say([[e.reason for e in excluded], [len(t.known) for t in taken], [t.losses for t in taken], os.getpid()])
        """,
        tmp_path,
    )
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert "".join(name for name, _ in seen) == "aabbcc" + "abccba" * 2
    by_name = {name: int(process) for name, process in seen}
    assert len({*map(int, (process for _, process in seen)), own}) == 4
    assert losses == [[by_name[name]] * 2 for name in "abc"]
    assert (excluded, rounds) == ([], [4, 4, 4])


def test_what_a_contender_does_to_its_process_no_other_sees():
    assert fresh(
        """
        def turn():
            os.environ["SET_BY_ONE"] = str(int(os.environ.get("SET_BY_ONE", "0")) + 1)
            return Turn(lambda: None, loss=lambda: float(os.environ["SET_BY_ONE"]))

        taken, _ = take_turns(apart([Contender("a", turn, "ours"), Contender("b", turn)]), 1, 60.0)
        say([[t.losses for t in taken], os.environ.get("SET_BY_ONE")])
        """
    ) == [[[1.0, 1.0], [1.0, 1.0]], None]


def test_seconds_are_those_of_the_runs_alone():
    (seconds,) = fresh(
        """
        worker = Worker(lambda: Turn(lambda: time.sleep(0.02), prepare=lambda: time.sleep(0.2)))
        say([worker.timed(2)])
        """
    )
    assert 0.02 <= seconds < 0.1


@pytest.mark.parametrize(
    ("number", "act", "reason"),
    [
        (0, "", "ValueError: cannot be made"),
        (1, "1 / 0", "ZeroDivisionError: division by zero"),
        (4, "1 / 0", "ZeroDivisionError: division by zero"),
        (1, "os._exit(3)", "its process ended with exit code 3"),
        (4, "os._exit(0)", "its process ended with exit code 0"),
        (4, "os.kill(os.getpid(), signal.SIGKILL)", "its process was ended by SIGKILL, as the system does when memory runs out"),
        (1, "sys.exit('over')", "its process ended with exit code 1"),
    ],
)
def test_a_peer_that_fails_or_dies_is_left_out_with_its_reason(number, act, reason):
    found = fresh(
        f"""
        def cannot():
            raise ValueError("cannot be made\\nand more")

        peer = in_step({number}, lambda: {act or None}) if {number} else Contender("peer", cannot)
        taken, excluded = take_turns(apart([ours(), peer, Contender("last", lambda: Turn(lambda: None))]), 5, 60.0)
        say([[(t.name, len(t.known)) for t in taken], [(e.name, e.reason) for e in excluded]])
        """
    )
    assert found == [[["ours", 5], ["last", 5]], [["peer", reason]]]


def test_a_worker_that_dies_between_two_turns_is_told():
    found = fresh(
        """
        worker = Worker(lambda: Turn(lambda: None, loss=lambda: float(os.getpid())))
        os.kill(int(worker.loss()), signal.SIGTERM)
        time.sleep(0.2)
        try:
            worker.timed(1)
        except TurnFailedError as error:
            say(str(error))
        """
    )
    assert found == "its process was ended by SIGTERM"


@pytest.mark.parametrize(
    ("act", "words"),
    [("1 / 0", "ours: .*ZeroDivisionError: division by zero"), ("os._exit(3)", "ours: .*exit code 3")],
)
def test_one_of_ours_that_fails_or_dies_ends_the_row(act, words):
    found = fresh(
        f"""
        mine = Contender("ours", in_step(4, lambda: {act}).make, "ours")
        try:
            take_turns(apart([mine, Contender("peer", lambda: Turn(lambda: None))]), 5, 60.0)
        except OursFailedError as error:
            say([str(error), getattr(error.__cause__, "__notes__", []), [p.name for p in multiprocessing.active_children()]])
        """
    )
    assert re.match(words, found[0])
    assert all("In the worker:" in note and "in run" in note for note in found[1])
    assert len(found[1]) == ("ZeroDivision" in words)
    assert found[2] == []


def test_a_value_computed_elsewhere_and_its_error_come_back():
    found = fresh(
        """
        value = elsewhere(lambda: {"process": os.getpid()})
        try:
            elsewhere(lambda: int("x"))
        except TurnFailedError as error:
            say([value["process"] != os.getpid(), str(error)])
        """
    )
    assert found == [True, "ValueError: invalid literal for int() with base 10: 'x'"]


def test_workers_end_with_the_process_that_forked_them():
    """Killed, it can tell them nothing: the end of their pipes does, the youngest first."""
    found = fresh(
        """
        reading, writing = os.pipe()
        if not os.fork():
            every = [Worker(lambda: Turn(lambda: None, loss=lambda: float(os.getpid()))) for _ in range(3)]
            os.write(writing, json.dumps([worker.loss() for worker in every]).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        processes = [int(p) for p in json.loads(os.read(reading, 1000))]
        os.close(writing)
        ended = bool(select.select([reading], [], [], 10)[0])  # readable at its end: when nobody holds the other end any more
        for process in () if ended else processes:
            os.kill(process, signal.SIGKILL)
        say([len(processes), ended])
        """
    )
    assert found == [3, True]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not tell of threads")
def test_a_process_with_threads_forks_no_worker():
    (text,) = fresh(
        """
        going = threading.Event()
        threading.Thread(target=going.wait, daemon=True).start()
        try:
            Worker(lambda: Turn(lambda: None))
        except RuntimeError as error:
            say([str(error)])
        going.set()
        """
    )
    assert "this process has other threads beside its first (1)" in text
    assert "OPENBLAS_NUM_THREADS=1" in text


def test_torch_computes_with_several_threads_in_workers_and_the_imports_start_none():
    """Forked after a first parallel product the second worker would wait for threads that are not there."""
    found = fresh(
        """
        os.environ |= {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
        import torch
        from benchmarks.suite.workers import unnamed_threads

        def product():
            return float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()), torch.get_num_threads(), unnamed_threads()

        say([elsewhere(product), elsewhere(product), unnamed_threads()])
        """
    )
    assert found[0] == found[1]
    assert found[0][:2] == [512.0**3, 2]
    assert found[0][2] >= 1
    assert found[2] == 0
