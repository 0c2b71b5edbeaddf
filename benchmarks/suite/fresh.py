"""Rows whose contenders need a fresh process each: memory, the first step, start-up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suite.method import Excluded, OursFailedError, Role, Taken, reason
from benchmarks.suite.result import row_of

if TYPE_CHECKING:
    from benchmarks.suite.rows import Given, Row

ROOT = Path(__file__).parents[2]
Entry = tuple[str, Role, Callable[[], float]]


def in_processes(row: Row, given: Given, entries: Sequence[Entry], rounds: int, warm: bool = True) -> dict[str, Any]:
    """Processes in turns, the order flipped every round; a round that warms the file cache and ours goes before. Ends early when the time is over."""
    taken = {name: Taken(name, role) for name, role, _ in entries}
    excluded, begun = [], time.monotonic()
    for index in range(-1 if warm else 0, rounds):
        for name, role, run in list(entries)[:: -1 if index % 2 else 1]:
            if name not in taken:
                continue
            try:
                value = run()
            except (subprocess.SubprocessError, ValueError, OSError) as error:
                if role in ("ours", "twin"):
                    raise OursFailedError(f"{name}: {error!r}") from error
                excluded.append(Excluded(name, reason(error)))
                del taken[name]
                continue
            if index >= 0:
                taken[name].values.append(value)
        if index >= 0 and time.monotonic() - begun > 2 * given.seconds:
            break
    return row_of(list(taken.values()), excluded, row.claims)


def command(*words: str) -> str:
    """What a process prints; its warnings go nowhere unless it fails."""
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout


def lasting(*words: str) -> float:
    """Seconds that a process takes."""
    begun = time.monotonic()
    command(*words)
    return time.monotonic() - begun


def child(kind: str, library: str) -> float:
    """The number that the child prints."""
    return float(next(line for line in command(sys.executable, "-m", "benchmarks.suite.child", kind, library).splitlines() if _is_number(line)))


def until_first_step(library: str) -> float:
    """Seconds from the start of a process to the end of its first step."""
    begun = time.monotonic()
    return child("cold", library) - begun


def _is_number(line: str) -> bool:
    return line.replace(".", "", 1).strip().isdigit()


def memory(row: Row, given: Given) -> dict[str, Any]:
    """Peak resident megabytes. Sizes repeat within 1 %: few rounds do."""
    size = "-quick" if given.quick else ""

    def peak(library: str) -> float:
        return child("memory", library + size) / 1e6

    ours, theirs = partial(peak, "halfstep"), partial(peak, "transformers")
    entries: list[Entry] = [
        ("halfstep.Trainer", "ours", ours),
        ("halfstep.Trainer again (A/A)", "twin", ours),
        ("transformers.Trainer", "peer", theirs),
        ("import of torch and transformers alone", "reference", partial(peak, "nothing")),
    ]
    return in_processes(row, given, entries, 1 if given.quick else 2, warm=False)


def cold_start(row: Row, given: Given) -> dict[str, Any]:
    """Import, construct, one step."""
    entries: list[Entry] = [
        ("halfstep.Trainer", "ours", partial(until_first_step, "halfstep")),
        ("halfstep.Trainer again (A/A)", "twin", partial(until_first_step, "halfstep")),
        ("transformers.Trainer", "peer", partial(until_first_step, "transformers")),
        ("import torch", "reference", partial(lasting, sys.executable, "-c", "import torch")),
    ]
    return in_processes(row, given, entries, given.rounds, warm=not given.quick)


def start_up(row: Row, given: Given) -> dict[str, Any]:
    """The commands, beside the import of torch."""
    halfstep = str(Path(sys.executable).with_name("halfstep"))
    entries: list[Entry] = [
        ("halfstep --help", "ours", partial(lasting, halfstep, "--help")),
        ("halfstep --help again (A/A)", "twin", partial(lasting, halfstep, "--help")),
        ("halfstep doctor", "ours", partial(lasting, halfstep, "doctor")),
        ("import halfstep.Accelerator", "ours", partial(lasting, sys.executable, "-c", "from halfstep import Accelerator")),
        ("import torch", "peer", partial(lasting, sys.executable, "-c", "import torch")),
    ]
    return in_processes(row, given, entries, given.rounds, warm=not given.quick)
