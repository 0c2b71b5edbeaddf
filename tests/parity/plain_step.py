"""An AdamW step by the plain definitions of `halfstep.numerics` alone, and tensors to try it on: what a kernel must equal bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.kernels.cpu import Item, State, Step
from halfstep.numerics import updates

HALF = (torch.bfloat16, torch.float16)
STORAGES = [("fp32", torch.float32), *((name, dtype) for name in ("split", "split24", "kahan", "stochastic", "plain") for dtype in HALF)]
CODECS = ("fp32", "bf16", "int8")


@dataclass
class Weight:
    """One weight, its residual and its moments, held the way that a storage and two codecs hold them; all tensors flat."""

    storage: str
    dtype: torch.dtype
    codecs: tuple[str, str]
    parameter: int
    weight: Tensor = field(init=False)
    residual: Tensor | None = field(init=False, default=None)
    first: State = field(init=False)
    second: State = field(init=False)

    def fill(self, values: Tensor) -> Weight:
        """Begin with these fp32 weights and moments of 0."""
        self.write(values, None)
        zeros = torch.zeros_like(values)
        self.first, self.second = (encode(zeros, codec, role, None) for codec, role in zip(self.codecs, ("first", "second"), strict=True))
        return self

    def item(self) -> Item:
        """What the kernel takes: copies of all tensors."""
        copies = [s.clone() if isinstance(s, Tensor) else (s[0].clone(), s[1].clone()) for s in (self.first, self.second)]
        return Item(self.weight.clone(), self.storage, None if self.residual is None else self.residual.clone(), *copies, self.parameter)

    def read(self) -> Tensor:
        """The fp32 weights."""
        if self.storage == "kahan":
            return numerics.kahan_join(self.weight, self.residual)
        if self.residual is not None:
            return numerics.join(self.weight, self.residual)
        return self.weight.float().clone()

    def write(self, values: Tensor, bits: Tensor | None) -> None:
        """Hold these fp32 weights."""
        if self.storage == "fp32":
            self.weight = values
        elif self.storage == "kahan":
            self.weight, self.residual = numerics.kahan_split(values, self.dtype)
        elif self.storage == "split":
            self.weight, self.residual = numerics.split(values, self.dtype, 16)
        elif self.storage == "split24":
            self.weight, self.residual = numerics.split(values, self.dtype, 8, bits)
        elif self.storage == "stochastic" and bits is not None:
            self.weight = numerics.stochastic(values, self.dtype, bits)
        else:
            self.weight = numerics.cast(values, self.dtype)

    def step(self, gradient: Tensor, settings: Step, factor: float, seed: int, noise_step: int | None = None) -> None:
        """One AdamW step."""
        bits = numerics.Noise(seed, self.parameter, settings.step if noise_step is None else noise_step).bits(gradient.numel())
        p, m, v = self.read(), decode(self.first, "first", gradient.shape), decode(self.second, "second", gradient.shape)
        numbers = {name: getattr(settings, name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "step", "maximize")}
        updates.adamw_(p, gradient.float() * factor, m, v, **numbers)
        mixed = numerics.state_noise(bits)
        self.first = encode(m, self.codecs[0], "first", mixed & 0xFFFF)
        self.second = encode(v, self.codecs[1], "second", (mixed >> 16) & 0xFFFF)
        self.write(p, bits)


def encode(values: Tensor, codec: str, role: str, bits: Tensor | None) -> State:
    """fp32 moments in a codec."""
    if codec == "int8":
        return numerics.encode(values, role == "first", bits)
    if codec == "bf16":
        return numerics.cast(values, torch.bfloat16) if bits is None else numerics.stochastic(values, torch.bfloat16, bits)
    return values


def decode(state: State, role: str, shape: torch.Size) -> Tensor:
    """The fp32 moments."""
    if isinstance(state, Tensor):
        return state.float().clone()
    return numerics.decode(state[0], state[1], role == "first", shape)


def raw(item: Item | Weight) -> list[Tensor]:
    """All tensors of an item as integers: equal only where all bits are."""
    states = [t for s in (item.first, item.second) for t in ((s,) if isinstance(s, Tensor) else s)]
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
    tensors = [item.weight, *([] if item.residual is None else [item.residual]), *states]
    return [t.contiguous().view(views.get(t.dtype, t.dtype)) for t in tensors]


def different(item: Item, weight: Weight) -> str:
    """Where the kernel's result is another one, in words; empty where all bits are equal."""
    for place, (mine, plain) in enumerate(zip(raw(item), raw(weight), strict=True)):
        wrong = (mine.reshape(-1) != plain.reshape(-1)).nonzero().reshape(-1)
        if len(wrong):
            at = int(wrong[0])
            values = f"{int(mine.reshape(-1)[at])} and not {int(plain.reshape(-1)[at])}"
            return (
                f"{weight.storage} {weight.dtype} {weight.codecs}: tensor {place} differs in {len(wrong)} of {mine.numel()}, first at {at}: {values}"
            )
    return ""
