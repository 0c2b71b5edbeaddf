"""What is found out about a run besides its own numbers, where it was asked for: the memory predicted for its step, its audit, and the report at
its end. What finds it out is imported when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from halfstep.errors import HalfstepError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.run import REPORT

if TYPE_CHECKING:
    from halfstep.diagnostics import Audit

logger = logging.getLogger("halfstep")


def refuse_missing_packages(args: TrainingArguments) -> None:
    """Raise MissingExtraError for a report that could not be written at the end, before anything is trained."""
    if args.report:
        from halfstep.reports import require

        require()


def predicted_bytes(model: nn.Module, inputs: dict[str, Any], optimizer: Any, args: TrainingArguments) -> dict[str, int] | str:
    """What `halfstep.memory` says that a step of this run takes, in bytes by kind; or in words why it cannot say. Takes some 0.1 ms an op."""
    from halfstep.diagnostics.memory import memory

    try:
        plan = memory(
            model,
            inputs,
            optimizer=optimizer,
            accumulate=args.gradient_accumulation_steps,
            released=args.gradient_release != "no",
            savings=False,
        )
    except Exception as error:  # noqa: BLE001  whatever the model's code does with shapes (numpy, pointers): the run itself goes on without a prediction
        return _why(error)
    return plan.as_dict()


def audited(model: nn.Module, call: Callable[[], Any]) -> Audit | str:
    """What `halfstep.audit` says of a step of this run, whose loss `call` computes; or in words why it cannot say."""
    from halfstep.diagnostics.audit import audit

    try:
        return audit(model, call=call)
    except Exception as error:  # noqa: BLE001  whatever the model's code does when it is called again: the run itself goes on without an audit
        return _why(error)


def _why(error: Exception) -> str:
    """Errors of others are named by their kind."""
    return str(error) if isinstance(error, HalfstepError) else f"{type(error).__name__}: {error}"


def write_report(folder: Path, quiet: bool) -> None:
    """Write report.html into a run folder whose run has ended. What goes wrong is a warning: the run itself is over and done with."""
    from halfstep.reports import report

    try:
        path = report(folder, output=folder / REPORT)
    except HalfstepError as error:
        logger.warning("the report of %s was not written: %s", folder, error)
        return
    if not quiet:
        print(f"report: {path}")
