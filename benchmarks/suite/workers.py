"""Contenders in processes of their own. What one sets up for its whole process (the C library's heap, OpenMP's team, torch's flags), no other gets.

The row's process imports the libraries and computes nothing; a worker is forked from it, so nobody pays for imports again. It makes its
Turn and does what it is told through a pipe: one answer to each order, so the worker that has been asked is the only one that runs, and the
others sleep. Times are taken in the worker: what the pipe takes is in none of them.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.suite.method import Contender, TurnFailedError, reason

FORK = multiprocessing.get_context("fork")
ENDING = 10.0  # seconds after the end of its pipe in which a worker's process ends too
Value = TypeVar("Value")


@dataclass(frozen=True)
class Answer:
    """What an order gave, or the error that it ended in: its line and its traceback."""

    value: Any = None
    error: str = ""
    where: str = ""


class Worker:
    """An object in a process of its own: `ask` calls a method of it there. It answers as a Turn where `make` gives one.

    Errors of the object come as TurnFailedError, and so does the death of its process.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        if count := unnamed_threads():
            raise RuntimeError(
                f"cannot fork a worker: this process has other threads beside its first ({count}), and a fork that waits for them waits for ever. "
                "Let nothing be computed by torch before the last worker is forked, and set OPENBLAS_NUM_THREADS=1."
            )
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_obey, args=(self._pipe, theirs, make), daemon=True)
        self._process.start()
        theirs.close()  # the worker's end is then nobody else's, and its death is the end of the pipe
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the method gives."""
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise TurnFailedError(self._death()) from error
        return self._answer()

    def timed(self, count: int) -> float:
        """As Turn.timed."""
        return float(self.ask("timed", count))

    def loss(self) -> float | None:
        """As Turn.loss."""
        return None if (found := self.ask("loss")) is None else float(found)

    def settle(self) -> None:
        """As Turn.settle."""
        self.ask("settle")

    def close(self) -> None:
        """End the process, whatever it is doing. The end of its process is all that a turn needs."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _answer(self) -> Any:
        wait([self._pipe, self._process.sentinel])
        try:
            answer = self._pipe.recv() if self._pipe.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            raise TurnFailedError(self._death())
        if answer.error:
            error = TurnFailedError(answer.error)
            error.add_note(f"In the worker:\n{answer.where}")
            raise error
        return answer.value

    def _death(self) -> str:
        """How the process ended."""
        self._process.join(ENDING)
        code = self._process.exitcode
        if code is None:
            return "its process no longer answers"
        if code >= 0:
            return f"its process ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def _obey(ours: Connection, pipe: Connection, make: Callable[[], Any]) -> None:
    """The worker's process: make the object, then answer until the row's process is gone."""
    ours.close()  # held open here it would never end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the row's process, which ends this one
    made = _tried(make)
    pipe.send(replace(made, value=None))  # what was made stays here
    while not made.error:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_tried(partial(_call, made.value, method, arguments)))


def _call(made: Any, method: str, arguments: Sequence[Any]) -> Any:
    return getattr(made, method)(*arguments)


def _tried(call: Callable[[], Any]) -> Answer:
    """The answer to an order."""
    try:
        return Answer(call())
    except Exception as error:  # noqa: BLE001 - told to the row, which decides
        return Answer(error=reason(error), where=traceback.format_exc())


def apart(contenders: Sequence[Contender]) -> list[Contender]:
    """The same, each in a process of its own from its making on."""
    return [replace(contender, make=partial(Worker, contender.make)) for contender in contenders]


def elsewhere(call: Callable[[], Value]) -> Value:
    """What a call gives, computed in a process of its own, so that this one can go on to fork."""
    worker = Worker(lambda: call)
    try:
        found: Value = worker.ask("__call__")
    finally:
        worker.close()
    return found


def unnamed_threads() -> int:
    """How many threads this process has beside its first that bear its name, as OpenMP's and OpenBLAS's do; 0 where the system does not tell.

    An allocator's own (jemalloc's, which pyarrow brings) has another name and is made anew by a fork.
    """
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count(Path("/proc/self/comm").read_text()) - 1 if names else 0
