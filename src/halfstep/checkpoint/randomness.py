"""The random states of a process: Python's, numpy's, torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch


class _Numpy:
    """numpy's global state, read anew only when it has changed: reading costs as much as all the others together."""

    def __init__(self) -> None:
        self._words = b""
        self._state: Any = None

    def forget(self) -> None:
        """Somebody sets it."""
        self._words, self._state = b"", None

    def get(self) -> Any:
        """The state now."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(bits) is not np.random.MT19937:
            return np.random.get_state(legacy=False)
        words = ctypes.string_at(bits.ctypes.state_address, WORDS)
        # a normal number that waits in line is handed out without a change of these words
        if self._state is None or words != self._words or self._state["has_gauss"]:
            self._words, self._state = words, np.random.get_state(legacy=False)
        return self._state


WORDS = 4 * 624 + 4  # bytes of an MT19937: its key and the position in it
_numpy = _Numpy()


def capture(brief: bool = False) -> dict[str, Any]:
    """All random states now, as a value that a checkpoint can hold.

    brief: for a value that is thrown away soon and never changed; a third of the time. numpy's part is then wrong for who sets numpy's state by hand,
    to one that differs from that of the last brief call in nothing but a normal number that waits to be handed out.
    """
    return {
        "python": random.getstate(),
        "numpy": _numpy.get() if brief else np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(states: dict[str, Any]) -> None:
    """Put random states back. Those of CUDA devices are left alone where the numbers of devices differ."""
    _numpy.forget()
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
