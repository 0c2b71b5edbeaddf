"""What a plan decides, from made-up devices and measurements: the device's format, unless measured times of the model say clearly otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halfstep.diagnostics.plan_advice import advise, choose, gains
from halfstep.diagnostics.planned import Plan, Tried
from halfstep.errors import ConfigError
from halfstep.hardware import Capabilities, Rate, Rates

GIB = 2**30


def device(kind: str, name: str, level: str, *native: str) -> Capabilities:
    emulated = tuple(f for f in ("bf16", "fp16") if f not in native)
    return Capabilities("cuda:0" if kind == "cuda" else "cpu", kind, name, level, ("fp32", *native), emulated, 8, 16 * GIB, "", ())


DEVICES = {
    "V100": (device("cuda", "V100", "7.0", "fp16"), "fp16", "only emulates bf16"),
    "T4": (device("cuda", "T4", "7.5", "fp16"), "fp16", "from Ampere (8.0) on"),
    "A100": (device("cuda", "A100", "8.0", "tf32", "bf16", "fp16"), "bf16", "bf16 and fp16 natively"),
    "H100": (device("cuda", "H100", "9.0", "tf32", "bf16", "fp16"), "bf16", "needs no loss scale"),
    "GTX 1080": (device("cuda", "GTX 1080", "6.1"), "fp32", "are emulated"),
    "AVX2": (device("cpu", "EPYC", "AVX2"), "fp32", "bf16 and fp16 are emulated"),
    "AMX": (device("cpu", "Xeon", "AVX512+AMX", "bf16"), "bf16", "only emulates fp16"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_the_format_of_a_device_by_its_instructions(name: str) -> None:
    facts, form, word = DEVICES[name]
    found = advise(facts)
    assert (found.format, found.emulated) == (form, facts.emulated)
    assert word in found.reason
    assert name in found.reason or facts.name in found.reason


def test_measured_rates_decide_for_the_products_that_the_model_has() -> None:
    slow = Rates("cpu", (Rate("matmul", "bf16", 1.0, 3.0, 0.6), Rate("convolution", "bf16", 1.0, 0.4, 0.5), Rate("matmul", "fp16", 1.0, 0.9, 0.6)))
    facts = DEVICES["AMX"][0]
    assert advise(facts, slow, ("matmul",)).format == "bf16"
    assert advise(facts, slow, ("matmul", "convolution")).format == "fp32"


def tried(precision: str, seconds: tuple[float, ...] = (), takes: int = 100, problem: str = "") -> Tried:
    return Tried(precision, loss=1.0, loss_error=0.001, gradient_error=0.01, seconds=seconds, predicted={"weights": takes}, problem=problem)


ALL = [tried("fp32"), tried("bf16-mixed"), tried("fp16-mixed"), tried("bf16-lean", takes=50), tried("fp16-lean", takes=50)]


def with_times(**seconds: tuple[float, ...]) -> list[Tried]:
    return [replace(t, seconds=seconds.get(t.precision.replace("-", "_"), (1.0, 1.0))) for t in ALL]


@pytest.mark.parametrize("name", DEVICES)
def test_without_times_the_devices_format_is_taken(name: str) -> None:
    facts, form, _ = DEVICES[name]
    expected = "fp32" if form == "fp32" else f"{form}-mixed"
    assert choose(ALL, advise(facts), GIB).chosen.precision == expected


CHOICES: dict[str, tuple[str, list[Tried], int, Any, str, str]] = {
    "slower than fp32 here": (
        "A100",
        with_times(**dict.fromkeys(("bf16_mixed", "bf16_lean", "fp16_mixed", "fp16_lean"), (2.0, 2.1))),
        GIB,
        "speed",
        "fp32",
        "by measured times",
    ),
    "another is the fastest": ("A100", with_times(fp16_mixed=(0.5, 0.5)), GIB, "speed", "fp16-mixed", "by measured times"),
    "slower by less than the noise": ("A100", with_times(bf16_mixed=(0.9, 2.1)), GIB, "speed", "bf16-mixed", "by the device, since measured"),
    "faster although the rates are not": ("AVX2", with_times(bf16_mixed=(0.5, 0.6)), GIB, "speed", "bf16-mixed", "by measured times"),
    "two alike, of which one is in the device's format": (
        "A100",
        with_times(bf16_mixed=(0.52, 0.5), fp16_mixed=(0.5, 0.52)),
        GIB,
        "speed",
        "bf16-mixed",
        "no clear difference to fp16-mixed",
    ),
    "lean is as fast: what comes first": (
        "AVX2",
        with_times(bf16_mixed=(0.8, 0.82), bf16_lean=(0.79, 0.81)),
        GIB,
        "speed",
        "bf16-mixed",
        "no clear difference to bf16-lean",
    ),
    "one bad round of five is left out": (
        "AVX2",
        with_times(**dict.fromkeys(("fp32", "fp16_mixed", "bf16_lean", "fp16_lean"), (1.0,) * 5), bf16_mixed=(0.8, 0.8, 3.0, 0.8, 0.8)),
        GIB,
        "speed",
        "bf16-mixed",
        "by measured times",
    ),
    "it would not fit": ("A100", ALL, 150, "speed", "bf16-lean", "would take 100 B of 150 B"),
    "nothing fits": ("A100", ALL, 60, "speed", "bf16-lean", "would take 100 B of 60 B, and this takes 50 B, the least of what was tried and still"),
    "nothing fits, and of two the least": (
        "A100",
        [*ALL[:2], tried("bf16-lean", takes=50), tried("bf16-lean,weights=split24", takes=40)],
        60,
        "speed",
        "bf16-lean,weights=split24",
        "this takes 40 B",
    ),
    "nothing takes less": ("A100", ALL[:3], 60, "speed", "bf16-mixed", "take 100 B of 60 B, and nothing that was tried takes less"),
    "least memory": ("A100", ALL, GIB, "memory", "bf16-lean", "least memory"),
    "the format cannot be used": (
        "A100",
        [ALL[0], tried("bf16-mixed", problem="broken"), ALL[2], tried("bf16-lean", problem="broken")],
        GIB,
        "speed",
        "fp16-mixed",
        "nothing in bf16 can be used",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_was_measured_decides_where_it_is_clear(name: str) -> None:
    facts, some, memory, target, expected, word = CHOICES[name]
    found = choose(some, advise(DEVICES[facts][0]), memory, target)
    assert found.chosen.precision == expected, found.reasons
    assert word in found.reasons[0]


def test_no_claim_is_made_where_the_noise_is_larger() -> None:
    fp32 = tried("fp32", (1.0, 1.2, 1.1))
    clear, noisy = tried("bf16-mixed", (0.5, 0.6, 0.55)), tried("bf16-mixed", (0.9, 1.05, 1.2))
    assert gains(clear, fp32)[0] == "a forward and a backward pass takes 0.50 of fp32's time here (rounds 0.50 to 0.50)"
    assert gains(noisy, fp32)[0].startswith("no difference in time to fp32 could be measured here")


def test_where_nothing_can_be_used_every_cause_is_told() -> None:
    with pytest.raises(ConfigError, match="bf16-mixed: broken; fp16-mixed: gone"):
        choose([tried("bf16-mixed", problem="broken"), tried("fp16-mixed", problem="gone")], advise(DEVICES["A100"][0]), GIB)


def test_the_first_line_is_the_answer() -> None:
    assert str(Plan("bf16-mixed")).splitlines()[0] == "train in bf16-mixed; no module has to stay in fp32"
    assert str(Plan("fp32")).splitlines()[0] == "train in fp32"
