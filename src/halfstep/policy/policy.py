"""A precision policy as a frozen value, the presets, and their text form.

Text form: a preset, then any `key=value` that differs from it:

    bf16-mixed
    fp16-mixed,scale=static:1024
    fp16-mixed,scale=dynamic:65536,scale_window=500,fp32=lm_head|*.norm*

`str(policy)` prints it and `halfstep.policy.parse` reads it back to an equal value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_SCALE = 2.0**32  # a loss of 2^60 still fits fp32 after scaling


@dataclass(frozen=True)
class LossScale:
    """How a loss is scaled before the backward pass so that small fp16 gradients do not become 0.

    `none`: not at all. `static`: always by `init`. `dynamic`: in [`floor`, `ceiling`], by one of two strategies. `follow`
    calibrates the scale in the first backward pass, `init` being where it begins to look, and then follows the size of the
    gradients. `stock` is torch's rule: starts at `init`, halves after an overflow, doubles after `window` good steps.
    All four numbers are powers of two, so that scaling and unscaling are exact. Source: Micikevicius et al., Mixed
    Precision Training, arXiv:1710.03740.
    """

    kind: Literal["none", "static", "dynamic"] = "none"
    init: float = 65536.0
    floor: float = 1.0
    ceiling: float = LARGEST_SCALE
    window: int = 2000
    strategy: Literal["follow", "stock"] = "follow"

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}:{self.init:.17g}"


@dataclass(frozen=True)
class Policy:
    """Every choice of number format for one training run.

    preset: the name it started from.
    autocast: format of matrix products, convolutions and attention in the forward pass: "bf16", "fp16", or "fp32" for none.
    tf32: fp32 matrix products on the GPU may round their operands to tf32 (10 bits of mantissa).
    scale: loss scaling.
    output: "fp32" casts 16-bit outputs of a prepared model up, so that a loss outside it runs in fp32; "compute" leaves them.
    fp32: module name patterns (`lm_head`, `*.norm*`) held in fp32 although autocast is on.
    ops: which ops autocast runs in fp32: "cuda", torch's CUDA list on every device, or "device", torch's list of the device in use.
    fp32_ops, half_ops: names of ops (`softmax`, `layer_norm`) that autocast runs in fp32, or in 16 bits, whatever the list says.

    Weights, gradients and optimizer states are fp32 under all of these: 16 bytes per parameter with AdamW.
    """

    preset: str = "fp32"
    autocast: Literal["fp32", "bf16", "fp16"] = "fp32"
    tf32: bool = False
    scale: LossScale = LossScale()
    output: Literal["fp32", "compute"] = "fp32"
    fp32: tuple[str, ...] = ()
    ops: Literal["cuda", "device"] = "cuda"
    fp32_ops: tuple[str, ...] = ()
    half_ops: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of `autocast`."""
        return DTYPES[self.autocast]

    @property
    def is_mixed(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.autocast != "fp32"

    def __str__(self) -> str:
        base = PRESETS[self.preset]
        return ",".join([self.preset, *(f"{key}={value}" for key, value in as_text(self).items() if value != as_text(base)[key])])


PRESETS = {
    p.preset: p
    for p in (
        Policy("fp32"),
        Policy("tf32", tf32=True),
        Policy("bf16-mixed", autocast="bf16"),
        Policy("fp16-mixed", autocast="fp16", scale=LossScale("dynamic")),
    )
}

SUMMARY = {
    "fp32": "everything in fp32, tf32 off",
    "tf32": "fp32, matrix products on the GPU in tf32",
    "bf16-mixed": "products in bf16: fp32's range, 8 bits of precision",
    "fp16-mixed": "products in fp16: 11 bits of precision, range up to 65504, so the loss is scaled",
}


def as_text(policy: Policy) -> dict[str, str]:
    """The settings of a policy besides its preset, each as the text that `parse` reads."""
    scale = policy.scale
    return {
        "tf32": "on" if policy.tf32 else "off",
        "scale": str(scale),
        "scale_floor": f"{scale.floor:.17g}",
        "scale_ceiling": f"{scale.ceiling:.17g}",
        "scale_window": str(scale.window),
        "scale_strategy": scale.strategy,
        "output": policy.output,
        "fp32": "|".join(policy.fp32),
        "ops": policy.ops,
        "fp32_ops": "|".join(policy.fp32_ops),
        "half_ops": "|".join(policy.half_ops),
    }


KEYS = tuple(as_text(Policy()))


def preset_table() -> str:
    """The presets as a Markdown table, from the values themselves."""
    flags = {"tf32": "`tf32=True`", "bf16-mixed": "`bf16=True`", "fp16-mixed": "`fp16=True`"}
    rows = ["| preset | flag | products | weights, gradients, states | tf32 | loss scale | in words |", "|---|---|---|---|---|---|---|"]
    for name, p in PRESETS.items():
        scale = "none" if p.scale.kind == "none" else f"{p.scale.kind}, from {p.scale.init:.0f}"
        rows.append(f"| `{name}` | {flags.get(name, '')} | {p.autocast} | fp32 | {'on' if p.tf32 else 'off'} | {scale} | {SUMMARY[name]} |")
    return "\n".join(rows)
