"""The compatibility rules: each fires for one situation and not for its neighbour, on hand-made device records."""

from dataclasses import replace

import pytest

from halfstep.errors import ConfigError, PolicyError
from halfstep.hardware import FAMILIES, Capabilities, diagnose
from halfstep.policy import AUTO, PRESETS, RULES, ModelFacts, Policy, parse, resolve

CPU = Capabilities("cpu", "cpu", "AMD EPYC", "AVX2", ("fp32",), ("bf16", "fp16"), 2, 2**34, "/usr/bin/g++", (("torch", "2.13.0"),))
CPU_BF16 = replace(CPU, name="Xeon", level="AVX512+AMX", native=("fp32", "bf16"), emulated=("fp16",))
A100 = Capabilities("cuda:0", "cuda", "NVIDIA A100", "8.0", ("fp32", "tf32", "bf16", "fp16"), (), 108, 40 * 2**30, "", ())
T4 = replace(A100, name="Tesla T4", level="7.5", native=("fp32", "fp16"), emulated=("bf16",), cores=40, memory_bytes=15 * 2**30)
V100 = replace(T4, name="Tesla V100", level="7.0", cores=80)
P40 = replace(T4, name="Tesla P40", level="6.1", native=("fp32",), emulated=("bf16", "fp16"))

FP32_MODEL = ModelFacts((("a.weight", "fp32"), ("b.weight", "fp32")))
BF16_MODEL = ModelFacts((("a.weight", "fp32"), ("b.weight", "bf16"), ("c.weight", "fp16")))
FP16_MODEL = ModelFacts((("a.weight", "fp32"), ("c.weight", "fp16")))
FP64_MODEL = ModelFacts((("a.weight", "other"), ("b.weight", "fp32")))

# rule: (policy, device, model) that it fires for, one that it does not, words of the cause, words of the remedy
CASES = {
    "tf32-device": (("tf32", T4, FP32_MODEL), ("tf32", A100, FP32_MODEL), ["tf32", "cuda:0", "Tesla T4"], ["Ampere", "fp32"]),
    "products-device": (
        ("bf16-mixed,products=native", A100, FP32_MODEL),
        ("bf16-mixed,products=native", CPU, FP32_MODEL),
        ["products=native", "A100"],
        ["CPUs"],
    ),
    "weights-16-bit": (
        ("tf32", A100, BF16_MODEL),
        ("bf16-mixed", A100, BF16_MODEL),
        ["2 (the first is 'b.weight')", "3 trainable", "16-bit", "tf32"],
        ["torch.float32", "model.float()", "bf16-mixed", "bf16-lean"],
    ),
    "plain-other-format": (
        ("bf16-mixed,weights=plain", A100, FP16_MODEL),
        ("fp16-mixed,weights=plain", A100, FP16_MODEL),
        ["1 (the first is 'c.weight')", "2 trainable", "loaded in fp16", "weights=plain", "bf16"],
        ["fp16-mixed,weights=plain", "load the model in bf16"],
    ),
    "plain-without-16-bit": (
        ("bf16-mixed,weights=plain", A100, FP32_MODEL),
        ("bf16-true,weights=plain", A100, FP32_MODEL),
        ["weights=plain", "no effect", "none of its 2 parameters"],
        ["Leave it out", "bf16-true,weights=plain"],
    ),
    "weights-other": (("fp32", A100, FP64_MODEL), ("fp32", A100, FP32_MODEL), ["1 (the first is 'a.weight')", "2 trainable"], ["model.float()"]),
    "emulated-gpu": (("bf16-mixed", T4, FP32_MODEL), ("fp16-mixed", T4, FP32_MODEL), ["Tesla T4", "7.5", "bf16"], ["fp16-mixed", "faster"]),
    "emulated-cpu": (("bf16-mixed", CPU, FP32_MODEL), ("bf16-mixed", CPU_BF16, FP32_MODEL), ["this CPU", "bf16"], ["not faster"]),
    "emulated-cpu-whole": (
        ("fp16-true,products=native", CPU_BF16, FP32_MODEL),
        ("bf16-true,products=native", CPU_BF16, FP32_MODEL),
        ["this CPU", "fp16", "torch's own kernels, as products run"],
        ["without products="],
    ),
    "loaded-16-bit": (
        ("fp16-mixed", A100, FP16_MODEL),
        ("fp16-mixed", A100, FP32_MODEL),
        ["1 of the 2 trainable", "loaded in fp16", "stored as split", "go up to fp32"],
        ["loaded in fp32", "weights=plain"],
    ),
    "loaded-other-16-bit": (
        ("bf16-lean", A100, FP16_MODEL),
        ("fp16-lean", A100, FP32_MODEL),
        ["1 of the 2 trainable", "loaded in fp16", "go up to fp32", "from there to bf16"],
        ["loaded in fp32", "fp16-mixed"],
    ),
    "plain": (("bf16-true,weights=plain", A100, FP32_MODEL), ("bf16-true", A100, FP32_MODEL), ["nothing beside bf16", "lost"], ["weights=split"]),
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


@pytest.mark.parametrize(
    ("text", "measured", "how"),
    [
        ("bf16-mixed", ("convolution", "attention"), "emulated:convolution|attention"),
        ("bf16-mixed", (), "native"),
        ("bf16-mixed", FAMILIES, "emulated"),
        ("bf16-mixed,products=native", FAMILIES, "native"),
        ("bf16-lean,products=emulated:matmul", (), "emulated:matmul"),
    ],
)
def test_on_a_cpu_products_run_as_the_policy_says_else_as_measured(text: str, measured: tuple[str, ...], how: str) -> None:
    for device in (CPU, CPU_BF16):
        resolution = resolve(parse(text), device, FP32_MODEL, emulated=measured)
        assert f"bf16 products ({how})" in str(resolution)
        assert len(resolution.notes) == (how != "native")
        assert all(family in str(resolution.notes) for family in resolution.emulated if len(resolution.emulated) < 3)


def test_auto_is_resolved_later() -> None:
    resolution = resolve(AUTO, CPU)
    assert resolution.policy is AUTO
    assert str(resolution).startswith("precision auto on cpu")


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
    with pytest.raises(PolicyError, match="neither fp32 nor 16-bit"):
        resolve(PRESETS["bf16-mixed"], CPU, FP64_MODEL)


LINES = {  # precision, model -> storage of the 16-bit weights, the line about weights and states
    ("fp32", FP32_MODEL): ("fp32", "fp32 weights, loss scale none"),
    ("fp32,states=int8", FP32_MODEL): ("fp32", "fp32 weights, int8 optimizer states, loss scale none"),
    ("bf16-mixed", FP32_MODEL): ("fp32", "fp32 weights, loss scale none"),
    ("bf16-mixed", BF16_MODEL): ("split", "castable bf16 weights (split), loss scale none"),
    ("bf16-mixed", FP16_MODEL): ("fp32", "fp32 weights, loss scale none"),
    ("bf16-mixed,weights=kahan", BF16_MODEL): ("kahan", "castable bf16 weights (kahan), loss scale none"),
    ("fp16-mixed,weights=plain", FP16_MODEL): ("plain", "fp16 weights as loaded (nothing beside them), loss scale dynamic:65536"),
    ("bf16-lean", FP32_MODEL): ("split", "castable bf16 weights (split), int8 optimizer states, loss scale none"),
    ("bf16-lean,weights=split24", FP16_MODEL): ("split24", "castable bf16 weights (split24), int8 optimizer states, loss scale none"),
    ("bf16-true", FP32_MODEL): ("kahan", "bf16 weights (kahan), bf16 optimizer states, loss scale none"),
    ("bf16-true", FP16_MODEL): ("kahan", "bf16 weights (kahan), bf16 optimizer states, loss scale none"),
    ("bf16-true,weights=plain,states=fp32", BF16_MODEL): ("plain", "bf16 weights (nothing beside them), loss scale none"),
    ("fp16-true", FP32_MODEL): ("split", "fp16 weights (split), loss scale dynamic:65536"),
}


@pytest.mark.parametrize(("text", "model"), list(LINES), ids=[f"{text}-{model.trainable[-1][1]}" for text, model in LINES])
def test_the_line_says_how_weights_and_states_are_kept(text: str, model: ModelFacts) -> None:
    storage, words = LINES[text, model]
    resolution = resolve(parse(text), A100, model)
    assert resolution.weights == storage
    products = "" if resolution.policy.autocast == "fp32" else f"{resolution.policy.autocast} products (native), "
    assert str(resolution).splitlines()[0] == f"precision {text} on cuda:0, {products}{words}"


def test_a_model_loaded_in_both_16_bit_formats_is_told_about_both() -> None:
    notes = resolve(PRESETS["bf16-mixed"], A100, BF16_MODEL).notes
    assert [note.split(":")[0] for note in notes] == [
        "1 of the 3 trainable parameters were loaded in bf16",
        "1 of the 3 trainable parameters were loaded in fp16, and products run in bf16",
    ]


@pytest.mark.parametrize("preset", ["bf16-true", "fp16-true"])
@pytest.mark.parametrize("model", [FP32_MODEL, BF16_MODEL, FP16_MODEL])
def test_a_whole_16_bit_model_may_be_loaded_in_any_format(preset: str, model: ModelFacts) -> None:
    assert resolve(PRESETS[preset], A100, model).notes == ()


def test_plain_weights_are_resolved_without_a_model_too() -> None:
    """An accelerator resolves its policy before it has seen a model."""
    (note,) = resolve(parse("bf16-mixed,weights=plain"), A100).notes
    assert note.startswith("weights=plain: there is nothing beside bf16 weights")


@pytest.mark.parametrize("family", ["mixed", "lean", "true"])
def test_where_bf16_is_slow_the_advice_stays_in_the_family(family: str) -> None:
    (note,) = resolve(PRESETS[f"bf16-{family}"], T4, FP32_MODEL).notes
    assert note.endswith(f"fp16-{family} is faster here.")
