"""The boolean flags of trainers and accelerators, alone and together with halfstep's own text."""

import itertools
import re

import pytest

from halfstep.errors import ConfigError
from halfstep.policy import PRESETS, Policy, from_flags, parse

ALONE = [
    ({}, "fp32"),
    ({"fp16": True}, "fp16-mixed"),
    ({"bf16": True}, "bf16-mixed"),
    ({"tf32": True}, "tf32"),
    ({"tf32": False}, "fp32"),
    ({"fp16": True, "tf32": True}, "fp16-mixed,tf32=on"),
    ({"bf16": True, "tf32": True}, "bf16-mixed,tf32=on"),
    ({"bf16": True, "tf32": False}, "bf16-mixed"),
    ({"mixed_precision": "no"}, "fp32"),
    ({"mixed_precision": "fp16"}, "fp16-mixed"),
    ({"mixed_precision": "bf16"}, "bf16-mixed"),
    ({"mixed_precision": "no", "tf32": True}, "tf32"),
    ({"mixed_precision": "bf16", "tf32": True}, "bf16-mixed,tf32=on"),
    ({"precision": "bf16-mixed"}, "bf16-mixed"),
    ({"precision": PRESETS["tf32"]}, "tf32"),
    ({"precision": "tf32", "tf32": True}, "tf32"),
    ({"precision": "fp32", "tf32": False}, "fp32"),
    ({"precision": "bf16-mixed,tf32=on", "tf32": True}, "bf16-mixed,tf32=on"),
    ({"precision": "fp16-mixed,scale=static:1024", "tf32": False}, "fp16-mixed,scale=static:1024"),
]


@pytest.mark.parametrize(("flags", "text"), ALONE, ids=[str(flags) for flags, _ in ALONE])
def test_flags_give_the_policy_of_this_text(flags: dict[str, object], text: str) -> None:
    policy = from_flags(**flags)  # type: ignore[arg-type]
    assert policy == parse(text)
    assert parse(str(policy)) == policy


def test_fp16_and_bf16_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="one 16-bit format") as caught:
        from_flags(fp16=True, bf16=True)
    assert "fp16=True" in caught.value.cause
    assert "bf16=True" in caught.value.cause
    assert "Leave one" in caught.value.remedy


@pytest.mark.parametrize("flag", [{"fp16": True}, {"bf16": True}, {"mixed_precision": "bf16"}, {"mixed_precision": "no"}])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", PRESETS["fp16-mixed"]])
def test_precision_with_another_flag_is_refused(precision: str | Policy, flag: dict[str, object]) -> None:
    """Also when both say the same: one of them is then without effect."""
    with pytest.raises(ConfigError, match="both given") as caught:
        from_flags(precision=precision, **flag)  # type: ignore[arg-type]
    assert str(precision) in caught.value.cause
    assert next(iter(flag)) in caught.value.cause
    assert "Leave one" in caught.value.remedy


@pytest.mark.parametrize(
    ("flag", "name"), [(f, m) for f, m in itertools.product(("fp16", "bf16"), ("no", "fp16", "bf16")) if f != m], ids=lambda v: v
)
def test_a_flag_that_contradicts_mixed_precision_is_refused(flag: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(mixed_precision=name, **{flag: True})  # type: ignore[arg-type]
    assert flag in caught.value.cause
    assert "mixed_precision" in caught.value.cause
    assert caught.value.remedy


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", True), ("tf32", False), ("bf16-mixed", True), ("bf16-mixed,tf32=on", False)])
def test_tf32_that_contradicts_precision_is_refused_with_a_remedy_that_works(precision: str, tf32: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(precision=precision, tf32=tf32)
    assert precision in caught.value.cause
    assert f"tf32={tf32}" in caught.value.cause
    quoted = re.search(r"'([^']+)'", caught.value.remedy)  # a whole precision ...
    setting = re.search(r"tf32=(?:on|off)", caught.value.remedy)  # ... or one setting of it
    advised = (
        quoted.group(1)
        if quoted
        else ",".join([p for p in precision.split(",") if not p.startswith("tf32=")] + [setting.group() if setting else "?"])
    )
    assert from_flags(precision=advised, tf32=tf32).tf32 == tf32


@pytest.mark.parametrize(("name", "word"), [("bf61", "bf16"), ("fp8", "fp16"), ("fp16-mixed", "fp16"), ("", "no")])
def test_an_unknown_mixed_precision_is_refused(name: str, word: str) -> None:
    with pytest.raises(ConfigError, match="unknown mixed_precision") as caught:
        from_flags(mixed_precision=name)
    assert repr(name) in caught.value.cause
    assert word in caught.value.remedy


def test_a_bad_precision_is_refused_like_in_parse() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bf16-mixed'"):
        from_flags(precision="bf16-mixd")
