"""Module name patterns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigError
from halfstep.policy import select

NAMES = ("", "embed", "layers", "layers.0", "layers.0.norm", "layers.0.linear", "layers.1", "layers.1.norm", "layers.1.linear", "norm", "lm_head")

FOUND = [
    (("lm_head",), ("lm_head",)),
    (("*norm*",), ("layers.0.norm", "layers.1.norm", "norm")),
    (("*.norm",), ("layers.0.norm", "layers.1.norm")),
    (("layers.?.linear",), ("layers.0.linear", "layers.1.linear")),
    (("layers.0", "layers.0.norm"), ("layers.0",)),
    (("layers*",), ("layers",)),
    (("lm_head", "embed"), ("embed", "lm_head")),
    (("*",), ("embed", "layers", "norm", "lm_head")),
    (("layers.[1]",), ("layers.1",)),
    ((), ()),
]


@pytest.mark.parametrize(("patterns", "expected"), FOUND, ids=[str(p) for p, _ in FOUND])
def test_patterns_select_the_outermost_modules_in_order(patterns: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert select(NAMES, patterns) == expected


def test_a_name_that_begins_like_another_is_not_inside_it() -> None:
    assert select(("norm", "norm2", "norm.scale"), ("norm*",)) == ("norm", "norm2")


def test_patterns_are_case_sensitive() -> None:
    with pytest.raises(ConfigError):
        select(NAMES, ("LM_HEAD",))


@pytest.mark.parametrize(
    ("patterns", "pattern", "remedy"),
    [
        (("lm_haed",), "lm_haed", "'lm_head'"),
        (("lm_head", "layer.0"), "layer.0", "'layers.0'"),
        (("zzzzzz",), "zzzzzz", "Known:"),
    ],
)
def test_a_pattern_without_a_match_is_refused(patterns: tuple[str, ...], pattern: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(NAMES, patterns)
    assert f"fp32={pattern}" in caught.value.cause
    assert "matches no module" in caught.value.cause
    assert remedy in caught.value.remedy


def test_a_model_without_submodules_is_told_so() -> None:
    with pytest.raises(ConfigError, match="no submodules"):
        select(("",), ("*",))


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(st.lists(st.sampled_from(NAMES[1:]), min_size=1, max_size=4, unique=True))
def test_selected_modules_never_lie_inside_each_other_and_cover_the_patterns(patterns: list[str]) -> None:
    chosen = select(NAMES, tuple(patterns))
    assert all(not a.startswith(f"{b}.") for a in chosen for b in chosen)
    assert all(any(p == c or p.startswith(f"{c}.") for c in chosen) for p in patterns)
    assert set(chosen) <= set(patterns)
    assert select(NAMES, chosen) == chosen
