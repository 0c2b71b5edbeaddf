"""Does a precision cost accuracy on a real task? An example trained with five seeds in each precision.

Tasks: genres (examples/genres.py: MiniLM fine-tuned on 1,200 speeches of 32 tokens, one epoch) and digits (examples/digits.py as it is). A seed is
that of the first weights, of the order of the samples and of dropout; the samples are the same. Each run is kept in
benchmarks/results/real_accuracy.json as it ends, so the command goes on where it was stopped; --anew begins anew. Reach: the mean of every
precision within two standard errors of the difference to fp32's. On one quiet thread 20 runs of digits take 2 minutes, of genres half an hour.

Run: python benchmarks/real_accuracy.py TASK [--seeds 5] [--precisions fp32 bf16-mixed fp16-mixed bf16-lean] [--write]   (into docs/real-runs.md)
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real_accuracy.json"
PAGE = ROOT / "docs" / "real-runs.md"
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-lean")
TASKS: dict[str, dict[str, Any]] = {
    "genres": {"train_size": 1200, "validation_size": 500, "tokens": 32, "epochs": 1.0, "batch_size": 16, "learning_rate": 3e-4},
    "digits": {"epochs": 8},
}


def one_run(task: str, precision: str, seed: int) -> dict[str, Any]:
    """Train and evaluate once."""
    example = importlib.import_module(task)
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        accuracy = float(example.main(precision, seed, output_dir=folder, **TASKS[task]))
    spent, today = time.process_time() - begun, datetime.datetime.now(datetime.UTC).date()
    return {"accuracy": accuracy, "seconds": round(spent, 1), "date": str(today), "torch": torch.__version__, "task": TASKS[task]}


def verdict(found: dict[str, list[float]], precision: str) -> str:
    """The difference to fp32, beside two standard errors of it."""
    ours, base = found[precision], found["fp32"]
    if precision == "fp32" or min(len(ours), len(base)) < 2:
        return ""
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(base) / len(base))
    difference = statistics.mean(ours) - statistics.mean(base)
    return f"{difference:+.3f} (noise {2 * error:.3f}: {'within' if abs(difference) <= 2 * error else 'OUTSIDE'})"


def table(task: str, runs: dict[str, dict[str, Any]], precisions: list[str], seeds: int) -> str:
    """Rows of precisions, columns of seeds."""
    found = {p: [runs[f"{task} {p} {s}"]["accuracy"] for s in range(seeds) if f"{task} {p} {s}" in runs] for p in precisions}
    head = f"| precision | {' | '.join(f'seed {s}' for s in range(seeds))} | mean | spread (sd) | difference to fp32 |"
    lines = [head, "|---" * (seeds + 4) + "|"]
    for p, values in found.items():
        cells = [f"{v:.3f}" for v in values] + [""] * (seeds - len(values))
        mean = f"{statistics.mean(values):.3f}" if values else ""
        spread = f"{statistics.stdev(values):.3f}" if len(values) > 1 else ""
        lines.append(f"| `{p}` | {' | '.join(cells)} | {mean} | {spread} | {verdict(found, p)} |")
    about = [run for name, run in runs.items() if name.split()[0] == task]
    days, version = sorted({run["date"] for run in about}), about[-1]["torch"]
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    lines += ["", f"`python benchmarks/real_accuracy.py {task} --write`, one thread, torch {version}, {when}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--anew", action="store_true", help="forget the runs that were kept")
    parser.add_argument("--write", action="store_true", help="write the table into docs/real-runs.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    runs: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() and not given.anew else {}
    runs = {name: run for name, run in runs.items() if run["task"] == TASKS[name.split()[0]]}
    for seed in range(given.seeds):  # seed by seed: what is there when it is stopped can be compared
        for precision in given.precisions:
            name = f"{given.task} {precision} {seed}"
            if name not in runs:
                runs[name] = one_run(given.task, precision, seed)
                RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    made = table(given.task, runs, given.precisions, given.seeds)
    print(made)
    if given.write:
        text = PAGE.read_text()
        PAGE.write_text(re.sub(r"(<!-- measured: " + given.task + r" -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{made}\n{m[2]}", text, flags=re.S))


if __name__ == "__main__":
    main()
