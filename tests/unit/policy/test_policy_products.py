"""`products=`: which products run in torch's 16-bit kernels and which are emulated, as text."""

import itertools

import pytest

from halfstep.errors import ConfigError
from halfstep.hardware import FAMILIES
from halfstep.policy import PRESETS, Policy, families_of, parse, products_text
from halfstep.policy.parse import check
from halfstep.policy.products import canonical


def test_the_words_mean_none_all_and_as_measured() -> None:
    assert families_of("native") == ()
    assert families_of("emulated") == FAMILIES
    assert families_of("auto") is None


@pytest.mark.parametrize("count", range(4))
def test_every_choice_of_families_has_one_text(count: int) -> None:
    for chosen in itertools.combinations(FAMILIES, count):
        text = products_text(chosen)
        assert families_of(text) == chosen
        assert canonical(text) == text
        for order in itertools.permutations(chosen):
            if order:
                assert canonical(f"emulated:{' | '.join(order)}") == text
        policy = parse(f"bf16-mixed,products={text}")
        assert policy.products == text
        assert str(policy) == f"bf16-mixed,products={text}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("emulate", "Did you mean 'emulated'"),
        ("fast", "Known: auto, emulated, native"),
        ("native:matmul", "emulated:convolution"),
        ("auto:matmul", "emulated:convolution"),
        ("emulated:", "families are matmul, convolution, attention"),
        ("emulated:matmul|gemm", "families are matmul, convolution, attention"),
        (None, "a NoneType"),
    ],
)
def test_other_texts_are_refused_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="products=") as caught:
        families_of(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("preset", ["bf16-lean", "fp16-true"])
def test_it_holds_for_every_precision_with_16_bit_products(preset: str) -> None:
    for text in ("native", "emulated", "emulated:matmul"):
        assert str(parse(f"{preset},products={text}")) == f"{preset},products={text}"


@pytest.mark.parametrize("preset", ["fp32", "tf32"])
def test_it_is_refused_where_there_is_no_choice(preset: str) -> None:
    assert parse(f"{preset},products=auto") == PRESETS[preset]
    for text in ("native", "emulated", "emulated:matmul"):
        with pytest.raises(ConfigError, match=f"products={text} has no effect under {preset}"):
            parse(f"{preset},products={text}")


def test_a_policy_is_written_in_the_one_spelling() -> None:
    with pytest.raises(ConfigError, match=r"another spelling of emulated:convolution\|attention"):
        check(Policy("bf16-mixed", "bf16", products="emulated:attention|convolution"))
