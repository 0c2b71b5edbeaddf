"""The step of a stock optimizer on fp32 masters: a bucket of whole tensors at a time, one copy of the optimizer per bucket.

A stand-in of a 16-bit weight is filled with its fp32 master before the step of its bucket and emptied after it, so that the fp32 copies of one
bucket are alive at a time. A stand-in of any other weight shares its memory. States lie with the original optimizer, under its own parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.numerics import Noise
from halfstep.optim.codec import SCALE, Role
from halfstep.optim.copies import MEMBERS, OWN, Link, assign, copied, same
from halfstep.optim.masters import HALF, master_of

WORD = 4  # bytes of an fp32 number


class Formats(Protocol):
    """How states are kept between steps, and the noise of this step."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """The states that may be encoded."""

    def decoded(self, state: Mapping[str, Any], key: str, p: Tensor) -> Tensor:
        """A state in fp32."""

    def encode(self, state: dict[str, Any], key: str, values: Tensor, number: int) -> None:
        """Put fp32 values back as a state of parameter `number`."""

    def noise(self, number: int) -> Noise:
        """The noise of this step for a parameter."""


class StandIn:
    """An fp32 tensor in the place of a parameter. number: the place of the parameter among all of the optimizer."""

    def __init__(self, p: Tensor, number: int) -> None:
        self.p, self.number = p, number
        empty = torch.empty(0, dtype=torch.float32 if p.dtype in HALF else p.dtype, device=p.device)
        self.tensor: Tensor = nn.Parameter(empty, p.requires_grad) if isinstance(p, nn.Parameter) else empty.clone().requires_grad_(p.requires_grad)
        self._empty = empty
        self._version = 0
        for name, value in vars(p).items():
            if name != "halfstep_master":
                setattr(self.tensor, name, value)  # what optimizers are told about single parameters

    def fill(self, factor: float | Tensor) -> int:
        """Hold the fp32 value of the parameter and its gradient times `factor`. Returns the bytes that this took."""
        p, stand = self.p, self.tensor
        master = master_of(p)
        values = p.detach() if p.dtype not in HALF else _strided_as(p, p.detach().float() if master is None else master.read())
        taken = 0 if _same_place(values, p) else values.nbytes
        stand.data = values
        stand.requires_grad_(p.requires_grad)
        if p.grad is not None:
            gradient = p.grad if p.grad.dtype == values.dtype else p.grad.detach().to(values.dtype)
            if isinstance(factor, Tensor) or factor != 1.0:
                gradient = gradient.detach() * factor
            if gradient is not p.grad and not gradient.is_sparse:
                taken += gradient.nbytes
            stand.grad = gradient
        self._version = stand._version
        return taken

    def write(self, noise: Callable[[int], Noise], always: bool) -> None:
        """Give the parameter the value that the step has left, if there was a step for it."""
        p, stand = self.p, self.tensor
        moved = stand._version != self._version or always
        if stand.grad is None and not moved:
            return
        master = master_of(p)
        if master is not None:
            master.write(stand.detach(), noise(self.number))
        elif p.dtype in HALF or not _same_place(stand, p):
            p.detach().copy_(stand.detach())
        elif moved:
            increment_version(p)

    def empty(self) -> None:
        """Let go of everything."""
        self.tensor.grad = None
        self.tensor.data = self._empty


class Bucket:
    """Some parameters, and the copy of the optimizer that steps them."""

    def __init__(self, optimizer: Optimizer, stand_ins: Mapping[int, StandIn], members: Sequence[StandIn]) -> None:
        self.members = members
        chosen = {id(m.p) for m in members}
        self.twin = copied(optimizer, {i: s.tensor for i, s in stand_ins.items()}, chosen)
        self.bytes = 0  # that the last step took for a while
        self._places = [i for i, group in enumerate(optimizer.param_groups) if any(id(p) in chosen for p in group["params"])]
        self._own = Link(vars(self.twin), OWN, tensors=False)
        self._groups = [Link(group, MEMBERS, tensors=True) for group in self.twin.param_groups]

    def push(self, optimizer: Optimizer, memo: dict[int, Any], alone: bool) -> None:
        """Take over hyper-parameters, and states that belong to no parameter: as copies unless this bucket is `alone`."""
        shared: dict[int, Tensor] = {}
        self._own.push(vars(optimizer), memo, shared)
        for place, link in zip(self._places, self._groups, strict=True):
            link.push(optimizer.param_groups[place], memo, shared)
        self.twin.state.update(loose(optimizer) if alone else copy.deepcopy(loose(optimizer), dict(memo)))

    def changes(self, optimizer: Optimizer, memo: dict[int, Any]) -> dict[int, dict[str, Any]]:
        """What the step has changed in the attributes (-1) and in the groups, by number."""
        found = {place: link.changes(optimizer.param_groups[place], memo) for place, link in zip(self._places, self._groups, strict=True)}
        return {-1: self._own.changes(vars(optimizer), memo)} | found

    def step(self, optimizer: Optimizer, call: Callable[[Optimizer], Any], factor: float | Tensor, formats: Formats, always: bool) -> None:
        """Fill the stand-ins, `call` the copy, and bring weights and states back. always: weights without a gradient too."""
        try:
            with torch.no_grad():
                self.bytes = sum(self._load(optimizer, m, formats) + m.fill(factor) for m in self.members)
            call(self.twin)
            with torch.no_grad():
                for m in self.members:
                    m.write(formats.noise, always)
                    self._store(optimizer, m, formats)
        finally:
            for m in self.members:
                m.empty()
                self.twin.state.pop(m.tensor, None)

    def _load(self, optimizer: Optimizer, member: StandIn, formats: Formats) -> int:
        p, taken = member.p, 0
        if p not in optimizer.state:
            return 0
        kept = optimizer.state[p]
        state = dict(kept)
        for key in formats.roles:
            value = state.get(key)
            if isinstance(value, Tensor) and (value.dtype in (torch.int8, torch.uint8, torch.bfloat16) or key + SCALE in state):
                state[key] = _strided_as(p, formats.decoded(kept, key, p))
                state.pop(key + SCALE, None)
                taken += state[key].nbytes
        self.twin.state[member.tensor] = state
        return taken

    def _store(self, optimizer: Optimizer, member: StandIn, formats: Formats) -> None:
        state = self.twin.state.pop(member.tensor, None)
        if state is None:
            return
        for key in formats.roles:
            value = state.get(key)
            if isinstance(value, Tensor) and value.shape == member.p.shape and value.dtype == torch.float32:
                formats.encode(state, key, value, member.number)
        kept = optimizer.state[member.p]
        kept.clear()
        kept.update(state)


class Buckets:
    """All parameters of an optimizer, in buckets.

    costs: temporary bytes of each parameter, by id. limit: those of a bucket; None for a single one. cuts: where buckets end, instead.
    """

    def __init__(
        self, optimizer: Optimizer, formats: Formats, costs: Mapping[int, int], limit: int | None, cuts: Sequence[int] | None = None
    ) -> None:
        self.signature = signature(optimizer)
        everybody = [p for group in optimizer.param_groups for p in group["params"]]
        stand_ins = {id(p): StandIn(p, number) for number, p in reversed(list(enumerate(everybody)))}
        order = list(reversed(stand_ins.values()))
        ends = list(cuts) if cuts is not None else _ends([costs[id(s.p)] for s in order], limit)
        self.buckets = [Bucket(optimizer, stand_ins, order[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        self._formats = formats
        self._there: dict[int, Any] = {i: s.tensor for i, s in stand_ins.items()}
        self._back: dict[int, Any] = {id(s.tensor): s.p for s in stand_ins.values()}
        self._held = stand_ins  # ids stay those of these parameters

    def step(self, optimizer: Optimizer, call: Callable[[Optimizer], Any], factor: float | Tensor = 1.0, always: bool = False) -> list[str]:
        """`call` every copy on its bucket; `always` brings weights without a gradient back too.

        Returns the names of hyper-parameters that copies changed in different ways: none if buckets are right.
        """
        refuse_sparse(optimizer)
        self.push(optimizer)
        for bucket in self.buckets:
            bucket.step(optimizer, call, factor, self._formats, always)
        return self.pull(optimizer)

    def push(self, optimizer: Optimizer) -> None:
        """Before a step, or the first of those one by one: take over hyper-parameters."""
        for bucket in self.buckets:
            bucket.push(optimizer, self._there, len(self.buckets) == 1)

    def step_one(self, optimizer: Optimizer, number: int, call: Callable[[Optimizer], Any], factor: float | Tensor) -> None:
        """`call` one copy on its bucket; between `push` and `pull` each of them once."""
        self.buckets[number].step(optimizer, call, factor, self._formats, False)

    @property
    def bytes(self) -> int:
        """Temporary bytes of the largest bucket in the last step."""
        return max((b.bytes for b in self.buckets), default=0)

    def pull(self, optimizer: Optimizer) -> list[str]:
        """After a step: take back what copies have changed; the names of what they changed in different ways."""
        found: dict[tuple[int, str], Any] = {}
        at_odds = []
        for bucket in self.buckets:
            for place, changed in bucket.changes(optimizer, self._back).items():
                for key, value in changed.items():
                    if not same(found.setdefault((place, key), value), value):
                        at_odds.append(key)
        for (place, key), value in found.items():
            assign(vars(optimizer) if place < 0 else optimizer.param_groups[place], {key: value})
        apart: dict[Any, Any] = {}
        for bucket in self.buckets:
            at_odds += [str(key) for key, value in loose(bucket.twin).items() if not same(apart.setdefault(key, value), value)]
        optimizer.state.update(apart)
        return at_odds


def loose(optimizer: Optimizer) -> dict[Any, Any]:
    """States that belong to no parameter."""
    state: Mapping[Any, Any] = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def signature(optimizer: Optimizer) -> tuple[Any, ...]:
    """What buckets depend on: another one means that they have to be made anew."""
    return tuple(tuple((id(p), p.dtype, p.device, p.shape) for p in group["params"]) for group in optimizer.param_groups)


def cost(p: Tensor, encoded: int) -> int:
    """Temporary bytes that a parameter may take in its bucket: an fp32 weight if it has 16 bits, an fp32 gradient, `encoded` states."""
    return p.numel() * WORD * (encoded + 1 + (p.dtype in HALF))


def refuse_sparse(optimizer: Optimizer) -> None:
    """Raise ConfigError for a sparse gradient of a 16-bit weight."""
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None and p.grad.layout != torch.strided and p.dtype in HALF:
            raise ConfigError(
                f"parameter {number} of shape {tuple(p.shape)} is {str(p.dtype).removeprefix('torch.')} and has a sparse gradient, "
                "and a 16-bit weight is read and written whole",
                "Use sparse=False in its embedding, or keep it in fp32 (halfstep.optim.detach, or fp32=PATTERN in the precision).",
            )


def _ends(costs: Sequence[int], limit: int | None) -> list[int]:
    """Where buckets end, so that none takes more than `limit` unless it is a single tensor."""
    ends, total = [], 0
    for i, size in enumerate(costs):
        if limit is not None and total and total + size > limit:
            ends.append(i)
            total = 0
        total += size
    return [*ends, len(costs)]


def _same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin in the same memory; told without asking for an address, which a fake tensor has not."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def _strided_as(p: Tensor, values: Tensor) -> Tensor:
    """`values` with the strides of a tensor like `p`: fused kernels walk weight, gradient and states side by side."""
    if p.is_contiguous() and values.is_contiguous():
        return values
    placed = torch.empty_like(p, dtype=values.dtype)
    return values if placed.stride() == values.stride() else placed.copy_(values)
