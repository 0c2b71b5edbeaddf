"""What a comparison found, as frozen values and as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from halfstep.tracing.findings import number

Fault = Literal["cast", "nonfinite", "error", "path", "update", "loss"]
Verdict = Literal["not told apart", "higher", "lower", "nonfinite", "not judged"]
TOLD_APART = 3.0  # standard errors
GROSS = 0.5  # of the reference's loss: more than that is higher where seeds have no spread to judge by
SPENT = 1e-3  # of the first step's loss: what is left below it, in both runs, is not judged
SHOWN = 5


@dataclass(frozen=True)
class Divergence:
    """A place where the two runs part.

    fault: "cast" (a cast to 16 bits in the model's own code, also in the reference's), "nonfinite" (inf or NaN where the reference has a number),
    "error" (a larger error than the format explains), "path" (other modules are called), "update" (weights do not move), "loss" (it ends higher).
    module: path, "" for the model itself; kind: its type; both "" for the loss and the run as a whole. direction: "forward", "backward", or "" where
    that means nothing. what: the tensor, or a sentence. error: relative, in norm, as it arises in this module's code; expected: what the format
    explains.
    times: their quotient. source: "model.py:42" where it is known.
    """

    fault: Fault
    step: int
    module: str
    kind: str
    direction: str
    what: str
    error: float = 0.0
    expected: float = 0.0
    times: float = 0.0
    source: str = ""

    @property
    def named(self) -> str:
        """The module as words."""
        if self.module:
            return f"{self.module} ({self.kind})" if self.kind else self.module
        return f"the model ({self.kind})" if self.kind else "the loss" if self.fault != "update" else "the weights"

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.named, self.direction, f"step {self.step}", self.source) if part)
        if self.fault == "error":
            times = f"{number(self.times)} times " if math.isfinite(self.times) else ""
            return f"{where}: {self.what} is off by {number(self.error)} of its norm; {times}the {number(self.expected)} that is expected"
        return f"{where}: {self.what}"


@dataclass(frozen=True)
class Damage:
    """What one module does to its numbers, by its own code: the largest over all steps of the error it makes, over what its format explains.

    forward, backward: relative errors; forward_times, backward_times: in units of what is expected. between: relative difference of its outputs
    between the two runs, with all that came before it, the largest over the steps; None where it was not measured.
    """

    module: str
    kind: str
    forward: float
    forward_times: float
    backward: float
    backward_times: float
    between: float | None = None

    @property
    def times(self) -> float:
        """The worse of both directions."""
        return max(self.forward_times, self.backward_times)

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else f"the model ({self.kind})" if self.kind else "the loss"
        apart = f", outputs of both runs {number(self.between)} apart" if self.between is not None else ""
        return (
            f"{name}: {number(self.forward)} forward ({number(self.forward_times)} times expected), "
            f"{number(self.backward)} backward ({number(self.backward_times)}){apart}"
        )


@dataclass(frozen=True)
class LossVerdict:
    """Where the runs end: final losses of the reference and the tested run, one of each for each seed, and whether they can be told apart.

    spread: standard deviation of the reference's over seeds, None for one seed. difference: of the means, tested less reference. errors: the same in
    standard errors of that difference, None where there is no spread. resolution: a smaller difference is that of the format's last digit.
    spent: whether both have come below 0.1 % of the first step's loss (a batch learnt by heart), where precisions leave other remainders.
    verdict: "not told apart", "higher", "lower", "nonfinite" or "not judged".
    """

    reference: tuple[float, ...]
    tested: tuple[float, ...]
    spread: float | None
    difference: float
    errors: float | None
    resolution: float
    verdict: Verdict
    spent: bool = False

    def __str__(self) -> str:
        means = f"final loss {number(_mean(self.tested))} against {number(_mean(self.reference))}"
        if self.verdict == "nonfinite":
            return f"{means}: {sum(not math.isfinite(x) for x in self.tested)} of {len(self.tested)} seeds end without a finite loss"
        seeds = f"{len(self.tested)} seed{'s' if len(self.tested) > 1 else ''}"
        if self.spent and self.verdict == "not judged":
            return f"{means}, {seeds}: not judged, both below {SPENT:.1%} of the loss at the start"
        if self.errors is None:
            most = _mean(self.reference)
            part = f"{self.difference / abs(most):+.1%}" if most else number(self.difference)
            return f"{means}, {seeds}: {self.verdict}" + (f" ({part}), without a spread to judge by" if self.verdict != "not told apart" else "")
        spread = number(self.spread if self.spread is not None else 0.0)
        fine = ", less than the format resolves" if self.verdict == "not told apart" and abs(self.errors) > TOLD_APART else ""
        return f"{means}: {self.verdict} ({self.errors:+.1f} standard errors{fine}; {seeds} spread by {spread})"


def judged(reference: Sequence[float], tested: Sequence[float], resolution: float, first: float) -> LossVerdict:
    """Whether final losses of runs from the same seeds can be told apart: by more than 3 standard errors of the difference of their means (the seeds
    taken as independent, so that what any other seed could have done is no difference), and by more than `resolution`, what the format shows of a
    loss. Where there is no spread (one seed, or seeds that end alike to the last bit), only what is half as much again or more is higher or lower.
    Where both means are below 0.1 % of `first`, the loss of the first step, a difference above the resolution is not judged.
    """
    theirs, own = tuple(reference), tuple(tested)
    difference = _mean(own) - _mean(theirs)
    if not all(map(math.isfinite, own)) and all(map(math.isfinite, theirs)):
        return LossVerdict(theirs, own, None, difference, None, resolution, "nonfinite")
    plain: Verdict = "not told apart" if abs(difference) <= resolution else "not judged"
    if max(abs(_mean(own)), abs(_mean(theirs))) < SPENT * abs(first):
        return LossVerdict(theirs, own, None, difference, None, resolution, plain, spent=True)
    if abs(difference) > max(GROSS * abs(_mean(theirs)), resolution) and math.isfinite(difference):
        plain = "higher" if difference > 0 else "lower"
    if len(own) < 2 or not math.isfinite(difference):
        return LossVerdict(theirs, own, None, difference, None, resolution, plain)
    spread = statistics.stdev(theirs)
    error = math.sqrt((statistics.variance(theirs) + statistics.variance(own)) / len(own))
    if error == 0:
        return LossVerdict(theirs, own, spread, difference, None, resolution, plain)
    errors = difference / error
    apart = abs(errors) > TOLD_APART and abs(difference) > resolution
    return LossVerdict(
        theirs, own, spread, difference, errors, resolution, "not told apart" if not apart else "higher" if difference > 0 else "lower"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Comparison:
    """Two ways to run one model, side by side. `print(comparison)`; `comparison.alike`; `comparison.status` for CI.

    tested, reference: precisions as text. steps: of each run. divergences: in the order in which they arise, the first of each module and direction.
    damage: modules, worst first. losses: of each step of the first seed, as (reference, tested). final: where the runs end. moved: how far the tested
    run's weights have come, over how far the reference's have, None when neither moved. refused: steps of the tested run of the first seed that were
    not applied. tolerance: how many times the expected error still counts as alike.
    compiled: the tested run was compiled, and modules were not looked at one by one.
    """

    tested: str
    reference: str
    steps: int
    tolerance: float
    divergences: tuple[Divergence, ...]
    damage: tuple[Damage, ...]
    losses: tuple[tuple[float, float], ...]
    final: LossVerdict
    moved: float | None
    refused: int
    compiled: bool = False

    @property
    def first(self) -> Divergence | None:
        """The divergence that arose first, or None."""
        return self.divergences[0] if self.divergences else None

    @property
    def alike(self) -> bool:
        """Whether nothing was found that the format does not explain, and the losses are not told apart (or the tested one is lower)."""
        return not self.divergences

    @property
    def status(self) -> int:
        """0 when alike, 1 when diverged."""
        return 0 if self.alike else 1

    def __str__(self) -> str:
        about = f"{self.tested} against {self.reference}, {self.steps} steps"
        if self.first is None:
            unjudged = ", final loss not judged" if self.final.verdict == "not judged" else ""
            lines = [f"alike{unjudged}: {about}; {self.final}"]
        else:
            lines = [f"diverged: {self.first}", f"{about}; {self.final}"]
            rest = self.divergences[1 : 1 + SHOWN]
            lines += [f"also: {d}" for d in rest]
            if len(self.divergences) > 1 + SHOWN:
                lines.append(f"and {len(self.divergences) - 1 - SHOWN} more")
        if self.refused:
            lines.append(f"{self.refused} of {self.steps} steps were not applied under {self.tested}")
        if self.moved is not None and not 0.9 <= self.moved <= 1.1:
            lines.append(f"weights have come {self.moved:.0%} as far as under {self.reference}")
        if self.damage:
            what = "differences of the whole model and its gradients" if self.compiled else "errors that arise in a module's own code"
            lines.append(f"{what}, worst first (alike up to {number(self.tolerance)} times expected):")
            lines += [f"  {d}" for d in self.damage[:SHOWN]]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values for JSON; numbers that are not finite are the texts "inf", "-inf" and "nan"."""
        plain: dict[str, Any] = _plain(asdict(self))
        first = plain["divergences"][0] if plain["divergences"] else None
        return {"alike": self.alike, "first": first} | plain


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
