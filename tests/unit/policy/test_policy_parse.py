"""Policies and their text form: round trips, the power-of-two rule, and what a refusal says."""

import dataclasses
import math
import re
from dataclasses import asdict
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigError
from halfstep.policy import DTYPES, LARGEST_SCALE, PRESETS, LossScale, Policy, bytes_per_parameter, parse, power_of_two, preset_table
from halfstep.policy.parse import FOREIGN, check
from halfstep.policy.policy import KEYS, States, Weights

quick = settings(deadline=None, max_examples=100, derandomize=True, database=None)
names = st.from_regex(r"[a-z_*?][a-z0-9_.*?]{0,8}", fullmatch=True)
patterns = st.lists(names, max_size=3, unique=True).map(tuple)
exponents = st.integers(-8, 32)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Every policy that `check` lets through: all combinations of preset and settings."""
    preset = draw(st.sampled_from(list(PRESETS)))
    base = PRESETS[preset]
    base = dataclasses.replace(base, output=draw(st.sampled_from(["fp32", "compute"])), states=draw(st.sampled_from(get_args(States))))
    if base.autocast == "fp32":
        return base
    scale = base.scale
    if base.autocast == "fp16":
        kind = draw(st.sampled_from(["none", "static", "dynamic"]))
        if kind == "dynamic":
            floor, start, ceiling = sorted(draw(st.lists(exponents, min_size=3, max_size=3)))
            scale = LossScale("dynamic", 2.0**start, 2.0**floor, 2.0**ceiling, draw(st.integers(1, 10_000)))
        else:
            scale = LossScale(kind, 2.0 ** draw(exponents)) if kind == "static" else LossScale("none")
    weights = [w for w in get_args(Weights) if (w != "fp32" or base.weights == "fp32") and (w != "plain" or not base.is_lean)]
    if not base.whole:
        base = dataclasses.replace(base, products=draw(st.sampled_from(["auto", "native", "emulated", "emulated:matmul|attention"])))
    return dataclasses.replace(base, tf32=draw(st.booleans()), scale=scale, fp32=draw(patterns), weights=draw(st.sampled_from(weights)))


def read(text: str) -> Policy | ConfigError:
    """The policy, or the refusal."""
    try:
        return parse(text)
    except ConfigError as error:
        return error


VALUES = {
    "weights": ["fp32", "split", "split24", "kahan", "stochastic", "plain", "half"],
    "states": ["fp32", "bf16", "int8", "fp16"],
    "tf32": ["on", "off"],
    "scale": ["none", "none:1024", "static:1024", "static:2^20", "dynamic", "dynamic:65536", "dynamic:2^10", "static"],
    "scale_floor": ["1", "2^4", "0.5", "2^33"],
    "scale_ceiling": ["2^20", "4294967296", "8"],
    "scale_window": ["1", "500", "2000", "0"],
    "scale_strategy": ["follow", "stock", "other"],
    "output": ["fp32", "compute"],
    "fp32": ["lm_head", "lm_head|*.norm*", " a | b "],
    "ops": ["cuda", "device", "gpu"],
    "fp32_ops": ["gelu", "gelu|mean", " exp | log "],
    "half_ops": ["softmax", "layer_norm|exp"],
    "activations": ["full", "int8", "fp8", "int4"],
    "products": ["auto", "native", "emulated", "emulated:convolution", "emulated: attention|convolution", "emulated:rnn", "native:matmul"],
}


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_print_as_their_name_and_read_back(preset: str) -> None:
    assert str(PRESETS[preset]) == preset
    assert parse(preset) == PRESETS[preset]
    assert parse(f"  {preset} ") == PRESETS[preset]


@quick
@given(policies())
def test_every_policy_reads_back_from_its_print(policy: Policy) -> None:
    check(policy)
    assert parse(str(policy)) == policy
    assert str(parse(str(policy))) == str(policy)


def test_the_values_cover_every_key() -> None:
    assert set(VALUES) == set(KEYS)


@quick
@given(st.sampled_from(list(PRESETS)), st.permutations(list(KEYS)), st.integers(0, len(KEYS)), st.data())
def test_any_text_is_refused_or_reads_back_from_its_print(preset: str, order: list[str], count: int, data: st.DataObject) -> None:
    """Every combination of keys, in every order: what is accepted loses nothing when it is printed."""
    text = ",".join([preset, *(f"{key}={data.draw(st.sampled_from(VALUES[key]))}" for key in order[:count])])
    answer = read(text)
    if isinstance(answer, ConfigError):
        assert answer.cause
        assert answer.remedy
    else:
        assert parse(str(answer)) == answer


@pytest.mark.parametrize("key", ["tf32", "scale_window", "output", "fp32", "weights", "states"])
def test_one_setting_changes_one_field(key: str) -> None:
    text = {"tf32": "on", "scale_window": "7", "output": "compute", "fp32": "head", "weights": "kahan", "states": "bf16"}[key]
    field = "scale" if key.startswith("scale") else key
    before, after = asdict(PRESETS["fp16-mixed"]), asdict(parse(f"fp16-mixed,{key}={text}"))
    assert [name for name in before if before[name] != after[name]] == [field]


def test_settings_are_read_to_these_values() -> None:
    policy = parse(
        "fp16-mixed, scale=dynamic:2^12, scale_floor=4, scale_ceiling=2^24, scale_window=9, output=compute, fp32= lm_head |*.norm*, tf32=on"
    )
    assert policy.scale == LossScale("dynamic", 4096.0, 4.0, 2.0**24, 9)
    assert policy.fp32 == ("lm_head", "*.norm*")
    assert policy.output == "compute"
    assert policy.tf32
    assert policy.dtype == torch.float16
    assert parse(policy) is policy


@pytest.mark.parametrize("name", list(DTYPES))
def test_dtype_follows_autocast(name: str) -> None:
    policy = Policy(autocast=name)
    assert policy.dtype == getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name])
    assert policy.is_mixed == (name != "fp32")


# preset: mixed (autocast), lean (castable weights in 16 bits), whole, dtype of the 16-bit weights
KINDS = {
    "fp32": (False, False, False, torch.float32),
    "tf32": (False, False, False, torch.float32),
    "bf16-mixed": (True, False, False, torch.float32),
    "fp16-mixed": (True, False, False, torch.float32),
    "bf16-lean": (True, True, False, torch.bfloat16),
    "fp16-lean": (True, True, False, torch.float16),
    "bf16-true": (False, False, True, torch.bfloat16),
    "fp16-true": (False, False, True, torch.float16),
    "bf16-mixed,weights=split24": (True, True, False, torch.bfloat16),
    "fp16-mixed,weights=plain": (True, False, False, torch.float16),
    "bf16-lean,weights=stochastic": (True, True, False, torch.bfloat16),
    "bf16-true,weights=plain,fp32=*norm*": (False, False, True, torch.bfloat16),
}


@pytest.mark.parametrize(("text", "kind"), KINDS.items(), ids=list(KINDS))
def test_what_a_policy_does_with_weights(text: str, kind: tuple[bool, bool, bool, torch.dtype]) -> None:
    p = parse(text)
    assert (p.is_mixed, p.is_lean, p.whole, p.weight_dtype) == kind
    assert p.dtype == torch.float32 if p.autocast == "fp32" else p.dtype in (torch.bfloat16, torch.float16)


def test_every_preset_is_of_a_known_kind() -> None:
    assert set(PRESETS) <= set(KINDS)
    assert {(p.weights, p.states) for p in PRESETS.values() if p.is_lean} == {("split", "int8")}


def test_a_policy_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["fp32"].tf32 = True  # type: ignore[misc]


FLOATS = [
    *(2.0**k for k in range(-20, 41)),
    *(2.0**k * 1.5 for k in range(-3, 34)),
    *(2.0**k + 1 for k in range(1, 34)),
    *(10.0**k for k in range(-3, 20)),
    *(0.3, 0.7, 2.9, 3.0, 5.0, 65535.0, 65537.0, 1e38, 1e300, 0.0, -0.0, -1.0, -2.0, math.inf, -math.inf, math.nan),
]


def is_power_of_two(number: float) -> bool:
    return math.isfinite(number) and number > 0 and math.frexp(number)[0] == 0.5


@pytest.mark.parametrize("number", FLOATS)
def test_a_scale_is_a_power_of_two_up_to_2_32(number: float) -> None:
    if is_power_of_two(number) and number <= LARGEST_SCALE:
        assert power_of_two("scale", number) == number
        assert parse(f"fp16-mixed,scale=static:{number!r}").scale.init == number
        return
    with pytest.raises(ConfigError, match="scale=") as caught:
        parse(f"fp16-mixed,scale=static:{number!r}")
    assert caught.value.remedy


def test_the_scale_that_a_refusal_advises_is_accepted_and_near() -> None:
    """Law: whoever follows the remedy is not refused again."""
    misleading = []
    for number in FLOATS:
        if is_power_of_two(number) or not 0 < number < 1e308:
            continue
        with pytest.raises(ConfigError) as caught:
            power_of_two("scale", number)
        advised = re.search(r"\d+\^-?\d+|\d+(?:\.\d+)?(?:e[+-]?\d+)?", caught.value.remedy)
        assert advised, caught.value.remedy
        try:
            near = parse(f"fp16-mixed,scale=static:{advised.group()}").scale.init
        except ConfigError:
            misleading.append(f"{number!r}: {caught.value.remedy}")
            continue
        assert near / 2 < min(number, LARGEST_SCALE) < near * 2
    assert not misleading


@pytest.mark.parametrize("text", ["abc", "2^", "^2", "2^1.5", "1024x", "0^-1", "-2^3", "2^99999", "1e400", "1.7e308", "nan"])
@pytest.mark.parametrize("key", ["scale=static:", "scale=dynamic:", "scale_floor=", "scale_ceiling="])
def test_what_is_no_number_is_no_scale(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"fp16-mixed,{key}{text}")
    assert key.partition("=")[0] in caught.value.cause
    assert text in caught.value.cause
    assert caught.value.remedy


def test_a_dynamic_scale_without_a_start_has_the_usual_one() -> None:
    assert parse("fp16-mixed,scale=dynamic:") == parse("fp16-mixed,scale=dynamic") == PRESETS["fp16-mixed"]


REFUSED = [  # text, words of the cause, words of the remedy
    ("bf16-mixd", ["unknown precision", "'bf16-mixd'"], ["Did you mean 'bf16-mixed'?"]),
    ("fp16-mixed,scal=static:4", ["unknown key", "'scal'"], ["Did you mean 'scale'?"]),
    ("fp16-mixed,scale_flor=4", ["unknown key", "'scale_flor'"], ["Did you mean 'scale_floor'?"]),
    ("bf16-mixed,output=computed", ["output", "'computed'"], ["Did you mean 'compute'?"]),
    ("fp16-mixed,scale=dynamik", ["scale", "'dynamik'"], ["Did you mean 'dynamic'?"]),
    ("bf16-mixed,tf32=yes", ["tf32", "'yes'"], ["off", "on"]),
    ("zzz", ["unknown precision", "'zzz'"], ["Known:", *PRESETS]),
    ("", ["unknown precision"], ["Known:", *PRESETS]),
    ("bf16-mixed,", ["unknown key", "''"], ["Known:", *KEYS]),
    ("bf16-mixed,zzz=1", ["unknown key", "'zzz'"], ["Known:", *KEYS]),
    ("bf16-mixed,output", ["'output'", "no value"], ["output=VALUE"]),
    ("bf16-mixed,fp32=", ["'fp32'", "no value"], ["fp32=VALUE"]),
    ("bf16-mixed,tf32=on,tf32=on", ["'tf32'", "twice"], ["Leave one"]),
    ("fp16-mixed,scale=static", ["static"], ["scale=static:1024"]),
    ("fp16-mixed,scale_window=0", ["scale_window"], ["1 or more"]),
    ("fp16-mixed,scale_window=-3", ["scale_window"], ["1 or more"]),
    ("fp16-mixed,scale_window=2.5", ["scale_window"], ["whole number"]),
    ("bf16-mixed,scale=dynamic", ["scale=dynamic", "bf16-mixed"], ["fp16-mixed"]),
    ("fp32,scale=static:8", ["scale=static:8", "fp32"], ["fp16-mixed"]),
    ("fp32,fp32=lm_head", ["fp32=lm_head", "no effect"], ["Leave it out"]),
    ("tf32,fp32=lm_head", ["fp32=lm_head", "no effect", "tf32"], ["Leave it out"]),
    ("fp32,tf32=on", ["fp32,tf32=on"], ["'tf32'"]),
    ("tf32,tf32=off", ["tf32,tf32=off"], ["'fp32'"]),
    ("fp16-mixed,scale=static:8,scale_window=5", ["scale_window", "no effect", "static:8"], ["scale=dynamic"]),
    ("fp16-mixed,scale=none,scale_floor=2", ["scale_floor", "no effect", "none"], ["scale=dynamic"]),
    ("fp16-mixed,scale=none:1024", ["scale", "none"], ["scale=none"]),
    ("fp16-mixed,scale=dynamic:4,scale_floor=8", ["starts at 4", "[8,"], ["scale_floor"]),
    ("fp16-mixed,scale_ceiling=8", ["65536", "8]"], ["scale_ceiling"]),
    ("fp16-mixed,scale=static:2^33", ["2^33", "above 2^32"], ["2^32 or less"]),
    ("bf16-lean,weights=splt", ["weights", "'splt'"], ["Did you mean 'split'?"]),
    ("bf16-lean,states=fp16", ["states", "'fp16'"], ["Did you mean 'bf16'?"]),
    ("fp32,weights=split", ["weights=split", "no effect under fp32"], ["'bf16-lean,states=fp32'"]),
    ("tf32,weights=kahan,states=int8", ["weights=kahan", "no effect under tf32"], ["'bf16-lean,weights=kahan,tf32=on'"]),
    ("fp32,weights=plain", ["weights=plain", "no effect under fp32"], ["'bf16-true,weights=plain,states=fp32'"]),
    ("bf16-lean,weights=fp32", ["weights=fp32", "bf16-lean"], ["'bf16-mixed,states=int8'"]),
    ("fp16-lean,weights=fp32,fp32=head", ["weights=fp32", "fp16-lean"], ["'fp16-mixed,states=int8,fp32=head'"]),
    ("bf16-true,weights=fp32", ["weights=fp32", "bf16-true"], ["'bf16-mixed,states=bf16'"]),
    ("fp16-true,weights=fp32,states=int8", ["weights=fp32", "fp16-true"], ["'fp16-mixed,states=int8'"]),
    ("bf16-lean,weights=plain", ["weights=plain", "bf16-lean"], ["bf16-true,weights=plain", "bf16-mixed,weights=plain"]),
    ("bf16-lean,scale=static:8", ["scale=static:8", "bf16-lean"], ["fp16-lean"]),
    ("bf16-true,scale=dynamic", ["scale=dynamic", "bf16-true"], ["fp16-true"]),
    ("bf16-true,ops=device", ["ops=device", "no autocast"], ["bf16-lean", "fp32=PATTERN"]),
    ("fp16-true,half_ops=softmax", ["half_ops=softmax", "fp16-true"], ["fp16-lean"]),
    *((spelling, ["unknown precision", repr(spelling)], [repr(ours)]) for spelling, ours in FOREIGN.items()),
]


@pytest.mark.parametrize(("text", "cause", "remedy"), REFUSED, ids=[text or "empty" for text, _, _ in REFUSED])
def test_refusals_name_cause_and_remedy(text: str, cause: list[str], remedy: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    error = caught.value
    for word in cause:
        assert word in error.cause
    for word in remedy:
        assert word in error.remedy
    assert error.cause in str(error)
    assert error.remedy in str(error)


ADVISED = [text for text, _, _ in REFUSED if "weights=" in text and text not in ("bf16-lean,weights=splt", "bf16-lean,weights=plain")]


@pytest.mark.parametrize("text", ADVISED)
def test_the_precision_that_a_refused_weights_setting_is_answered_with_is_accepted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    (advised,) = re.findall(r"'([^']+)'", caught.value.remedy)
    assert str(parse(advised)) == advised
    kept = {part for part in text.split(",") if part.startswith(("fp32=", "states="))}
    assert all(getattr(parse(advised), key) in ((value,), value) for key, _, value in (part.partition("=") for part in kept))


@pytest.mark.parametrize("foreign", ["no", "32", "32-true", "16", "16-mixed", "16-true", "fp16", "bf16"])
def test_foreign_spellings_are_answered_with_a_preset_that_works(foreign: str) -> None:
    assert FOREIGN[foreign] in PRESETS
    assert foreign not in PRESETS


MALFORMED = [  # values of Policy that no text gives
    (Policy("bogus"), "'bogus'"),
    (Policy("bf16-mixd"), "bf16-mixed"),
    (Policy("fp16-mixed", autocast="fp16", scale=LossScale("dynamic", 3.0)), "power of two"),
    (Policy("fp16-mixed", autocast="fp16", scale=LossScale("dynamic", floor=3.0)), "power of two"),
    (Policy("fp16-mixed", autocast="fp16", scale=LossScale("dynamic", ceiling=2.0**40)), "2^32"),
    (Policy("bf16-mixed"), "bf16-mixed"),
    (Policy("fp16-mixed"), "fp16-mixed"),
    (Policy("fp32", autocast="bf16"), "fp32"),
    (Policy("bf16-mixed", autocast="bf16", whole=True), "whole=True"),
    (Policy("bf16-true", autocast="bf16", weights="kahan"), "whole=False"),
    (Policy("bf16-lean", autocast="bf16", states="int8"), "weights=fp32"),
    (Policy("bf16-lean", autocast="bf16", weights="half"), "'half'"),  # type: ignore[arg-type]
    (Policy("fp32", states="int4"), "'int4'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("policy", "word"), MALFORMED, ids=[f"{p.preset}-{p.autocast}-{p.scale}" for p, _ in MALFORMED])
def test_a_policy_that_is_not_what_its_preset_says_is_refused(policy: Policy, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(policy)
    assert word in str(caught.value)
    assert caught.value.remedy


def test_the_table_shows_every_preset_as_it_is() -> None:
    header, line, *rows = preset_table().splitlines()
    columns = [c.strip() for c in header.strip("|").split("|")]
    assert set(line) == {"|", "-"}
    assert [row.split("|")[1].strip() for row in rows] == [f"`{name}`" for name in PRESETS]
    for row, policy in zip(rows, PRESETS.values(), strict=True):
        cells = dict(zip(columns, (c.strip() for c in row.strip("|").split("|")), strict=True))
        assert cells["products"] == policy.autocast
        assert cells["tf32"] == ("on" if policy.tf32 else "off")
        assert cells["loss scale"].startswith(policy.scale.kind)
        assert (f"{policy.scale.init:.0f}" in cells["loss scale"]) == (policy.scale.kind == "dynamic")
        assert (cells["weights"], cells["states"]) == (policy.weights, policy.states)
        numbers = [float(n) for n in cells["bytes per weight, AdamW"].split(" / ")]
        footprint = bytes_per_parameter(policy)
        assert (numbers[0], numbers[-1]) == pytest.approx((footprint.castable.total, footprint.other.total), abs=0.005)
        assert cells["in words"]
    assert preset_table() == preset_table()
