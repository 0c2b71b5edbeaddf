"""`precision="auto"`: by speed and by memory, on hand-made records of devices and models."""

import dataclasses

import pytest

from halfstep.errors import ConfigError
from halfstep.hardware import FAMILIES, Capabilities, Rate, Rates
from halfstep.policy import AUTO, Choice, ModelSize, Policy, from_flags, model_bytes, parse, recommend

GIB = 2**30
CPU = Capabilities("cpu", "cpu", "AMD EPYC", "AVX2", ("fp32",), ("bf16", "fp16"), 2, 16 * GIB, "/usr/bin/g++", ())


def rates(bf16: float, fp16: float, **others: float) -> Rates:
    """Rates of a device whose products run at `bf16` and `fp16` times fp32's rate; others: bf16's of one family."""
    rows = [Rate(family, form, 1.0, others.get(family, gain)) for form, gain in (("bf16", bf16), ("fp16", fp16)) for family in FAMILIES]
    return Rates("cpu", tuple(rows))


def model(weights: int, **more: object) -> ModelSize:
    return ModelSize((((weights // 1024, 1024), True),), **more)  # type: ignore[arg-type]


SMALL = model(2**20)


@pytest.mark.parametrize(
    ("bf16", "fp16", "chosen"),
    [(0.8, 0.8, "fp32"), (1.05, 1.0, "fp32"), (1.2, 0.1, "bf16-mixed"), (2.0, 2.0, "bf16-mixed"), (0.1, 4.0, "fp16-mixed"), (2.0, 3.0, "fp16-mixed")],
)
def test_a_model_that_fits_gets_what_is_fastest(bf16: float, fp16: float, chosen: str) -> None:
    choice = recommend(CPU, rates(bf16, fp16), SMALL)
    assert str(choice.policy) == chosen
    assert f"{bf16:.2f}" in choice.reason or f"{fp16:.2f}" in choice.reason
    assert "16.0 MiB of 16.00 GiB" in choice.reason, "16 bytes for each of 2^20 weights"


def test_only_the_products_that_a_model_has_count() -> None:
    slow_convolutions = rates(2.0, 0.5, convolution=0.1)
    assert recommend(CPU, slow_convolutions, SMALL).policy == parse("fp32")
    assert recommend(CPU, slow_convolutions, dataclasses.replace(SMALL, families=("matmul", "attention"))).policy == parse("bf16-mixed")


def test_slow_attention_does_not_outweigh_products_that_are_fast() -> None:
    """A CPU with AVX512-BF16: matrix products at 1.55 of fp32's rate, attention at 0.83; whole steps of a GPT-2 at 0.7 of fp32's time."""
    assert recommend(CPU, rates(1.55, 0.1, attention=0.83), SMALL).policy == parse("bf16-mixed")
    assert recommend(CPU, rates(1.55, 0.1, attention=0.1), SMALL).policy == parse("fp32")


@pytest.mark.parametrize(
    ("bf16", "fp16", "ladder"),
    [
        (0.8, 0.8, ["fp32", "bf16-lean", "bf16-lean,weights=split24"]),
        (2.0, 0.8, ["bf16-mixed", "bf16-lean", "bf16-lean,weights=split24"]),
        (0.1, 2.0, ["fp16-mixed", "fp16-lean", "fp16-lean,weights=split24"]),
    ],
)
def test_a_model_that_does_not_fit_gets_the_first_precision_that_does(bf16: float, fp16: float, ladder: list[str]) -> None:
    """Half of the memory is for activations; each precision is chosen up to exactly its own bytes."""
    found = rates(bf16, fp16)
    big = model(2**30)
    for i, text in enumerate(ladder):
        needed = model_bytes(big.trained, parse(text)).total
        just = dataclasses.replace(CPU, memory_bytes=2 * needed)
        assert str(recommend(just, found, big).policy) == text
        less = dataclasses.replace(CPU, memory_bytes=2 * needed - 2)
        choice = recommend(less, found, big)
        assert str(choice.policy) == ladder[min(i + 1, 2)]
        assert ("may not leave enough" in choice.reason) == (i == 2)
        assert f"{less.memory_bytes / GIB:.2f} GiB" in choice.reason


def test_frozen_weights_count() -> None:
    needed = model_bytes(SMALL.trained, parse("fp32")).total
    device = dataclasses.replace(CPU, memory_bytes=2 * needed + 2000)
    slow = rates(0.5, 0.5)
    assert recommend(device, slow, dataclasses.replace(SMALL, frozen=1000)).policy == parse("fp32")
    assert recommend(device, slow, dataclasses.replace(SMALL, frozen=1002)).policy == parse("bf16-lean")


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_a_model_loaded_in_16_bits_keeps_its_format(form: str) -> None:
    """fp32 would be refused: its small updates would round away."""
    loaded = dataclasses.replace(SMALL, loaded=form)
    choice = recommend(CPU, rates(0.5, 0.5), loaded)
    assert str(choice.policy) == f"{form}-mixed"
    assert f"loaded in {form}" in choice.reason
    assert loaded.bytes_under(choice.policy) == 14 * 2**20 + 4, "16-bit weights with split masters"
    tight = dataclasses.replace(CPU, memory_bytes=20 * 2**20)
    assert str(recommend(tight, rates(2.0, 2.0), loaded).policy) == f"{form}-lean"


def test_a_gpu_is_judged_by_its_matrix_products() -> None:
    gpu = dataclasses.replace(CPU, device="cuda:0", kind="cuda", native=("fp32", "tf32", "bf16", "fp16"))
    found = Rates("cuda:0", tuple(Rate("matmul", form, 1.0, gain) for form, gain in (("fp32", 1.0), ("tf32", 8.0), ("bf16", 16.0), ("fp16", 16.0))))
    assert recommend(gpu, found, dataclasses.replace(SMALL, families=("convolution",))).policy == parse("bf16-mixed")


def test_a_choice_prints_itself() -> None:
    assert str(Choice(parse("bf16-lean"), "why")) == "bf16-lean: why"


def test_auto_is_read_where_a_model_will_be_known_and_refused_elsewhere() -> None:
    assert from_flags(precision="auto") == from_flags(precision=AUTO) == from_flags(precision=" auto ") == AUTO
    assert str(AUTO) == "auto"
    assert AUTO.is_auto
    assert not Policy().is_auto
    for given in ("auto", AUTO):
        with pytest.raises(ConfigError, match="chosen when the model is prepared"):
            parse(given)
    with pytest.raises(ConfigError, match="Write auto alone"):
        parse("auto,scale=none", auto=True)
    with pytest.raises(ConfigError, match="tf32=True were both given"):
        from_flags(precision="auto", tf32=True)
    with pytest.raises(ConfigError, match="were both given"):
        from_flags(precision="auto", bf16=True)
