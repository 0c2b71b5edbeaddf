"""What is said of a step that could not be applied: why, who was to blame, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfstep.errors import DivergedError, StepRefusedError
from halfstep.step.record import Record
from halfstep.step.result import Culprit, StepResult
from halfstep.step.verdict import Verdict

Heal = Literal["skip", "pin", "raise"]


@dataclass(frozen=True)
class Explained:
    """What a second look at the forward passes of a bad step has shown.

    culprits: the modules or inputs to blame, in the order of the forward pass; empty when every output was finite. overflow: 16 bits are to blame,
    fp32 holds the values. pinned: modules that are held in fp32 from now on because of it. detail: the same in words, with ranges.
    """

    culprits: tuple[Culprit, ...] = ()
    overflow: bool = False
    pinned: tuple[str, ...] = ()
    detail: str = ""


Explain = Callable[[bool, int], Explained]  # explain(pin, step): whether modules that fp32 helps shall be pinned; the number of the step


def explained(explain: Explain | None, verdict: Verdict, heal: Heal, step: int) -> Explained:
    """Look into the forward pass of a refused step, where its loss was not finite or no loss scale was low enough."""
    if explain is None or verdict.fit or verdict.blames_scale:
        return Explained()
    return explain(heal == "pin", step)


def refused(result: StepResult) -> StepRefusedError:
    """The error for a single bad step, where the user wants one."""
    what = "only a part of the step could be applied" if result.applied else "the step could not be applied"
    return StepRefusedError(
        f"{what} ({result.reason}, loss scale {result.scale:g}); not finite: {blamed(result)}. "
        + (f"{result.detail}. " if result.detail else "")
        + ("" if result.applied else "Nothing was changed"),
        "Catch it and go on with the next batch, or use on_overflow='skip' or 'replay', heal='skip' or 'pin'.",
        result,
    )


def diverged(result: StepResult, record: Record, applied: int, patience: int, checkpoint: str) -> DivergedError:
    """The error that ends a run: what, where, since when, the last good checkpoint, and remedies in the order to try them."""
    remedies = [*_remedies(result), "Go on from " + (checkpoint or "your last checkpoint") + " with a smaller learning rate or a longer warm-up"]
    since = f"since step {applied}, the last one that was applied" if applied else "since the first step of this run"
    return DivergedError(
        f"{record.bad_steps} steps in a row could not be applied ({result.reason}, loss scale {result.scale:g}), {since}; "
        f"not finite: {blamed(result)}. "
        + (f"{result.detail}. " if result.detail else "")
        + ("" if result.applied else "None of them changed the weights. ")
        + (f"The last good checkpoint is {checkpoint}" if checkpoint else "This run has saved no checkpoint"),
        " ".join(f"{i}. {remedy}." for i, remedy in enumerate(remedies[:3], 1))
        + f" The patience of {patience} steps is the argument patience= (max_bad_steps= in TrainingArguments).",
        result,
    )


def blamed(result: StepResult) -> str:
    """The culprits in a line."""
    return ", ".join(str(c) for c in result.culprits) or "unknown"


def _remedies(result: StepResult) -> tuple[str, str]:
    first = result.culprits[0].name if result.culprits else "loss"
    if result.reason == "forward-overflow":
        if first.startswith("forward of "):
            return (
                f"Move the code of the {first} that overflows into a submodule, which heal='pin' can hold in fp32, or compute it on x.float()",
                "Use a bf16 precision, whose range is that of fp32",
            )
        return (
            f"Hold {first} in fp32: heal='pin' does so by itself, fp32={first} in the precision from the start",
            "Use a bf16 precision, whose range is that of fp32",
        )
    if result.reason == "nonfinite-loss":
        if first.startswith("input "):
            return f"Take the values that are not finite out of the data ({first})", "Normalise the inputs: the next batch may hold them again"
        return (
            "Call halfstep.trace(model, batch) with this batch: it names the operation that gives the first inf or NaN",
            "Look for a division, logarithm or square root of 0 there: an inf or NaN that fp32 has too is not the precision's fault",
        )
    return (
        f"Call halfstep.trace(model, batch, loss=...) with this batch: it names the operation that gives the first bad gradient (of {first})",
        "Clip the gradients (max_grad_norm), or use a bf16 precision if the run was fp16",
    )
