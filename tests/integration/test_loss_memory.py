"""The memory that the loss of a language model takes, as `benchmarks/loss_memory.py` measures it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loss_memory.py"


def peak(way: str) -> float:
    """Bytes above hidden states, weight and labels, with 1024 tokens and a vocabulary of 49,152."""
    command = [sys.executable, str(SCRIPT), "--way", way, "--tokens", "1024", "--width", "256", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return float(json.loads(done.stdout)["peak"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is reset by Linux alone")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_logits_the_loss_takes_a_third_of_the_memory(precision: str) -> None:
    assert peak(f"{precision}: halfstep") <= 0.35 * peak(f"{precision}: logits")
