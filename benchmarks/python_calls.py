"""How many calls does a step take in Python?

A perceptron of 120 k parameters in fp32, batches of 32: calls of Python functions, and of functions in C from Python, in a steady step (fetch,
forward, backward, clip to norm 1, fused AdamW, schedule) of each library, counted by sys.setprofile. Counts are the same on every machine. Steps 130
to 180 are counted, which halfstep's watch does not sample (it does every 100-th).
Run: python benchmarks/python_calls.py
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.suite import doors
from benchmarks.suite.method import Turn
from benchmarks.suite.nets import perceptron

BEFORE, STEPS = 130, 50
NAMES = {"call": "python", "c_call": "c"}


def counted(ended: Counter[str]) -> Callable[[], bool]:
    """What is to be called at the end of each step: counts into `ended` between two of them. Whether all were counted."""

    def heard(frame: Any, event: str, argument: Any) -> None:
        if event in NAMES:
            ended[NAMES[event]] += 1

    def step_ended() -> bool:
        ended["steps"] += 1
        if ended["steps"] == BEFORE:
            sys.setprofile(heard)
        if ended["steps"] == BEFORE + STEPS:
            sys.setprofile(None)
        return ended["steps"] >= BEFORE + STEPS

    return step_ended


def of_loop(make: Callable[..., Turn], *given: Any) -> Counter[str]:
    """The calls of a loop by hand."""
    ended: Counter[str] = Counter()
    turn, done = make(perceptron(32), *given), counted(ended)
    turn.run()
    while not done():
        turn.run()
    return ended


def of_trainer(make: Callable[..., Turn], *given: Any) -> Counter[str]:
    """The calls of a Trainer, which is run in this greenlet: profiling is for one greenlet alone."""
    ended: Counter[str] = Counter()

    def run(make_trainer: Callable[[type, Callable[[Any], None]], Any], base: type) -> Turn:
        done = counted(ended)

        class Counts(base):  # type: ignore[misc]
            """Ends the run when all steps were counted."""

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
                control.should_training_stop = done()
                return control

        make_trainer(Counts, lambda loss: None).train()
        return Turn(lambda: None)

    with mock.patch.object(doors, "by_trainer", run), contextlib.redirect_stdout(sys.stderr):
        make(perceptron(32), *given)
    return ended


def main() -> None:
    torch.set_num_threads(1)
    found = {
        "hand-written torch loop": of_loop(doors.bare_loop),
        "halfstep loop": of_loop(doors.halfstep_loop, "fp32"),
        "halfstep.Accelerator": of_loop(doors.halfstep_accelerator, "fp32"),
        "halfstep.Trainer": of_trainer(doors.halfstep_trainer, "fp32"),
        "Accelerate loop": of_loop(doors.accelerate_loop, "fp32"),
        "Lightning Fabric loop": of_loop(doors.fabric_loop, "fp32"),
        "transformers.Trainer": of_trainer(doors.transformers_trainer, "fp32"),
    }
    print(json.dumps({name: {kind: ended[kind] / STEPS for kind in NAMES.values()} for name, ended in found.items()}, indent=1))


if __name__ == "__main__":
    main()
