"""How long does a person wait from the start of a script to the end of its first optimizer step?

Every number is a fresh process: it imports the library, makes a small network, the Trainer and its arguments (bf16), and takes one step
(benchmarks/suite/child.py). halfstep.Trainer, itself again (A/A) and transformers.Trainer take turns, the order flipped every round, after a
round that warms the file cache; imports of torch and of transformers.Trainer alone stand beside them. Reach: no later than transformers.Trainer.
Run: python benchmarks/time_to_first_step.py [--rounds 7] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.suite.fresh import Entry, lasting, until_first_step
from benchmarks.suite.method import Taken, ratios, spread

OURS, THEIRS = "halfstep.Trainer", "transformers.Trainer"


def entries() -> list[Entry]:
    """Who takes part."""
    alone = partial(lasting, sys.executable, "-c")
    return [
        (OURS, "ours", partial(until_first_step, "halfstep")),
        (f"{OURS} again (A/A)", "twin", partial(until_first_step, "halfstep")),
        (THEIRS, "peer", partial(until_first_step, "transformers")),
        ("import torch", "reference", partial(alone, "import torch")),
        ("import transformers.Trainer", "reference", partial(alone, "from transformers import Trainer")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round without warming up: to see that it runs")
    given = parser.parse_args()
    rounds = 1 if given.quick else given.rounds
    taken = {name: Taken(name, role) for name, role, _ in entries()}
    for index in range(0 if given.quick else -1, rounds):
        for name, _, run in entries()[:: -1 if index % 2 else 1]:
            seconds = run()
            if index >= 0:
                taken[name].values.append(seconds)
    rows = {n: {"seconds": round(statistics.median(t.known), 3), "quartiles": [round(q, 3) for q in spread(t.known)]} for n, t in taken.items()}
    pairs = {"to transformers.Trainer": (OURS, THEIRS), "A/A": (f"{OURS} again (A/A)", OURS)}
    ratio = {label: round(statistics.median(ratios(taken[a], taken[b])), 3) for label, (a, b) in pairs.items()}
    print(json.dumps({"rounds": rounds, "rows": rows, "ratio": ratio, "reached": ratio["to transformers.Trainer"] <= 1.0}, indent=1))


if __name__ == "__main__":
    main()
