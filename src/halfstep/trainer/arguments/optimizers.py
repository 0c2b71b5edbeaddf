"""Which optimizers have a name of their own, which settings each of them takes, and what to use instead of those that are not carried."""

from __future__ import annotations

from typing import Any

from halfstep.errors import ConfigError, suggest

ADAMW = ("adam_beta1", "adam_beta2", "adam_epsilon")
TAKES: dict[str, tuple[str, ...]] = {
    "auto": ADAMW,
    "adamw_torch_fused": ADAMW,
    "adamw_torch": ADAMW,
    "adamw_halfstep": ADAMW,
    "lion": ("adam_beta1", "adam_beta2"),
    "sgd": (),
    "adafactor": (),
    "rmsprop": (),
    "adagrad": (),
}
"""optim: which of AdamW's settings it takes too."""

DEFAULTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
IN_OPTIM_ARGS = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}
BY_FIELD = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "the model"}

_INT8 = "For moments in 8 bits use optim='{0}' and states='int8': any optimizer's states are compressed that way."
_CLASS = "Give the class itself or its name: optim='package.module.Class', with optim_args=."
_LOW = "For less memory use precision='bf16-lean' (8 instead of 16 bytes per weight); other optimizers: optim='package.module.Class'."
INSTEAD = {
    "adamw_hf": "Use optim='adamw_torch'.",
    "adamw_apex_fused": "Use optim='adamw_torch_fused'.",
    "adamw_torch_npu_fused": "Use optim='adamw_torch_fused'.",
    "adamw_torch_xla": "Use optim='adamw_torch'.",
    "adamw_anyprecision": "Use optim='adamw_halfstep' and precision='bf16-true': 16-bit weights with a Kahan compensation.",
    "lion_32bit": "Use optim='lion'.",
    "rmsprop_bnb": "Use optim='rmsprop'.",
    "rmsprop_bnb_32bit": "Use optim='rmsprop'.",
    "paged_adamw": "Use optim='adamw_halfstep'; precision='bf16-lean' takes half the memory without pages.",
    "paged_adamw_32bit": "Use optim='adamw_halfstep'; precision='bf16-lean' takes half the memory without pages.",
    "paged_lion_32bit": "Use optim='lion'; precision='bf16-lean' takes less memory without pages.",
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "paged_adamw_8bit"), _INT8.format("adamw_halfstep")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), _INT8.format("lion")),
    "rmsprop_bnb_8bit": _INT8.format("rmsprop"),
    **dict.fromkeys(
        (
            "galore_adamw",
            "galore_adamw_8bit",
            "galore_adafactor",
            "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise",
            "galore_adafactor_layerwise",
            "apollo_adamw",
            "apollo_adamw_layerwise",
            "lomo",
            "adalomo",
        ),
        _LOW,
    ),
    **dict.fromkeys(
        (
            "ademamix",
            "ademamix_8bit",
            "paged_ademamix_32bit",
            "paged_ademamix_8bit",
            "grokadamw",
            "stable_adamw",
            "flash_adamw",
            "schedule_free_radam",
            "schedule_free_adamw",
            "schedule_free_sgd",
        ),
        _CLASS,
    ),
}


def check_optimizer(args: Any) -> None:
    """Refuse an optimizer that is not known, and settings that it would not look at."""
    kind, extra = args.optim, args.optim_args or {}
    if kind in INSTEAD:
        raise ConfigError(f"optim={kind!r} is not carried by halfstep", INSTEAD[kind])
    if kind not in TAKES and not _is_target(kind):
        raise ConfigError(f"optim={kind!r} is not known", f"{suggest(kind, TAKES)} Any class: optim='package.module.Class'.")
    taken = TAKES.get(kind, ())
    for name, default in DEFAULTS.items():
        if getattr(args, name) != default and name not in taken:
            key = IN_OPTIM_ARGS[name]
            raise ConfigError(
                f"{name}={getattr(args, name)} has no effect with optim={kind!r}", f"If it takes {key}, give optim_args={{{key!r}: ...}}."
            )
    for key in extra:
        field = BY_FIELD.get(key) or next((n for n in taken if IN_OPTIM_ARGS[n] == key), None)
        if field is not None:
            raise ConfigError(f"optim_args names {key!r}, which {field} gives", f"Leave it out of optim_args, and set {field}.")


def _is_target(name: str) -> bool:
    """Whether a name is that of a class in a module."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)
