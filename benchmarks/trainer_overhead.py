"""What does a library's own Python cost per step?

A perceptron so small that its forward, backward and AdamW take well under a millisecond: what a Trainer or an Accelerator takes above the
shortest loop by hand (fetch, forward, backward, clip to norm 1, fused AdamW, schedule) is its own work. Each has a process of its own; they take
turns, the order flipped every round; each round gives the time above the loop's of that round, in microseconds, and the median over rounds is
reported with its quartiles. halfstep.Trainer beside itself (A/A) says how noisy the machine was. Nobody logs, evaluates or saves. `ratio` is the
overhead to that of the peer of the same kind; reach: at most 1.
Run: python benchmarks/trainer_overhead.py [--rounds 40] [--seconds 60] [--precision fp32]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no thread begins with the import of numpy: contenders are forked after it
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.suite import doors
from benchmarks.suite.method import Contender, Taken, spread, take_turns
from benchmarks.suite.nets import Job, perceptron
from benchmarks.suite.workers import apart
from halfstep.hardware import doctor

LOOP = "loop by hand"
PAIRS = {"halfstep.Trainer": "transformers.Trainer", "halfstep.Accelerator": "accelerate"}


def contenders(job: Job, precision: str) -> list[Contender]:
    """Everybody at one precision; the loop is fp32's, or torch's autocast and scaler."""
    loop = partial(doors.bare_loop, job) if precision == "fp32" else partial(doors.torch_loop, job, precision)
    ours = precision if precision == "fp32" else f"{precision}-mixed"
    return [
        Contender("halfstep.Trainer", partial(doors.halfstep_trainer, job, ours), "ours"),
        Contender("halfstep.Trainer again (A/A)", partial(doors.halfstep_trainer, job, ours), "twin"),
        Contender("transformers.Trainer", partial(doors.transformers_trainer, job, precision)),
        Contender("halfstep.Accelerator", partial(doors.halfstep_accelerator, job, ours), "ours"),
        Contender("accelerate", partial(doors.accelerate_loop, job, precision)),
        Contender(LOOP, loop, "reference"),
    ]


def above(taken: Taken, loop: Taken) -> list[float]:
    """Microseconds above the loop, round by round."""
    return [(a - b) * 1e6 for a, b in zip(taken.values, loop.values, strict=True) if a is not None and b is not None]


def report(found: list[Taken]) -> dict[str, Any]:
    """Rows by name, and the ratios of overheads."""
    by_name = {taken.name: taken for taken in found}
    loop, rows = by_name[LOOP], dict[str, Any]()
    for taken in found:
        extra, step = above(taken, loop), statistics.median(taken.known) * 1e6
        low, high = spread(extra)
        numbers = {"step_us": step, "above_us": statistics.median(extra), "quarter_us": low, "three_quarters_us": high}
        rows[taken.name] = {name: round(value, 1) for name, value in numbers.items()}
    pairs = {ours: (rows[ours]["above_us"], rows[peer]["above_us"]) for ours, peer in PAIRS.items() if {ours, peer} <= set(rows)}
    return {"rows": rows, "ratio": {ours: round(mine / theirs, 3) if theirs > 0 else None for ours, (mine, theirs) in pairs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    doors.imported()
    found, excluded = take_turns(apart(contenders(perceptron(8), given.precision)), given.rounds, given.seconds, needed=(LOOP,))
    about = {"machine": doctor("cpu").as_dict(), "precision": given.precision, "rounds": max(len(t.values) for t in found)}
    print(json.dumps(about | report(found) | {"excluded": {e.name: e.reason for e in excluded}}, indent=1))


if __name__ == "__main__":
    main()
