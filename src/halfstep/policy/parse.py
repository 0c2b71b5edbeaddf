"""Text to `Policy`, and the boolean flags of the well-known trainers to `Policy`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args, get_type_hints

from halfstep.errors import ConfigError, suggest
from halfstep.policy.policy import AUTO, KEYS, LARGEST_SCALE, PRESETS, Activations, LossScale, Policy, States, Weights
from halfstep.policy.products import canonical

FOREIGN = {  # spellings of other libraries, named in the error and not accepted: one spelling each
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "16-true": "fp16-true",
    "fp16": "fp16-mixed",
    "bf16": "bf16-mixed",
}


def parse(text: str | Policy, *, auto: bool = False) -> Policy:
    """Read a policy from its text form; a `Policy` is returned as it is.

    auto: whether "auto" is read too, which stands for a policy that is chosen later.
    Raises ConfigError for an unknown preset, key or value, with the nearest match.
    """
    if isinstance(text, Policy):
        return text if auto else chosen(text)
    if not isinstance(text, str):
        raise ConfigError(f"precision={text!r} is a {type(text).__name__}", "Give it a text such as 'bf16-mixed', or a Policy.")
    name, *settings = (part.strip() for part in text.split(","))
    if name in FOREIGN:
        raise ConfigError(f"unknown precision {name!r}", f"In halfstep's spelling it is {FOREIGN[name]!r}.")
    if name == str(AUTO) and settings:
        raise ConfigError(f"precision {text!r} leaves the choice to halfstep and makes part of it", "Write auto alone, or name a preset.")
    if name == str(AUTO):
        return AUTO if auto else chosen(AUTO)
    if name not in PRESETS:
        raise ConfigError(f"unknown precision {name!r}", suggest(name, PRESETS))
    policy, seen = PRESETS[name], set[str]()
    for setting in settings:
        key, sign, value = (part.strip() for part in setting.partition("="))
        if key not in KEYS:
            raise ConfigError(f"unknown key {key!r} in precision {text!r}", suggest(key, KEYS))
        if not sign or not value:
            raise ConfigError(f"key {key!r} in precision {text!r} has no value", f"Write {key}=VALUE.")
        if key in seen:
            raise ConfigError(f"key {key!r} stands twice in precision {text!r}", "Leave one of them out.")
        seen.add(key)
        policy = _with(policy, key, value)
    return check(policy)


def chosen(policy: Policy) -> Policy:
    """`policy` itself. Raises ConfigError for "auto": here a precision must be known."""
    if policy.is_auto:
        raise ConfigError(
            "precision 'auto' is chosen when the model is prepared, and here it must be known",
            "Accelerator and TrainingArguments take 'auto'; elsewhere name a preset, such as the one that halfstep doctor advises.",
        )
    return policy


def from_flags(
    *,
    precision: str | Policy | None = None,
    fp16: bool = False,
    bf16: bool = False,
    tf32: bool | None = None,
    mixed_precision: str | None = None,
) -> Policy:
    """The policy that `fp16=`, `bf16=`, `tf32=` (trainers) or `mixed_precision=` (accelerators) ask for, or "auto".

    `precision` is halfstep's own text and excludes the others, except that `tf32=` may repeat what it says.
    Raises ConfigError when two of them contradict each other.
    """
    if fp16 and bf16:
        raise ConfigError("fp16=True and bf16=True were both given, and a run has one 16-bit format", "Leave one of them out.")
    asked = [flag for flag, on in (("fp16=True", fp16), ("bf16=True", bf16)) if on]
    if mixed_precision is not None:
        asked.append(f"mixed_precision={mixed_precision!r}")
    if precision is None and len(asked) > 1 and not asked[0].startswith(f"{mixed_precision}="):
        raise ConfigError(f"{asked[0]} and {asked[1]} were both given, and a run has one precision", "Leave one of them out.")
    if precision is not None:
        if asked:
            raise ConfigError(f"precision={str(precision)!r} and {asked[0]} were both given", "Leave one of them out.")
        policy = parse(precision, auto=True)
        if tf32 and policy.is_auto:
            raise ConfigError("precision='auto' and tf32=True were both given", "Leave one of them out.")
        if tf32 is not None and tf32 != policy.tf32:
            twin = PRESETS["tf32" if tf32 else "fp32"] if policy.preset in ("fp32", "tf32") else replace(policy, tf32=tf32)
            state = "on" if policy.tf32 else "off"
            raise ConfigError(f"precision={str(precision)!r} has tf32 {state} and tf32={tf32}", f"Write precision='{twin}'.")
        return policy
    names = {"no": "fp32", "fp16": "fp16-mixed", "bf16": "bf16-mixed", None: "fp32"}
    if mixed_precision is not None and (not isinstance(mixed_precision, str) or mixed_precision not in names):
        raise ConfigError(f"unknown mixed_precision {mixed_precision!r}", suggest(str(mixed_precision), ("no", "fp16", "bf16")))
    policy = PRESETS["fp16-mixed" if fp16 else "bf16-mixed" if bf16 else names[mixed_precision]]
    if tf32 and policy.preset == "fp32":
        return PRESETS["tf32"]
    return replace(policy, tf32=bool(tf32))


def _with(policy: Policy, key: str, value: str) -> Policy:
    """A copy of `policy` with one setting read from text."""
    if key == "tf32":
        return replace(policy, tf32=_choice(key, value, ("on", "off")) == "on")
    if key == "weights":
        return replace(policy, weights=_choice(key, value, get_args(Weights)))  # type: ignore[arg-type]  # checked on this line
    if key == "states":
        return replace(policy, states=_choice(key, value, get_args(States)))  # type: ignore[arg-type]  # checked on this line
    if key == "activations":
        return replace(policy, activations=_choice(key, value, get_args(Activations)))  # type: ignore[arg-type]  # checked on this line
    if key == "output":
        allowed = get_args(get_type_hints(Policy)["output"])
        return replace(policy, output=_choice(key, value, allowed))  # type: ignore[arg-type]  # checked on this line
    if key == "ops":
        return replace(policy, ops=_choice(key, value, ("cuda", "device")))  # type: ignore[arg-type]  # checked on this line
    if key == "products":
        return replace(policy, products=canonical(value))
    if key in ("fp32", "fp32_ops", "half_ops"):
        listed = tuple(p.strip() for p in value.split("|") if p.strip())
        return replace(policy, **{key: listed})  # type: ignore[arg-type]  # these three are tuples of text
    if key == "scale":
        kind, _, init = value.partition(":")
        _choice(key, kind, ("none", "static", "dynamic"))
        if kind == "none" and init:
            raise ConfigError(f"scale={value} has no effect: none is not scaled by anything", "Write scale=none, or scale=static:" + init + ".")
        start = _power(key, init) if init else LossScale().init
        if kind == "static" and not init:
            raise ConfigError("scale=static needs the scale itself", "Write for example scale=static:1024.")
        return replace(policy, scale=replace(policy.scale, kind=kind, init=start))  # type: ignore[arg-type]  # checked above
    if key == "scale_window":
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"scale_window={value!r} is not a number of steps", "Write a whole number of 1 or more, for example 2000.")
        return replace(policy, scale=replace(policy.scale, window=int(value)))
    if key == "scale_strategy":
        strategy = _choice(key, value, ("follow", "stock"))
        return replace(policy, scale=replace(policy.scale, strategy=strategy))  # type: ignore[arg-type]  # checked on the line above
    if key == "scale_floor":
        return replace(policy, scale=replace(policy.scale, floor=_power(key, value)))
    return replace(policy, scale=replace(policy.scale, ceiling=_power(key, value)))


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is not known", suggest(value, allowed))
    return value


def _power(key: str, text: str) -> float:
    """A number that must be a power of two, so that multiplying by it loses no bit. `2^16` is read too."""
    base, hat, exponent = text.partition("^")
    try:
        number = float(base) ** int(exponent) if hat else float(text)
    except (ValueError, ArithmeticError):
        number = math.nan
    return power_of_two(key, number, text)


def power_of_two(key: str, number: float, text: str = "") -> float:
    """`number` if it is a power of two of at most 2^32, else a ConfigError that names the nearest one."""
    shown = text or f"{number:g}"
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{key}={shown} is not a loss scale", "Write a power of two, for example 65536 or 2^16.")
    if math.frexp(number)[0] != 0.5:
        near = min(round(math.log2(number)), round(math.log2(LARGEST_SCALE)))
        raise ConfigError(f"{key}={shown} is not a power of two, so scaling would round every gradient", f"Use {2.0**near:.17g} (2^{near}).")
    if number > LARGEST_SCALE:
        raise ConfigError(f"{key}={shown} is above 2^32, where a scaled loss may not fit fp32", "Use 2^32 or less.")
    return number


def check(policy: Policy) -> Policy:
    """Refuse settings of one policy that contradict each other or have no effect, whatever the device."""
    if chosen(policy).preset not in PRESETS:
        raise ConfigError(f"unknown precision {policy.preset!r}", suggest(policy.preset, PRESETS))
    base = PRESETS[policy.preset]
    for field in ("autocast", "whole"):
        ours, its = getattr(policy, field), getattr(base, field)
        if ours != its:
            raise ConfigError(
                f"this Policy is called {policy.preset} and has {field}={ours!r}, where {policy.preset} has {its!r}",
                f"Start from halfstep.policy.parse({policy.preset!r}), and change it with dataclasses.replace.",
            )
    _check_memory(policy, base)
    scale = policy.scale
    for key, number in (("scale", scale.init), ("scale_floor", scale.floor), ("scale_ceiling", scale.ceiling)):
        power_of_two(key, number)
    if policy.autocast == "fp32" and policy.fp32:
        raise ConfigError(f"fp32={'|'.join(policy.fp32)} has no effect under {policy.preset}: everything is fp32 already", "Leave it out.")
    _check_ops(policy)
    _check_products(policy)
    if policy.autocast != "fp16" and scale.kind != "none":
        raise ConfigError(
            f"scale={scale} has no use under {policy.preset}: only fp16 gradients underflow", f"Leave it out, or use {_twin(policy, 'fp16')}."
        )
    if policy.preset == "fp32" and policy.tf32:
        raise ConfigError("precision 'fp32,tf32=on' says two things", "Use 'tf32'.")
    if policy.preset == "tf32" and not policy.tf32:
        raise ConfigError("precision 'tf32,tf32=off' says two things", "Use 'fp32'.")
    plain = LossScale(scale.kind, scale.init)
    if scale.kind != "dynamic" and scale != plain:
        raise ConfigError(
            f"scale_floor, scale_ceiling, scale_window and scale_strategy have no effect with scale={scale}", "Leave them out, or use scale=dynamic."
        )
    if scale.kind == "dynamic" and not scale.floor <= scale.init <= scale.ceiling:
        raise ConfigError(
            f"the loss scale starts at {scale.init:g}, outside [{scale.floor:g}, {scale.ceiling:g}]",
            "Move scale_floor, scale_ceiling or the start in scale=dynamic:START.",
        )
    return policy


def _check_ops(policy: Policy) -> None:
    """Refuse op lists that contradict each other or have no effect. Whether the names are ops is known to autocast."""
    _choice("ops", policy.ops, ("cuda", "device"))
    both = sorted(set(policy.fp32_ops) & set(policy.half_ops))
    if both:
        raise ConfigError(f"{both[0]!r} stands in fp32_ops and in half_ops, and an op runs in one format", "Leave it out of one of them.")
    given = {"ops": policy.ops if policy.ops != "cuda" else "", "fp32_ops": "|".join(policy.fp32_ops), "half_ops": "|".join(policy.half_ops)}
    for key, text in given.items():
        if policy.autocast == "fp32" and text:
            raise ConfigError(f"{key}={text} has no effect under {policy.preset}: everything is fp32 already", "Leave it out.")
        if policy.whole and text:
            raise ConfigError(
                f"{key}={text} has no effect under {policy.preset}: there is no autocast, every op runs in the format of its inputs",
                f"Leave it out, or use {_twin(policy, policy.autocast, 'lean')}; fp32=PATTERN holds modules in fp32 here too.",
            )


def _check_products(policy: Policy) -> None:
    """Refuse a way to run products where there is no choice. That a GPU has none is known when the device is."""
    if canonical(policy.products) != policy.products:
        raise ConfigError(f"products={policy.products} is another spelling of {canonical(policy.products)}", "Write that.")
    if policy.products != "auto" and policy.autocast == "fp32":
        raise ConfigError(f"products={policy.products} has no effect under {policy.preset}: everything is fp32 already", "Leave it out.")


def _check_memory(policy: Policy, base: Policy) -> None:
    """Refuse ways to store weights and states that contradict the preset."""
    weights = _choice("weights", policy.weights, get_args(Weights))
    _choice("states", policy.states, get_args(States))
    _choice("activations", policy.activations, get_args(Activations))
    if policy.autocast == "fp32" and weights != "fp32":
        meant = "bf16-true" if weights == "plain" else "bf16-lean"
        raise ConfigError(
            f"weights={weights} has no effect under {policy.preset}: no weight is 16-bit there",
            f"Leave it out, or use '{replace(PRESETS[meant], weights=policy.weights, states=policy.states, tf32=policy.tf32)}'.",
        )
    if base.weights != "fp32" and weights == "fp32":
        mixed = replace(policy, preset=_twin(policy, policy.autocast, "mixed"), whole=False)
        raise ConfigError(f"weights=fp32 contradicts {policy.preset}, which holds weights in 16 bits", f"For fp32 weights use '{mixed}'.")
    if base.is_lean and weights == "plain":
        raise ConfigError(
            f"weights=plain contradicts {policy.preset}, which keeps small updates: with plain they round away",
            f"Use {policy.autocast}-true,weights=plain, or {policy.autocast}-mixed,weights=plain with a model loaded in {policy.autocast}.",
        )


def _twin(policy: Policy, form: str, family: str = "") -> str:
    """The name of the preset of the same family (or of `family`) in the 16-bit format `form`."""
    return f"{form}-{family or policy.preset.partition('-')[2] or 'mixed'}"
