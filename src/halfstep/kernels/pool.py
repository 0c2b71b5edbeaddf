"""A few threads that share the pieces of one call: the kernels give up the interpreter's lock, so that they run side by side.

They are torch's own: the team of the OpenMP library that torch is linked with, entered as a compiler's code enters it. After each of torch's parallel
operations that team waits for some milliseconds without giving up its cores (GNU's library, its default), and threads of another pool would share
those cores with it: a kernel of 6.4 ms on 2 cores took 9. Where the library cannot be entered, the threads are Python's.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

Work = Callable[[int], None]


class _Call:
    """One call: pieces are taken in turn by whoever is free, and the first error ends it."""

    def __init__(self, work: Work, pieces: int) -> None:
        self.error: BaseException | None = None
        self._work, self._left, self._pieces = work, pieces, pieces
        self._lock, self._done = threading.Lock(), threading.Event()
        self._running = 0
        self.through: set[int] = set()  # threads of the team that have left

    def take(self) -> None:
        """Work on pieces until none is left."""
        while (piece := self._next()) is not None:
            try:
                self._work(piece)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that called
                self._finish(error)
            else:
                self._finish(None)

    def fail(self, error: BaseException) -> None:
        """Leave out what was not begun, and let this error be raised unless there is one."""
        with self._lock:
            self._left, self.error = 0, self.error or error

    def wait(self) -> None:
        """Until every piece that was begun is finished."""
        self._done.wait()

    def _next(self) -> int | None:
        with self._lock:
            if not self._left:
                return None
            self._left -= 1
            self._running += 1
            return self._pieces - self._left - 1

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._running -= 1
            if error is not None:
                self._left, self.error = 0, self.error or error
            if not self._left and not self._running:
                self._done.set()


class _Pool:
    """Daemon threads that wait for calls. Threads are added when more are asked for, and none is ever taken away."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0

    def offer(self, call: _Call, helpers: int) -> None:
        """Let up to `helpers` threads take part in `call`."""
        with self._lock:
            for _ in range(self._threads, helpers):
                threading.Thread(target=self._serve, name="halfstep-kernel", daemon=True).start()
                self._threads += 1
        for _ in range(helpers):
            self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get().take()


_pool = _Pool()


class _Team:
    """The threads of the OpenMP library that torch runs on: GNU's, or one that has its entry point, as LLVM's and Intel's do on Linux."""

    def __init__(self, enter: Any) -> None:
        self._enter, self._calls, self._numbers = enter, dict[int, _Call](), itertools.count(1)
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._take)

    def run(self, call: _Call, threads: int) -> None:
        """Let the calling thread and up to `threads` - 1 others take part in `call`; back when all of them have left."""
        number = next(self._numbers)
        self._calls[number] = call
        try:
            self._enter(self._callback, number, threads, 0)
        finally:
            del self._calls[number]
        if threading.get_ident() not in call.through:  # an interrupt that came where nothing could be done about it: ctypes has printed it
            raise KeyboardInterrupt

    def enter(self, entry: int, about: int, threads: int) -> None:
        """Call the compiled function at `entry` with the address `about` in as many threads."""
        self._enter(entry, about, threads, 0)

    def _take(self, number: int) -> None:
        try:
            self._calls[number].take()
        except BaseException as error:  # noqa: BLE001 - as an interrupt between two pieces: nothing may go through the library
            self._calls[number].fail(error)
        self._calls[number].through.add(threading.get_ident())


@functools.cache
def _team() -> _Team | None:
    if not sys.platform.startswith("linux") or not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        enter = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).GOMP_parallel  # found in what it is linked with
    except (OSError, AttributeError):
        return None
    enter.argtypes, enter.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return _Team(enter)


_enterable = True  # whether this process may enter the team
_ALLOCATORS = ("jemalloc_bg_thd",)  # threads of libraries that a fork makes anew


def _look() -> None:
    """Whether a fork of this process may enter a team: not where there may be one, whose threads the fork will lack and wait for."""
    global _alone
    try:
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # a thread that has ended meanwhile
        names = []
    _alone = len([name for name in names if name not in _ALLOCATORS]) == 1


_alone = False


def _forget() -> None:
    """A forked process has none of the threads, and perhaps a lock that nobody will release."""
    global _pool, _enterable
    _pool, _enterable = _Pool(), _enterable and _alone


os.register_at_fork(before=_look, after_in_child=_forget)


CHUNK = 1 << 16  # elements that one thread works on in turn: a multiple of the block of 128 that shares a scale


def share_range(count: int, size: int, work: Callable[[int, int], None]) -> None:
    """Call `work(begin, end)` for the parts of 0 .. count that are `size` long, the last one shorter, as `share` does."""
    share(lambda piece: work(piece * size, min((piece + 1) * size, count)), -(-count // size))


def share(work: Work, pieces: int) -> None:
    """Call `work(0)` .. `work(pieces - 1)`, in the calling thread and up to `torch.get_num_threads() - 1` others; back when all are done.

    The first error of a piece is raised here, once the pieces that were begun are finished; later pieces are then left out. Any
    number of threads may call this at once, and a forked process too.
    """
    threads = min(torch.get_num_threads(), pieces)
    if threads < 2:
        for piece in range(pieces):
            work(piece)
        return
    call, team = _Call(work, pieces), _team() if _enterable else None
    if team is not None:
        team.run(call, threads)
    else:
        _pool.offer(call, threads - 1)
        call.take()
        call.wait()
    if call.error is not None:
        raise call.error


# what `run` gives a compiled function: the next element, its own address, how many elements, how many at a time; then what is its own
NEXT, SELF, COUNT, STEP, FIRST = range(5)


def run(entry: int, count: int, size: int, *about: int) -> None:
    """Let threads call the compiled function at the address `entry`, which takes elements of 0 .. count, `size` at a time, until none is left.

    It is given the address of int64 numbers: NEXT, to be moved on by `compile.added_to`, SELF, COUNT, STEP, and `about` from FIRST on. As `share`,
    with no Python in the threads: 2 us a call instead of 40, for what is done many times a step.
    """
    data = np.array((0, 0, count, size, *about), dtype=np.int64)
    data[SELF] = at = data.ctypes.data
    threads = min(torch.get_num_threads(), -(-count // size))
    team = _team() if _enterable else None
    if threads < 2:
        _called(entry)(at)
    elif team is not None:
        team.enter(entry, at, threads)
    else:
        share(lambda _: _called(entry)(at), threads)


@functools.lru_cache(maxsize=64)
def _called(entry: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)
