"""A step by the plain definitions of `halfstep.numerics` alone, and tensors to try it on: what a kernel must equal bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.kernels.items import Item, State
from halfstep.numerics import Settings

HALF = (torch.bfloat16, torch.float16)
STORAGES = [("fp32", torch.float32), *((name, dtype) for name in ("split", "split24", "kahan", "stochastic", "plain") for dtype in HALF)]
CODECS = ("fp32", "bf16", "int8")
ROLES = ("first", "second")


@dataclass
class Weight:
    """One weight, its residual and its states, held the way that a storage and the codecs of the states hold them; all tensors flat.

    codecs: of the first and of the second moment, as many as the rule has.
    """

    storage: str
    dtype: torch.dtype
    codecs: tuple[str, ...]
    parameter: int
    weight: Tensor = field(init=False)
    residual: Tensor | None = field(init=False, default=None)
    states: list[State] = field(init=False)

    def fill(self, values: Tensor) -> Weight:
        """Begin with these fp32 weights and states of 0."""
        self.write(values, None)
        zeros = torch.zeros_like(values)
        self.states = [encode(zeros.clone(), codec, role, None) for codec, role in zip(self.codecs, ROLES, strict=False)]
        return self

    def item(self) -> Item:
        """What the kernel takes: copies of all tensors."""
        copies = [s.clone() if isinstance(s, Tensor) else (s[0].clone(), s[1].clone()) for s in self.states]
        residual = None if self.residual is None else self.residual.clone()
        return Item(self.weight.clone(), self.storage, residual, *[*copies, None, None][:2], parameter=self.parameter)

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

    def step(self, gradient: Tensor, settings: Settings, factor: float, seed: int, noise_step: int) -> None:
        """One step."""
        bits = numerics.Noise(seed, self.parameter, noise_step).bits(gradient.numel())
        p, states = self.read(), [decode(s, role, gradient.shape) for s, role in zip(self.states, ROLES, strict=False)]
        settings.update_(p, gradient.float() * factor, *states)
        mixed = numerics.state_noise(bits)
        noises = (mixed & 0xFFFF, (mixed >> 16) & 0xFFFF)
        self.states = [encode(*each) for each in zip(states, self.codecs, ROLES, noises, strict=False)]
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
    held = item.states if isinstance(item, Weight) else [s for s in (item.first, item.second) if s is not None]
    states = [t for s in held for t in ((s,) if isinstance(s, Tensor) else s)]
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
