"""`halfstep audit`: which op of a step runs in which format, what that costs, and why 16 bits are not faster here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from halfstep.cli.subject import subject_of, training_arguments
from halfstep.diagnostics.audit import ROUNDS, audit

USAGE = "halfstep audit [CONFIG.yaml] [--target FILE.py:FUNCTION] [--precision TEXT] [--json] [--train-option value ...]"


def main(argv: Sequence[str]) -> int:
    """Audit one step, and print what was found for people, or as JSON."""
    parser = argparse.ArgumentParser(
        "halfstep audit",
        usage=USAGE,
        description="Run a step op by op, say what each runs in and what it costs, and why 16 bits are not faster here. Looks at the small GPT of "
        "halfstep train, with any option of it, or at a model of yours.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", metavar="FILE.py:FUNCTION", help="a function that gives (model, batches) or (model, batches, loss)")
    parser.add_argument("--precision", metavar="TEXT", help="what to look at; default: what halfstep train would use, or a model of yours as it is")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds of timing (default: {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="for machines")
    options, rest = parser.parse_known_args(list(argv))
    subject = subject_of(options.target, rest, 1)
    precision = options.precision
    if precision is None and options.target is None:
        precision = str(training_arguments(subject.settings).policy)
    found = audit(subject.model, subject.batches[0], precision=precision, loss=subject.loss, rounds=options.rounds)
    print(json.dumps(found.as_dict(), indent=1, allow_nan=False) if options.json else found)
    return 0
