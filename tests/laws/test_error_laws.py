"""Every error carries a cause and a remedy, prints both, and is also the builtin that fits."""

import copy
import pickle

import pytest

from halfstep import errors
from halfstep.errors import ConfigError, DivergedError, HalfstepError, suggest

BUILTINS = {
    "ConfigError": ValueError,
    "PolicyError": ConfigError,
    "DataError": ValueError,
    "StepOrderError": RuntimeError,
    "StepRefusedError": RuntimeError,
    "DivergedError": RuntimeError,
    "CheckpointError": RuntimeError,
    "MissingExtraError": ImportError,
}
CLASSES = {name: c for name, c in vars(errors).items() if isinstance(c, type) and issubclass(c, HalfstepError) and c is not HalfstepError}


def test_the_table_is_complete() -> None:
    assert set(CLASSES) == set(BUILTINS)


@pytest.mark.parametrize("name", list(BUILTINS))
def test_an_error_prints_cause_and_remedy_and_survives_a_copy(name: str) -> None:
    error = CLASSES[name]("this is wrong", "Do that.")
    assert isinstance(error, BUILTINS[name])
    assert isinstance(error, HalfstepError)
    for one in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301  made on this line
        assert type(one) is CLASSES[name]
        assert (one.cause, one.remedy) == ("this is wrong", "Do that.")
        assert str(one) == "this is wrong. Do that."
    assert str(CLASSES[name]("this is wrong")) == "this is wrong"


def test_a_divergence_carries_the_last_result() -> None:
    assert DivergedError("c", "r", "result").result == "result"
    assert DivergedError("c", "r").result is None


@pytest.mark.parametrize(
    ("word", "known", "remedy"),
    [
        ("bf16-mixd", ("fp32", "bf16-mixed"), "Did you mean 'bf16-mixed'?"),
        ("scal", ("scale", "scale_floor"), "Did you mean 'scale'?"),
        ("zzz", ("b", "a"), "Known: a, b."),
        ("", ("a",), "Known: a."),
    ],
)
def test_a_near_name_is_suggested_and_else_all(word: str, known: tuple[str, ...], remedy: str) -> None:
    assert suggest(word, known) == remedy
