"""A training process that is killed by the operating system at any moment resumes, and ends with the bits of one that was never killed."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfstep.checkpoint import checkpoints, is_whole, latest

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from resumed_runs import trainer
from halfstep.checkpoint import latest
place = Path(sys.argv[1])
made = trainer(place, precision="bf16-lean", max_steps=30, save_steps=1, save_total_limit=2, logging_steps=3)
place.mkdir(exist_ok=True)
(place / "begun").touch()
print("ready", flush=True)
made.train(resume_from_checkpoint=latest(place / "run") is not None)
"""


def start(place: Path) -> subprocess.Popen:
    """A run that saves at every step, past its imports."""
    script = SCRIPT.format(here=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", script, str(place)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if process.stdout.readline().strip() != "ready":
        raise AssertionError(process.communicate()[1])
    return process


def finished(place: Path) -> dict[str, torch.Tensor]:
    process = start(place)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    newest = latest(place / "run")
    assert newest.name == "checkpoint-30"
    weights = load_file(newest / "model.safetensors") | {f"optimizer.{k}": v for k, v in load_file(newest / "optimizer.safetensors").items()}
    lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in line for line in lines) == 10, "each record once"
    return weights


def killed(place: Path, after: float) -> None:
    process = start(place)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check_kills(tmp_path: Path, moments: list[float]) -> None:
    expected = finished(tmp_path / "unbroken")
    saves = [p.stat().st_mtime for p in (tmp_path / "unbroken" / "run").iterdir()]
    took = max(saves) - (tmp_path / "unbroken" / "begun").stat().st_mtime
    for number, share in enumerate(moments):
        place = tmp_path / str(number)
        killed(place, share * took)
        if (place / "run").exists():
            assert all(is_whole(c) for c in checkpoints(place / "run")), f"killed after {share:.3f} of the run"
        found = finished(place)
        assert sorted(found) == sorted(expected)
        assert all(torch.equal(found[k], expected[k]) for k in expected), f"killed after {share:.3f} of the run"
        assert not [p for p in (place / "run").iterdir() if p.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_run_killed_at_20_random_moments_resumes_20_times() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"moments by seed {seed}")
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        check_kills(Path(place), [moments.random() for _ in range(20)])
