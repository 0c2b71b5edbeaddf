"""Running compiled models as they were written, for those who look at them op by op."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch


class AsWritten:
    """A block in which what torch.compile has made is left aside.

    torch keeps one stance for the process: the first thread in sets it, the last one out puts it back.

    Each thread by itself would put back what it has found, which may be another thread's: nothing would ever be compiled again, and nobody said so.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a model that is collected in here may end a block of its own
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


as_written = AsWritten()
