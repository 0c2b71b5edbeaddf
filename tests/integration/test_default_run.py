"""What a newcomer gets from `halfstep train` with nothing added, in three precisions. Minutes each: run by `make nightly`."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed")
pytestmark = pytest.mark.slow


def command(precision: str, place: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "halfstep.cli.main", "train", "--precision", precision, "--output_dir", str(place), *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """The run folder and the output of each default run."""
    base = tmp_path_factory.mktemp("runs")
    made = {}
    for precision in PRECISIONS:
        done = subprocess.run(command(precision, base / precision), capture_output=True, text=True, check=True)
        made[precision] = base / precision, done.stdout
    return made


def evaluations(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [r["eval_loss"] for r in records if "eval_loss" in r]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_falls_below_60_percent(runs: dict[str, tuple[Path, str]], precision: str) -> None:
    first, *_, last = evaluations(runs[precision][0])
    print(f"{precision}: {first:.4f} -> {last:.4f}")
    assert last < 0.6 * first


def test_the_three_precisions_end_within_3_percent_of_each_other(runs: dict[str, tuple[Path, str]]) -> None:
    last = [evaluations(run)[-1] for run, _ in runs.values()]
    assert max(last) <= 1.03 * min(last)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_shows_what_it_does(runs: dict[str, tuple[Path, str]], precision: str) -> None:
    run, out = runs[precision]
    assert f"precision {precision} on " in out
    assert re.search(r"step 40/\d+  loss [\d.]+  lr [\d.e-]+  scale \d+  [\d,]+ tokens/s  [\d,]+ MiB  eta \d+:\d\d", out)
    assert re.search(r"evaluation loss [\d.]+ before, [\d.]+ after", out)
    assert "sample:\nThe " in out
    assert f"run folder: {run}" in out


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_killed_run_resumes_to_the_same_bits(runs: dict[str, tuple[Path, str]], precision: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(command(precision, run), stdout=subprocess.DEVNULL)
    while not list(run.glob("checkpoint-*")):
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(3)  # on into the steps after the checkpoint
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(command(precision, run, "--resume"), stdout=subprocess.DEVNULL, check=True)
    unbroken = max((runs[precision][0]).glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    expected, found = (load_file(folder / "model.safetensors") for folder in (unbroken, run / unbroken.name))
    assert list(expected) == list(found)
    assert all(expected[name].numpy().tobytes() == found[name].numpy().tobytes() for name in expected)
