"""The op lists of a policy: their text, and what is refused."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigError
from halfstep.policy import PRESETS, Policy, parse
from halfstep.policy.parse import check

quick = settings(deadline=None, max_examples=100, derandomize=True, database=None)
ops = st.lists(st.sampled_from(["softmax", "exp", "layer_norm", "gelu", "mean", "pow"]), max_size=6, unique=True)


@quick
@given(st.sampled_from(["bf16-mixed", "fp16-mixed"]), st.sampled_from(["cuda", "device"]), ops, st.integers(0, 6))
def test_lists_read_back_from_their_print(preset: str, op_list: str, names: list[str], cut: int) -> None:
    policy = dataclasses.replace(PRESETS[preset], ops=op_list, fp32_ops=tuple(names[:cut]), half_ops=tuple(names[cut:]))  # type: ignore[arg-type]
    assert check(policy) == policy
    assert parse(str(policy)) == policy


def test_the_text_forms() -> None:
    policy = parse("bf16-mixed, ops=device, fp32_ops= softmax | exp , half_ops=layer_norm")
    assert (policy.ops, policy.fp32_ops, policy.half_ops) == ("device", ("softmax", "exp"), ("layer_norm",))
    assert str(policy) == "bf16-mixed,ops=device,fp32_ops=softmax|exp,half_ops=layer_norm"
    assert PRESETS["bf16-mixed"].ops == "cuda"
    assert str(parse("bf16-mixed,ops=cuda")) == "bf16-mixed"


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("bf16-mixed,ops=gpu", "ops='gpu' is not known", "cuda"),
        ("bf16-mixed,ops=devise", "ops='devise'", "Did you mean 'device'?"),
        ("bf16-mixed,op=device", "unknown key 'op'", "Did you mean 'ops'?"),
        ("fp32,ops=device", "ops=device has no effect under fp32", "Leave it out"),
        ("tf32,fp32_ops=softmax", "fp32_ops=softmax has no effect under tf32", "Leave it out"),
        ("fp32,half_ops=softmax|exp", "half_ops=softmax|exp has no effect under fp32", "Leave it out"),
        ("bf16-mixed,fp32_ops=exp|pow,half_ops=pow", "'pow' stands in fp32_ops and in half_ops", "Leave it out of one"),
        ("bf16-mixed,fp32_ops=", "'fp32_ops'", "fp32_ops=VALUE"),
    ],
)
def test_what_is_refused(text: str, cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert cause in caught.value.cause
    assert remedy in caught.value.remedy


def test_a_value_that_no_text_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gpu'"):
        check(Policy("bf16-mixed", autocast="bf16", ops="gpu"))  # type: ignore[arg-type]
