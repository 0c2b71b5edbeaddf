"""Runs the checks of a file on several gloo ranks under torchrun, all in one start: starting takes longer than most of them."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def torchrun(file: str, ranks: int, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`file` of this folder under torchrun; what every rank has printed comes back."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(HERE / file), *arguments]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | SETTINGS | {"PYTHONPATH": path}, check=False)


def checked(file: str, ranks: int, folder: Path, *only: str) -> list[str]:
    """The names of the checks that `file` has passed on that many ranks. A check that fails ends the run: AssertionError with its traceback."""
    done = torchrun(file, ranks, str(folder), *only)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    names: list[str] = json.loads((folder / "passed.json").read_text())
    return names


def _left() -> None:
    """Closing the group must end its threads: one that lets go of a tensor while the interpreter shuts down ends the process with SIGABRT."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    if any("gloo" in name for name in names):
        print(f"after the group was closed there are {names}", file=sys.stderr, flush=True)
        os._exit(1)


def main(checks: dict[str, Callable[[Any, Path], None]]) -> None:
    """Run checks, each with the ranks and a folder; in the file's own `__main__`."""
    import faulthandler
    import time
    import warnings

    from halfstep.distributed import launch

    warnings.simplefilter("error")
    atexit.register(_left)
    faulthandler.dump_traceback_later(100, exit=True)  # where a rank waits in vain
    folder, ranks = Path(sys.argv[1]), launch(cpu=True, timeout=60)
    passed = []
    for name, check in checks.items():
        if name not in (sys.argv[2:] or checks):
            continue
        own = folder / name
        own.mkdir(exist_ok=True)
        began = time.perf_counter()
        try:
            check(ranks, own)
        except BaseException:  # noqa: BLE001  the other ranks wait in vain: all must end
            print(f"{name} failed on rank {ranks.rank}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
        passed.append(name)
        if ranks.is_main:
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    ranks.barrier()
    if ranks.is_main:
        (folder / "passed.json").write_text(json.dumps(passed))
