"""A precision policy as a frozen value, the presets, and their text form.

Text form: a preset, then any `key=value` that differs from it:

    bf16-mixed
    fp16-mixed,scale=static:1024
    fp16-mixed,scale=dynamic:65536,scale_window=500,fp32=lm_head|*.norm*
    bf16-lean,weights=split24,states=int8,fp32=lm_head

`str(policy)` prints it and `halfstep.policy.parse` reads it back to an equal value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_SCALE = 2.0**32  # a loss of 2^60 still fits fp32 after scaling
Weights = Literal["fp32", "split", "split24", "kahan", "stochastic", "plain"]
TABLES: tuple[Weights, ...] = ("split", "split24")  # those that can keep an embedding table in 16 bits under autocast: fp32 rows can be made of it
Castable = bool | Literal["table"]  # whether a policy may hold a weight in 16 bits; "table": it holds it so, and looks fp32 rows up in it
States = Literal["fp32", "bf16", "int8"]
Activations = Literal["full", "int8", "fp8"]


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
    whole: the whole model is in that format and there is no autocast; only the `*-true` presets.
    weights: how a weight that lives in 16 bits is stored: "split" (16 more bits beside it, so the fp32 master is kept), "split24" (8 more bits),
        "kahan" (a 16-bit compensation), "stochastic" (nothing beside it, rounded without bias), "plain" (nothing, rounded to nearest: small
        updates are lost). "fp32": weights are fp32. With autocast, only weights whose every use is a cast go to 16 bits, so nothing changes in
        the forward pass; all but "plain" do that to a model loaded in fp32 too.
    states: format of the optimizer's moments: "fp32", "bf16", or "int8" with one fp32 scale per block of 128. Other states stay fp32.
    tf32: fp32 matrix products on the GPU may round their operands to tf32 (10 bits of mantissa).
    scale: loss scaling.
    output: "fp32" casts 16-bit outputs of a prepared model up, so that a loss outside it runs in fp32; "compute" leaves them.
    fp32: module name patterns (`lm_head`, `*.norm*`) held in fp32 although autocast is on.
    ops: which ops autocast runs in fp32: "cuda", torch's CUDA list on every device, or "device", torch's list of the device in use.
    fp32_ops, half_ops: names of ops (`softmax`, `layer_norm`) that autocast runs in fp32, or in 16 bits, whatever the list says.

    products: how products run on a CPU: "native" (torch's 16-bit kernels), "emulated" (rounded to 16 bits, multiplied in fp32, rounded), some of each
        ("emulated:convolution|attention"), or "auto", whichever was measured to be faster.

    activations: what the forward pass of a module keeps for the backward pass: "full", as computed, or in 8 bits with one scale per block of 128:
        "int8" (even levels, the smaller error) or "fp8" (e4m3 within the block, for values of very unlike size). Rounded without bias; what must be
        exact stays so (`halfstep.amp.saving` has the list).

    Bytes per parameter follow from `weights` and `states`: `halfstep.policy.bytes_per_parameter` counts them.
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
    weights: Weights = "fp32"
    states: States = "fp32"
    whole: bool = False
    products: str = "auto"
    activations: Activations = "full"

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of `autocast`: what the forward pass multiplies in."""
        return DTYPES[self.autocast]

    @property
    def is_mixed(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.autocast != "fp32" and not self.whole

    @property
    def is_lean(self) -> bool:
        """Whether castable weights are stored in 16 bits with a way to keep small updates, under autocast."""
        return self.is_mixed and self.weights not in ("fp32", "plain")

    @property
    def weight_dtype(self) -> torch.dtype:
        """The torch dtype of the weights that this policy holds in 16 bits; fp32 when it holds none."""
        return torch.float32 if self.weights == "fp32" else self.dtype

    @property
    def is_auto(self) -> bool:
        """Whether it stands for one that is chosen when the device and the model are known."""
        return self.preset == AUTO.preset

    def __str__(self) -> str:
        base = PRESETS.get(self.preset, AUTO)
        return ",".join([self.preset, *(f"{key}={value}" for key, value in as_text(self).items() if value != as_text(base)[key])])


PRESETS = {
    p.preset: p
    for p in (
        Policy("fp32"),
        Policy("tf32", tf32=True),
        Policy("bf16-mixed", autocast="bf16"),
        Policy("fp16-mixed", autocast="fp16", scale=LossScale("dynamic")),
        Policy("bf16-lean", autocast="bf16", weights="split", states="int8"),
        Policy("fp16-lean", autocast="fp16", scale=LossScale("dynamic"), weights="split", states="int8"),
        Policy("bf16-true", autocast="bf16", whole=True, weights="kahan", states="bf16"),
        Policy("fp16-true", autocast="fp16", scale=LossScale("dynamic"), whole=True, weights="split"),
    )
}

AUTO = Policy("auto")  # no policy yet: `halfstep.policy.recommend` chooses one

SUMMARY = {
    "fp32": "everything in fp32, tf32 off",
    "tf32": "fp32, matrix products on the GPU in tf32",
    "bf16-mixed": "products in bf16: fp32's range, 8 bits of precision",
    "fp16-mixed": "products in fp16: 11 bits of precision, range up to 65504, so the loss is scaled",
    "bf16-lean": "bf16-mixed in half the memory: weights in bf16 with a 16-bit residual, moments in 8 bits",
    "fp16-lean": "fp16-mixed in half the memory, the same way",
    "bf16-true": "the whole model in bf16, updates kept by a bf16 compensation",
    "fp16-true": "the whole model in fp16, updates kept by a 16-bit residual",
}


def as_text(policy: Policy) -> dict[str, str]:
    """The settings of a policy besides its preset, each as the text that `parse` reads."""
    scale = policy.scale
    return {
        "weights": policy.weights,
        "states": policy.states,
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
        "products": policy.products,
        "activations": policy.activations,
    }


KEYS = tuple(as_text(Policy()))
