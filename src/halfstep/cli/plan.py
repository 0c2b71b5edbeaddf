"""`halfstep plan`: which precision a model can be trained in on this device, which of its modules must stay in fp32, and what it costs and gains."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any, get_args

from halfstep.cli.subject import subject_of
from halfstep.diagnostics.plan import plan
from halfstep.diagnostics.plan_advice import Target
from halfstep.errors import ConfigError

USAGE = "halfstep plan [CONFIG.yaml] [--target FILE.py:FUNCTION] [--batches N] [--output plan.yaml] [--train-option value ...]"

FLAGS = ("--fp16", "--bf16")  # of halfstep train; those of a configuration are left aside


def main(argv: Sequence[str]) -> int:
    """Look at the model, print the plan, and write it where asked."""
    parser = argparse.ArgumentParser(
        "halfstep plan",
        usage=USAGE,
        description="Run a few batches in fp32 and under each precision, and say which one to train in. Looks at the small GPT of halfstep train, "
        "with any option of it, or at a model of yours. halfstep train --plan FILE follows what --output wrote.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", metavar="FILE.py:FUNCTION", help="a function that gives (model, batches) or (model, batches, loss)")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="batches to look at (default: 4)")
    parser.add_argument("--precision", action="append", metavar="TEXT", help="plan for this one; may be given several times. Default: the usual five")
    parser.add_argument("--want", choices=get_args(Target), default="speed", help="speed, or the least memory (default: speed)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of timing, 0 for none (default: 5)")
    parser.add_argument("--output", metavar="FILE", help="write the plan there")
    parser.add_argument("--json", action="store_true", help="for machines")
    options, rest = parser.parse_known_args(list(argv))
    for token in rest:
        if token.partition("=")[0] in FLAGS:
            raise ConfigError(
                f"{token} says what to train in, which is what the plan is to find", f"Write --precision {token[2:6]}-mixed to plan for it."
            )
    subject = subject_of(options.target, rest, options.batches)
    found = plan(
        subject.model,
        subject.batches,
        precision=options.precision[0] if options.precision and len(options.precision) == 1 else options.precision,
        optimizer=subject.optimizer or "AdamW",
        loss=subject.loss,
        target=options.want,
        count=options.batches,
        rounds=options.rounds,
    )
    if options.output:
        found.save(options.output)
    if options.json:
        print(json.dumps(_json(found.as_dict()), indent=1))
        return 0
    print(found)
    if options.output:
        print(f"wrote {options.output}; halfstep train --plan {options.output} follows it")
    return 0


def _json(value: Any) -> Any:
    """Numbers that JSON does not have, as text."""
    if isinstance(value, dict):
        return {k: _json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_json(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
