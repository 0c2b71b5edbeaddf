"""What is said of steps that could not be applied: cause, place, since when, and remedies that fit the cause."""

import math
import re
from collections.abc import Sequence

import pytest

from halfstep.step import Culprit, StepResult
from halfstep.step.record import Record
from halfstep.step.refusal import Explained, diverged, explained, refused
from halfstep.step.verdict import Verdict

BAD_LOSS = Verdict(False, math.nan, loss_finite=False)
OVERFLOW = Verdict(False, math.inf)


class Asked:
    """Notes how it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, int]] = []

    def __call__(self, pin: bool, step: int) -> Explained:
        self.calls.append((pin, step))
        return Explained(detail="looked")


def looks(verdict: Verdict, heal: str = "skip") -> list[tuple[bool, int]]:
    asked = Asked()
    said = explained(asked, verdict, heal, 17)  # type: ignore[arg-type]
    assert said == (Explained(detail="looked") if asked.calls else Explained())
    return asked.calls


@pytest.mark.parametrize("heal", ["skip", "pin", "raise"])
def test_good_steps_and_those_that_the_scale_mends_are_not_looked_into(heal: str) -> None:
    assert looks(Verdict(True, 1.0), heal) == []
    assert looks(OVERFLOW, heal) == []


@pytest.mark.parametrize("heal", ["skip", "pin", "raise"])
@pytest.mark.parametrize("verdict", [BAD_LOSS, OVERFLOW.not_the_scale()], ids=["loss", "persists"])
def test_other_bad_steps_are_looked_into_with_their_number(verdict: Verdict, heal: str) -> None:
    assert looks(verdict, heal) == [(heal == "pin", 17)]


def test_nobody_to_ask_is_no_error() -> None:
    assert explained(None, BAD_LOSS, "pin", 0) == Explained()


def result(reason: str, names: Sequence[str] = ("blocks.1.wo",), detail: str = "") -> StepResult:
    return StepResult(False, reason, scale=1024.0, culprits=tuple(Culprit(n, "forward", math.inf) for n in names), detail=detail)  # type: ignore[arg-type]


REASONS = ["overflow", "forward-overflow", "nonfinite-loss"]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("names", [(), ("wo",), ("a", "b", "c")], ids=len)
def test_the_end_of_a_run_says_what_where_since_when_and_three_remedies(reason: str, names: Sequence[str]) -> None:
    record = Record()
    record.bad_steps = 4
    error = diverged(result(reason, names, "wo reaches 1.5e+05"), record, 120, 4, "out/checkpoint-100")
    text = str(error)
    assert error.result.reason == reason
    parts = ("4 steps in a row", reason, "loss scale 1024", "since step 120", "wo reaches 1.5e+05", "None of them changed the weights")
    for part in parts:
        assert part in text
    assert ", ".join(f"{n} (forward: inf)" for n in names) in text
    assert names or "not finite: unknown" in text
    assert "last good checkpoint is out/checkpoint-100" in text
    assert re.findall(r"(?<!\S)(\d)\. [A-Z]", text) == ["1", "2", "3"]
    assert "patience=" in text
    assert "max_bad_steps=" in text
    assert ".." not in text.replace("...", "")


def test_without_a_checkpoint_and_without_a_step() -> None:
    record = Record()
    record.bad_steps = 2
    text = str(diverged(result("overflow"), record, 0, 2, ""))
    assert "since the first step of this run" in text
    assert "saved no checkpoint" in text
    assert "your last checkpoint" in text


def test_the_remedy_fits_the_cause() -> None:
    def first(reason: str, name: str) -> str:
        record = Record()
        record.bad_steps = 1
        return str(diverged(result(reason, (name,)), record, 0, 1, "")).partition("1. ")[2].partition("2. ")[0]

    assert "fp32=blocks.1.wo" in first("forward-overflow", "blocks.1.wo")
    assert "data" in first("nonfinite-loss", "input x")
    assert "trace" in first("nonfinite-loss", "loss")
    assert "head.weight" in first("overflow", "head.weight")
    assert "fp32=forward" not in first("forward-overflow", "forward of Net")


@pytest.mark.parametrize("reason", REASONS)
def test_a_single_bad_step_names_its_culprit_and_the_ways_on(reason: str) -> None:
    error = refused(result(reason, detail="in words"))
    assert error.result.reason == reason
    for part in (reason, "blocks.1.wo (forward: inf)", "in words", "Nothing was changed", "heal="):
        assert part in str(error)
