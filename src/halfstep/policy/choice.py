"""The policy for `precision="auto"`: the fastest by the device's measured rates among those in whose memory the model can be trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from halfstep.hardware import FAMILIES, Capabilities, Rates
from halfstep.policy.memory import model_bytes
from halfstep.policy.parse import parse
from halfstep.policy.policy import PRESETS, Castable, Policy

SHARE = 0.5  # of the device's memory for weights, gradients and states: what activations take depends on the batch


@dataclass(frozen=True)
class ModelSize:
    """What the choice needs to know of a model.

    trained: its trainable tensors, each once, as (shape, whether a policy may keep it in 16 bits). frozen: bytes of the others, and of buffers.
    loaded: the 16-bit format that most of the trainable parameters are in that are 16-bit, or "". families: the products that it is made of.
    """

    trained: tuple[tuple[tuple[int, ...], Castable], ...]
    frozen: int = 0
    loaded: str = ""
    families: tuple[str, ...] = FAMILIES

    def bytes_under(self, policy: Policy) -> int:
        """Bytes of weights, gradients and AdamW's states."""
        stored = replace(policy, weights="split") if self.loaded and policy.weights == "fp32" else policy
        return self.frozen + model_bytes(self.trained, stored).total


@dataclass(frozen=True)
class Choice:
    """A policy and why it was chosen, in one sentence with numbers and units."""

    policy: Policy
    reason: str

    def __str__(self) -> str:
        return f"{self.policy}: {self.reason}"


def recommend(device: Capabilities, rates: Rates, model: ModelSize) -> Choice:
    """The policy that suits a model on a device.

    Speed: a 16-bit format whose products are at least 1.1 times as fast as fp32's in each family that the model uses (bf16, unless fp16 is as much
    faster again), else fp32; a model that was loaded in 16 bits keeps its format. Memory: where weights, gradients and AdamW's states would
    take more than half of the device's, the weights go to 16 bits with a residual and the states to int8 (`*-lean`), then with 8 bits of residual.
    """
    form, why = rates.fastest(model.families)
    if model.loaded:
        form, why = model.loaded, f"the model was loaded in {model.loaded}"
    allowed = int(SHARE * device.memory_bytes)
    first, *smaller = _candidates(form)
    needed = model.bytes_under(first)
    if needed <= allowed:
        return Choice(first, f"{why}; weights, gradients and AdamW's states take {_gib(needed)} of {_gib(device.memory_bytes)}")
    for policy in smaller:
        takes = model.bytes_under(policy)
        if takes <= allowed:
            return Choice(policy, f"{first} would take {_gib(needed)} of {_gib(device.memory_bytes)}, and this takes {_gib(takes)}; {why}")
    return Choice(policy, f"it takes the least, {_gib(takes)} of {_gib(device.memory_bytes)}, and may not leave enough for activations; {why}")


def _candidates(form: str) -> Iterator[Policy]:
    """From the most memory to the least."""
    half = "bf16" if form == "fp32" else form
    yield PRESETS["fp32" if form == "fp32" else f"{form}-mixed"]
    yield PRESETS[f"{half}-lean"]
    yield parse(f"{half}-lean,weights=split24")


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
