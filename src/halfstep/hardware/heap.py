"""The C library's heap, set for training: the memory of large tensors is kept from one step to the next.

glibc maps a block of more than 32 MiB (at first 128 KiB) anew each time it is asked for, unmaps it when it is freed, and gives the end of its heap
back as soon as that is free. A training step asks for the same gigabyte every time, and its pages come back one by one, each by a page fault and full
of zeros: 20 to 30 % of a step of a small language model. Kept memory is resident between the steps; the peak of the process stays near
what it was, a tenth above it where the sizes of batches change all the time.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

SWITCH = "HALFSTEP_KEEP_MEMORY"  # environment: "off" leaves the heap as it is
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_ALL = 2**31 - 1  # the largest that mallopt takes: larger blocks are still mapped
_AHEAD = 1 << 26  # bytes by which the heap grows beyond what was asked for, so that it grows seldom
_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")  # the user's settings of the same

kept: bool | None = None  # whether this process keeps its memory; None: not asked yet


def keep_memory(device: torch.device) -> bool:
    """Let the C library keep what large tensors have freed, up to 2 GiB each, in this process from now on: for who trains on a CPU.

    The first loss does it. Whether it does: False for a GPU, for another library than glibc and one that takes no such thresholds, with
    HALFSTEP_KEEP_MEMORY=off, and where the environment already sets glibc's heap (MALLOC_MMAP_THRESHOLD_ and the like, GLIBC_TUNABLES), which is then
    left alone. Source: mallopt(3).
    """
    global kept
    if kept is None and device.type == "cpu":
        kept = _may() and _set()
    return bool(kept)


def _may() -> bool:
    if sys.platform != "linux" or os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        return False
    return not any(name in os.environ for name in _OWN) and "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", "")


def _set() -> bool:
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return all(bool(library.mallopt(*option)) for option in ((_MMAP_THRESHOLD, _ALL), (_TRIM_THRESHOLD, _ALL), (_TOP_PAD, _AHEAD)))


def give_back_unused_memory() -> None:
    """Let the C library give memory back to the system that it holds and nobody uses (glibc's malloc_trim; with other libraries nothing is done).

    Freed tensors leave holes between those that stay, and glibc keeps these for later. Some milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
