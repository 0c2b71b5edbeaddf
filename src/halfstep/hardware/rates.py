"""How fast this machine multiplies in 16 bits, measured once: the rates that decide which products are emulated on its CPU.

On a CPU a 16-bit product can be had in two ways with the same numbers: by torch's own 16-bit kernel, or emulated, with the operands rounded to 16
bits, multiplied in fp32 and the result rounded. Which is faster depends on instructions, on kernels and on the kind of product: CPUs that have bf16
instructions run attention faster emulated, and fp16 convolutions a hundred times faster.

Measured in CPU time of one thread, so that neither the load of the machine nor the number of threads changes the answer, and kept in
$XDG_CACHE_HOME/halfstep (~/.cache/halfstep): a machine that was measured gives the same answer in every run. One format takes about 0.2 s once.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halfstep.hardware.probe import probe
from halfstep.hardware.remembered import Memory, Stored

if TYPE_CHECKING:
    from halfstep.hardware.race import Race  # imported when something is measured, which it seldom is

FAMILIES = ("matmul", "convolution", "attention")
HALF = ("bf16", "fp16")
CLEARLY = 1.1  # how much faster something must be to be preferred to what is safe: measurements of one machine differ by less
ATTENTION = 0.1  # of the operations of a model that has other products too
ROUTE = 1  # raised when emulation becomes faster or slower: rates measured before are then measured again


@dataclass(frozen=True)
class Rate:
    """Operations per second (a multiplication and an addition are two) of one family of products in one format.

    fp32: of the same product in fp32. native: of torch's kernel for the format, 0 where there is none. emulated: of fp32's kernel with operands and
    results rounded, 0 where that is no choice (fp32, tf32, a GPU). Forward and backward; of one thread on a CPU, of the whole GPU.
    """

    family: str
    format: str
    fp32: float
    native: float
    emulated: float = 0.0

    @property
    def emulate(self) -> bool:
        """Whether the emulated product is taken: unless the native one is clearly faster."""
        return self.native < CLEARLY * self.emulated

    @property
    def taken(self) -> float:
        """The rate of the one that is taken."""
        return self.emulated if self.emulate else self.native

    @property
    def gain(self) -> float:
        """How many times as fast as fp32 it is; more than 1 is faster."""
        return self.taken / self.fp32


@dataclass(frozen=True)
class Rates:
    """What was measured on one device. bandwidth: bytes read and written per second by a copy, 0 when it was not measured.

    fresh: some of it was measured now, and not read from the cache.
    """

    device: str
    rows: tuple[Rate, ...]
    bandwidth: float = 0.0
    fresh: bool = False

    def of(self, format: str) -> tuple[Rate, ...]:
        """The rates of one format, one for each family that was measured."""
        return tuple(row for row in self.rows if row.format == format)

    def emulated(self, format: str) -> tuple[str, ...]:
        """The families whose products in `format` are emulated."""
        return tuple(row.family for row in self.of(format) if row.emulate)

    def gain(self, format: str, families: Sequence[str] = FAMILIES) -> float:
        """How many times as fast as fp32 products of `families` are in `format`, of those that were measured; 0 for a format that was not.

        The slower of matrix products and convolutions, and attention for a tenth of the operations where it is not alone: its products take
        tokens / (6 * width + tokens) of a transformer's, so that a tenth is a sequence of two thirds of the width.
        """
        rows = self.of(format)
        gains = {row.family: row.gain for row in [r for r in rows if r.family in families] or rows}
        attention = gains.pop("attention", None)
        if attention is None or not gains:
            return min(gains.values(), default=attention or 0.0)
        slower = min(gains.values())
        return 1 / ((1 - ATTENTION) / slower + ATTENTION / attention) if slower and attention else 0.0

    def fastest(self, families: Sequence[str] = FAMILIES) -> tuple[str, str]:
        """The format ("fp32", "bf16", "fp16") to multiply in, by speed alone, and why.

        A 16-bit one only where products of `families` are clearly faster in it than in fp32; bf16, unless fp16 is as much faster again.
        """
        gains = {form: self.gain(form, families) for form in HALF}
        best = "fp16" if gains["fp16"] >= CLEARLY * gains["bf16"] else "bf16"
        if gains[best] < CLEARLY:
            listed = " and ".join(f"{gains[form]:.2f} in {form}" for form in HALF)
            return "fp32", f"16-bit products are not faster here ({listed} times fp32's rate)"
        apart = [row for row in self.of(best) if row.family in families]
        listed = f" ({', '.join(f'{row.family} {row.gain:.2f}' for row in apart)})" if len(apart) > 1 else ""
        return best, f"{best} products run at {gains[best]:.2f} times fp32's rate{listed}"

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        rows = [asdict(row) | {"emulate": row.emulate, "gain": row.gain} for row in self.rows]
        return {"rates": rows, "bandwidth": self.bandwidth, "measured_now": self.fresh}


def _measured(format: str) -> dict[str, Race]:
    from halfstep.hardware.race import products

    return products(format)


class Book:
    """The rates of the CPU, each measured when it is first asked for and then remembered: in this process, and in a file for others.

    folder: where the file is; None for the user's cache. measure: one format to the race of each family.
    """

    def __init__(self, folder: Path | None = None, measure: Callable[[str], dict[str, Race]] = _measured) -> None:
        self._folder, self._measure = folder, measure
        self._known: dict[str, tuple[Rate, ...]] = {}
        self._families: dict[str, tuple[str, ...]] = {}
        self._fresh: set[str] = set()
        self._memory: Memory | None = None
        self._lock = threading.Lock()

    def emulated(self, format: str) -> tuple[str, ...]:
        """The families whose products in `format` are emulated on this CPU."""
        found = self._families.get(format)
        if found is None:
            rows = self.rows(format)
            found = self._families[format] = tuple(row.family for row in rows if row.emulate)
        return found

    def rows(self, format: str) -> tuple[Rate, ...]:
        """The rates of one format."""
        with self._lock:
            if format not in self._known:
                memory = self._remembered()
                rows = _rows(format, memory.read())
                if rows is None:
                    measured = tuple(Rate(family, format, *race.rates) for family, race in self._measure(format).items())
                    rows = _rows(format, memory.read())  # another process, such as another rank, may have been first: all take the same
                    if rows is None:
                        rows = measured
                        memory.add({f"{row.family} {format}": [row.fp32, row.native, row.emulated] for row in rows})
                    self._fresh.add(format)
                self._known[format] = rows
            return self._known[format]

    def rates(self, formats: Sequence[str]) -> Rates:
        """The rates of several formats, and the bandwidth of copies by as many threads as torch uses."""
        rows = tuple(row for format in formats for row in self.rows(format))
        key = f"bandwidth {torch.get_num_threads()}"
        with self._lock:
            memory = self._remembered()
            found = memory.read().get(key, [])
            if not _valid(found, 1):
                from halfstep.hardware.race import bandwidth

                found = [bandwidth()]
                self._fresh.add(key)
                memory.add({key: found})
        return Rates("cpu", rows, found[0], bool(self._fresh & {*formats, key}))

    def _remembered(self) -> Memory:
        if self._memory is None:
            facts = probe("cpu")
            # oneDNN has the 16-bit kernels: with fewer instructions, or switched off, it is another machine
            kernels = [os.environ.get("ONEDNN_MAX_CPU_ISA", ""), bool(torch._C._get_mkldnn_enabled())]
            about = {"cpu": facts.name, "level": facts.level, "native": list(facts.native), "torch": torch.__version__}
            key = {**about, "onednn": kernels, "route": ROUTE}
            self._memory = Memory(key, self._folder)
        return self._memory


def _rows(format: str, stored: Stored) -> tuple[Rate, ...] | None:
    """What a file says of a format; None when a family is missing, or its numbers are none."""
    given = {family: stored.get(f"{family} {format}", []) for family in FAMILIES}
    return tuple(Rate(family, format, *numbers) for family, numbers in given.items()) if all(_valid(n, 3) for n in given.values()) else None


def _valid(numbers: list[float], count: int) -> bool:
    """Whether these are `count` rates; of three the second may be 0, for a kernel that is not there."""
    return len(numbers) == count and all(math.isfinite(n) and (n > 0 or (n == 0 and i == 1)) for i, n in enumerate(numbers))


_book = Book()


def emulated_families(format: str) -> tuple[str, ...]:
    """The families ("matmul", "convolution", "attention") whose products in `format` ("bf16", "fp16") are emulated on this CPU.

    The same in a whole process. Measured at the first call on a machine (about 0.2 s), read from a file at the first one of a process.
    """
    return _book.emulated(format)


def measured_rates(device: str | torch.device | None = None, formats: Sequence[str] = HALF) -> Rates:
    """The rates of `device` (default: the one that would be trained on); formats: the 16-bit ones to be told.

    A CPU's are measured once per machine. A GPU's are measured at each call, matrix products alone, in fp32 and tf32 too (about 0.1 s).
    Raises ConfigError when the device does not exist.
    """
    facts = probe(device)
    if facts.kind == "cpu":
        return _book.rates(formats)
    from halfstep.hardware.race import gpu_products

    known = ("fp32", *(("tf32",) if facts.is_native("tf32") else ()), *formats)
    found, copied = gpu_products(torch.device(facts.device), known)
    return Rates(facts.device, tuple(Rate("matmul", format, found["fp32"], rate) for format, rate in found.items()), copied, True)
