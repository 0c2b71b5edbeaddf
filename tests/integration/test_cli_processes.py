"""Real processes of `halfstep train`: killed, interrupted, and resumed to the same bits as one that never stopped."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfstep.checkpoint import latest
from halfstep.cli.main import main

STEPS = 40
OPTIONS = "--text text --layers 1 --width 16 --heads 2 --block_size 16 --dropout 0.1 --use_cpu --per_device_train_batch_size 4 --eval_on_start false "
OPTIONS += f"--eval_strategy steps --eval_steps {STEPS} --max_steps {STEPS} --warmup_steps 4 --logging_steps 1 --save_steps 6 --sample_length 4"
PRECISIONS = ["fp16-mixed,scale_window=3"]  # test_default_run.py has all three
TEXT = b"the quick brown fox jumps over the lazy dog. " * 30

# Loads torch once, then for each precision starts a process that trains, and kills it when its first checkpoint is there.
KILLER = """
import os, signal, sys, time
from pathlib import Path
import torch._dynamo, halfstep.cli.train  # what every child would else load by itself
from halfstep.checkpoint import latest
from halfstep.cli.main import main
for i, precision in enumerate(sys.argv[2:]):
    child = os.fork()
    if child == 0:
        os._exit(main(["train", *sys.argv[1].split(), "--output_dir", f"killed-{i}", "--precision", precision]))
    until = time.monotonic() + 60
    while latest(f"killed-{i}") is None and time.monotonic() < until:
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run for each precision that was killed in the middle."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").write_bytes(TEXT)
    done = subprocess.run([sys.executable, "-c", KILLER, OPTIONS, *PRECISIONS], cwd=folder, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == [f"status {-signal.SIGKILL}"] * len(PRECISIONS), done.stderr
    return folder


def result(run: str) -> dict:
    """The files of the last checkpoint, and the numbers of the run without clock times."""
    final = Path(run, f"checkpoint-{STEPS}")
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in r.items() if not k.endswith(("_runtime", "_per_second"))} for r in lines if "train_runtime" not in r]
    return {p.name: p.read_bytes() for p in final.iterdir() if p.name not in ("manifest.json", "custom.json")} | {"numbers": numbers}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_kill_9_and_resume_end_in_the_weights_of_an_unbroken_run(place: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.chdir(place)
    i = PRECISIONS.index(precision)
    assert int(latest(f"killed-{i}").name.split("-")[1]) < STEPS, "it was killed in the middle"
    assert main(["train", *OPTIONS.split(), "--output_dir", f"unbroken-{i}", "--precision", precision]) == 0
    assert main(["train", "--resume", "--output_dir", f"killed-{i}"]) == 0
    unbroken, killed = result(f"unbroken-{i}"), result(f"killed-{i}")
    assert sorted(killed) == sorted(unbroken)
    assert "model.safetensors" in killed
    assert [name for name in unbroken if unbroken[name] != killed[name]] == []


def test_ctrl_c_saves_says_how_to_go_on_and_exits_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(TEXT)
    command = [sys.executable, "-m", "halfstep.cli.main", "train", *OPTIONS.split(), "--output_dir", "stopped"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while latest("stopped") is None and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    folder = latest("stopped")
    step = int(folder.name.split("-")[1])
    assert 6 <= step < STEPS
    assert err == (f"halfstep: stopped at step {step}, saved in {tmp_path / folder}; go on with: halfstep train --resume --output_dir stopped\n")
    assert f"step {step}/{STEPS} " in out, "the step at hand was finished"
    assert main(err.partition("go on with: halfstep ")[2].split()) == 0
    assert f"after {STEPS} steps" in capsys.readouterr().out
