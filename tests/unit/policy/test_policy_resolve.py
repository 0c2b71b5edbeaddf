"""The compatibility rules: each fires for one situation and not for its neighbour, on hand-made device records."""

from dataclasses import replace

import pytest

from halfstep.errors import ConfigError, PolicyError
from halfstep.hardware import Capabilities, diagnose
from halfstep.policy import PRESETS, RULES, ModelFacts, Policy, parse, resolve

CPU = Capabilities("cpu", "cpu", "AMD EPYC", "AVX2", ("fp32",), ("bf16", "fp16"), 2, 2**34, "/usr/bin/g++", (("torch", "2.13.0"),))
CPU_BF16 = replace(CPU, name="Xeon", level="AVX512+AMX", native=("fp32", "bf16"), emulated=("fp16",))
A100 = Capabilities("cuda:0", "cuda", "NVIDIA A100", "8.0", ("fp32", "tf32", "bf16", "fp16"), (), 108, 40 * 2**30, "", ())
T4 = replace(A100, name="Tesla T4", level="7.5", native=("fp32", "fp16"), emulated=("bf16",), cores=40, memory_bytes=15 * 2**30)
V100 = replace(T4, name="Tesla V100", level="7.0", cores=80)
P40 = replace(T4, name="Tesla P40", level="6.1", native=("fp32",), emulated=("bf16", "fp16"))

FP32_MODEL = ModelFacts((("a.weight", "fp32"), ("b.weight", "fp32")))
BF16_MODEL = ModelFacts((("a.weight", "fp32"), ("b.weight", "bf16"), ("c.weight", "fp16")))
FP64_MODEL = ModelFacts((("a.weight", "other"), ("b.weight", "fp32")))

# rule: (policy, device, model) that it fires for, one that it does not, words of the cause, words of the remedy
CASES = {
    "tf32-device": (("tf32", T4, FP32_MODEL), ("tf32", A100, FP32_MODEL), ["tf32", "cuda:0", "Tesla T4"], ["Ampere", "fp32"]),
    "weights-16-bit": (
        ("bf16-mixed", A100, BF16_MODEL),
        ("bf16-mixed", A100, FP32_MODEL),
        ["2 (the first is 'b.weight')", "3 trainable", "16-bit", "bf16-mixed"],
        ["torch.float32", "model.float()"],
    ),
    "weights-other": (("fp32", A100, FP64_MODEL), ("fp32", A100, FP32_MODEL), ["1 (the first is 'a.weight')", "2 trainable"], ["model.float()"]),
    "emulated-gpu": (("bf16-mixed", T4, FP32_MODEL), ("fp16-mixed", T4, FP32_MODEL), ["Tesla T4", "7.5", "bf16"], ["fp16-mixed", "faster"]),
    "emulated-cpu": (("bf16-mixed", CPU, FP32_MODEL), ("bf16-mixed", CPU_BF16, FP32_MODEL), ["this CPU", "bf16"], ["not faster"]),
}
BY_NAME = {rule.name: rule for rule in RULES}
Case = tuple[str, Capabilities, ModelFacts]


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.name for rule in RULES]
    assert len(BY_NAME) == len(RULES)


@pytest.mark.parametrize("name", list(CASES))
def test_a_rule_fires_for_its_case_and_not_for_the_neighbour(name: str) -> None:
    (text, device, model), (text_quiet, device_quiet, model_quiet), cause, remedy = CASES[name]
    rule = BY_NAME[name]
    resolve(parse(text_quiet), device_quiet, model_quiet, [rule])
    assert resolve(parse(text_quiet), device_quiet, model_quiet, [rule]).notes == ()
    if rule.refuse:
        with pytest.raises(PolicyError) as caught:
            resolve(parse(text), device, model)
        said_cause, said_remedy = caught.value.cause, caught.value.remedy
    else:
        (note,) = resolve(parse(text), device, model).notes
        said_cause = said_remedy = note
    for word in cause:
        assert word in said_cause
    for word in remedy:
        assert word in said_remedy


@pytest.mark.parametrize("text", ["tf32", "bf16-mixed,tf32=on", "fp16-mixed,tf32=on"])
@pytest.mark.parametrize("device", [CPU, CPU_BF16, T4, V100, P40, A100], ids=lambda d: d.name)
def test_tf32_runs_on_ampere_only(text: str, device: Capabilities) -> None:
    if device is A100:
        assert resolve(parse(text), device).notes == ()
        return
    with pytest.raises(PolicyError, match="Ampere"):
        resolve(parse(text), device)


NATIVE = {  # which presets run without a note and which with one
    "AMD EPYC": {"fp32": True, "bf16-mixed": False, "fp16-mixed": False},
    "Xeon": {"fp32": True, "bf16-mixed": True, "fp16-mixed": False},
    "NVIDIA A100": {"fp32": True, "bf16-mixed": True, "fp16-mixed": True},
    "Tesla T4": {"fp32": True, "bf16-mixed": False, "fp16-mixed": True},
    "Tesla V100": {"fp32": True, "bf16-mixed": False, "fp16-mixed": True},
    "Tesla P40": {"fp32": True, "bf16-mixed": False, "fp16-mixed": False},
}


@pytest.mark.parametrize("device", [CPU, CPU_BF16, A100, T4, V100, P40], ids=lambda d: d.name)
@pytest.mark.parametrize("preset", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_a_note_is_given_exactly_where_products_are_emulated(device: Capabilities, preset: str) -> None:
    resolution = resolve(PRESETS[preset], device, FP32_MODEL)
    assert (resolution.notes == ()) == NATIVE[device.name][preset]
    assert resolution.policy == PRESETS[preset]
    assert resolution.device == device
    text = str(resolution)
    assert f"precision {preset} on {device.device}" in text
    assert ("emulated" in text.splitlines()[0]) == (not NATIVE[device.name][preset])
    assert text.count("note:") == len(resolution.notes)


def test_where_nothing_is_native_the_advice_is_fp32() -> None:
    (note,) = resolve(PRESETS["fp16-mixed"], P40).notes
    assert "fp32 is faster here" in note


@pytest.mark.parametrize("device", [CPU, CPU_BF16, A100, T4, V100, P40], ids=lambda d: d.name)
def test_the_doctors_advice_runs_without_a_note(device: Capabilities) -> None:
    assert resolve(PRESETS[diagnose(device).advice], device, FP32_MODEL).notes == ()


def test_resolve_refuses_what_contradicts_itself_on_any_device() -> None:
    with pytest.raises(ConfigError, match="only fp16 gradients underflow"):
        resolve(replace(PRESETS["bf16-mixed"], scale=PRESETS["fp16-mixed"].scale), A100)


def test_resolve_refuses_a_policy_that_is_not_mixed_as_its_name_says() -> None:
    """Policy('bf16-mixed') alone has autocast fp32: it must not train in fp32 under the name bf16-mixed."""
    with pytest.raises(ConfigError, match="bf16-mixed"):
        resolve(Policy("bf16-mixed"), A100)


def test_model_facts_pick_by_format() -> None:
    assert BF16_MODEL.of("bf16", "fp16") == ("b.weight", "c.weight")
    assert BF16_MODEL.of("fp32") == ("a.weight",)
    assert ModelFacts().of("fp32") == ()


def test_refusals_come_before_notes() -> None:
    with pytest.raises(PolicyError, match="16-bit"):
        resolve(PRESETS["bf16-mixed"], CPU, BF16_MODEL)
