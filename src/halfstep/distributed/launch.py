"""Joining the processes that torchrun has started."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from halfstep.distributed.ranks import Group, Ranks, Solo
from halfstep.errors import ConfigError

Backend = Literal["gloo", "nccl"]
TASKS = Path("/proc/self/task")
THREADS = "pt_gloo_runloop"  # the name of gloo's threads that do what a group is asked for
DEFAULTS = "torch.distributed.nn.functional"  # its functions keep the group that there is at its import, as their default: it comes before any
QUIET = 0.02  # seconds, of the interpreter's time slices of 0.005
TIMEOUT = 1800.0  # seconds a rank waits for the others, as torch and transformers have it
NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
HOW = "Start it with torchrun --nproc-per-node N script.py, which sets all of them; for one process alone unset {}."


def launch(cpu: bool = False, *, backend: str | None = None, timeout: float = TIMEOUT) -> Ranks:
    """The ranks of this run: those of the process group if there is one, else of the one that the launcher's environment describes, else one alone.

    Reads what torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), binds the process to the GPU of its local rank, and starts
    the group. backend: "gloo" or "nccl"; by default nccl on GPUs and gloo on CPUs. timeout: seconds that a rank waits for the others.
    Raises ConfigError where the environment is incomplete, or a process has no GPU of its own.
    """
    world = _number("WORLD_SIZE", 1)
    if not dist.is_available() or (not dist.is_initialized() and world == 1):
        if world > 1:
            raise ConfigError(f"the launcher started {world} processes, and this torch was built without torch.distributed", "Install another torch.")
        return Solo()
    gpu = not cpu and torch.cuda.is_available()
    local = _number("LOCAL_RANK", 0)
    if dist.is_initialized():
        if dist.get_world_size() == 1:
            return Solo()
        atexit.unregister(settle)  # once, however often this is called
        atexit.register(settle)
        return Group(local)
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        there = [name for name in ("WORLD_SIZE", *NEEDED, "LOCAL_RANK") if name in os.environ]
        raise ConfigError(f"{', '.join(there)} are set and {', '.join(missing)} are not: the processes cannot find each other", HOW.format(there[0]))
    if not 0 <= (rank := _number("RANK", 0)) < world:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={world}", HOW.format("both"))
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"backend {backend!r} is not known", "Use 'nccl' on GPUs, 'gloo' on CPUs, or leave it out.")
    if backend == "nccl" and not gpu:
        raise ConfigError("backend 'nccl' connects GPUs, and this run trains on the CPU", "Use 'gloo', or leave it out.")
    if not timeout > 0:
        raise ConfigError(f"a timeout of {timeout} seconds", "Use more than 0.")
    if gpu:
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"LOCAL_RANK={local}, and this machine shows {torch.cuda.device_count()} GPUs: each process needs one of its own",
                f"Start {torch.cuda.device_count()} processes on it (--nproc-per-node), or train on the CPU.",
            )
        torch.cuda.set_device(local)
    importlib.import_module(DEFAULTS)
    chosen = "cpu:gloo,cuda:nccl" if gpu and backend != "gloo" else "gloo"  # small values of the host go through gloo either way
    try:
        dist.init_process_group(chosen, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"rank {rank} of {world} could not join the others at {where}: {str(error).splitlines()[0]}",
            "Check that every process was started, and that the address can be reached from each machine.",
        ) from error
    atexit.register(leave)
    logger = logging.getLogger("halfstep")
    if rank and logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)  # what is said of a run is said by rank 0
    return Group(local)


def leave() -> None:
    """Close the process group that `launch` has started. At exit it is done by itself, unless an error ends the process: others may hang then."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
    settle()


def settle(patience: float = 5.0) -> None:
    """Wait until the threads of gloo have nothing to do, at most `patience` seconds; back at once where there are none, as after closing a group.

    A thread lets go of a tensor after those who waited for it were told, and needs the interpreter for that. One that asks for it while the
    interpreter shuts down ends the process with SIGABRT, whatever the run has come to. A group that is closed keeps its threads as long as somebody
    has it: in a variable, or as the default of a function.
    """
    until, before = time.monotonic() + patience, _switches()
    while before and time.monotonic() < until:
        time.sleep(QUIET)  # the interpreter is free meanwhile: a thread that waits for it gets it
        now = _switches()
        if now == before and -1 not in now.values():
            return
        before = now


def _switches() -> dict[str, int]:
    """How often each thread of gloo has gone to sleep, by its number; -1 for one that is awake. Empty where the system does not tell."""
    found = dict[str, int]()
    for task in TASKS.glob("*"):
        with suppress(OSError):  # it has ended meanwhile
            about = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
            if about.get("Name", "").strip() == THREADS and {"State", "voluntary_ctxt_switches"} <= about.keys():  # sandboxes leave some out
                found[task.name] = int(about["voluntary_ctxt_switches"]) if about["State"].split()[0] == "S" else -1
    return found


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigError(f"the environment has {name}={text!r}, which is no number", HOW.format(name))
    return int(text)
