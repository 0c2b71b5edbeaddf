"""`halfstep compare`: train a model in two precisions side by side, and name the module where they part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from torch import nn

from halfstep.cli.subject import Subject, from_target, from_training, training_arguments
from halfstep.diagnostics.compare import compare
from halfstep.errors import ConfigError
from halfstep.optim import AdamW

DEFAULT = "fp16-mixed"


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as halfstep's."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigError(message, "halfstep compare --help lists the options.")


def main(argv: Sequence[str]) -> int:
    """Compare, print what was found for people or as JSON; 0 when the runs are alike, 1 when they diverged."""
    parser = _options()
    options, rest = parser.parse_known_args(argv)
    if options.target is not None and rest:
        raise ConfigError(f"{rest[0]} has no effect beside --target", "Leave it out: the target makes the model and its batches.")
    count = options.batches if options.batches is not None else options.steps

    def subject(seed: int) -> Subject:
        return from_target(options.target, count, seed) if options.target is not None else from_training(rest, count, seed)

    first = subject(0)

    def made(seed: int) -> nn.Module:
        return first.model if seed == 0 else subject(seed).model

    found = compare(
        made,
        first.batches,
        options.precision or (str(training_arguments(first.settings).policy) if first.settings else DEFAULT),
        reference=options.reference,
        steps=options.steps,
        seeds=options.seeds,
        optimizer=first.optimizer or _optimizer(first.settings),
        loss=first.loss,
        tolerance=options.tolerance,
        compile=options.compiled,
        as_written=options.as_written,
    )
    print(json.dumps(found.as_dict() | {"model": first.name}, indent=1) if options.json else f"{first.name}\n{found}")
    return found.status


def _options() -> _Parser:
    made = _Parser(
        "halfstep compare",
        usage="halfstep compare [CONFIG.yaml] [--target FILE.py:FUNCTION] [--precision P] [--reference P] [options]",
        description="Train a model in two precisions on the same batches and seeds, and name the module where they part. Without a target: the small "
        "GPT of halfstep train, with any of its options. Ends with 0 when the runs are alike, 1 when they diverged, 2 for wrong usage.",
        allow_abbrev=False,
    )
    made.add_argument("--target", help="FILE.py:FUNCTION that gives the model and its batches (a seed is passed if it takes one)")
    made.add_argument(
        "--precision", help=f"a precision, or simulate:FORMAT such as simulate:e4m3 (default: halfstep train's; {DEFAULT} for --target)"
    )
    made.add_argument("--reference", help="a precision with weights in fp32 (default: fp32; with --compiled the precision itself)")
    made.add_argument("--steps", type=int, default=20, help="of each run (default: 20)")
    made.add_argument("--batches", type=int, help="different batches, gone through again when there are more steps (default: as many as steps)")
    made.add_argument("--seeds", type=int, default=3, help="runs of each side, for the final loss (default: 3)")
    made.add_argument("--tolerance", type=float, default=5.0, help="how many times the expected error still counts as alike (default: 5)")
    made.add_argument("--compiled", action="store_true", help="run the precision under torch.compile")
    made.add_argument("--as_written", "--as-written", action="store_true", help="let the reference do the casts to 16 bits of the model's code")
    made.add_argument("--json", action="store_true", help="for machines")
    return made


def _optimizer(settings: Any) -> Callable[[Iterable[nn.Parameter]], Any]:
    """AdamW with the settings of `halfstep train`, or its defaults for a target."""
    known = {"lr": settings["learning_rate"], "weight_decay": settings["weight_decay"]} if settings else {"lr": 1e-3}
    return lambda parameters: AdamW(parameters, **known)
