"""A few threads that share the pieces of one call: the kernels give up the interpreter's lock, so that they run side by side."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

Work = Callable[[int], None]


class _Call:
    """One call: pieces are taken in turn by whoever is free, and the first error ends it."""

    def __init__(self, work: Work, pieces: int) -> None:
        self.error: BaseException | None = None
        self._work, self._left, self._pieces = work, pieces, pieces
        self._lock, self._done = threading.Lock(), threading.Event()
        self._running = 0

    def take(self) -> None:
        """Work on pieces until none is left."""
        while (piece := self._next()) is not None:
            try:
                self._work(piece)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that called
                self._finish(error)
            else:
                self._finish(None)

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


def _forget() -> None:
    """A forked process has none of the threads, and perhaps a lock that nobody will release."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)


CHUNK = 1 << 16  # elements that one thread works on in turn: a multiple of the block of 128 that shares a scale


def share_range(count: int, size: int, work: Callable[[int, int], None]) -> None:
    """Call `work(begin, end)` for the parts of 0 .. count that are `size` long, the last one shorter, as `share` does."""
    share(lambda piece: work(piece * size, min((piece + 1) * size, count)), -(-count // size))


def share(work: Work, pieces: int) -> None:
    """Call `work(0)` .. `work(pieces - 1)`, in the calling thread and up to `torch.get_num_threads() - 1` others; back when all are done.

    The first error of a piece is raised here, once the pieces that were begun are finished; later pieces are then left out. Any
    number of threads may call this at once, and a forked process too.
    """
    helpers = min(torch.get_num_threads(), pieces) - 1
    if helpers < 1:
        for piece in range(pieces):
            work(piece)
        return
    call = _Call(work, pieces)
    _pool.offer(call, helpers)
    call.take()
    call.wait()
    if call.error is not None:
        raise call.error
