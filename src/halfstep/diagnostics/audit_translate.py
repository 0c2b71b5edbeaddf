"""The ops of a run as they would be in another precision: which format each would run in, and which casts would come or go. Nothing is run.

Formats follow the tensors through the graph that a ledger holds, by the rules of the policy that is asked about. What autograd adds to a cast (one
the other way in the backward pass) is added here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from halfstep.amp.ops import FP32, HALF, LOW
from halfstep.amp.twins import FAMILY
from halfstep.policy import Policy, families_of
from halfstep.tracing.ledger import Op, Operand

Way = Literal["as it is", "emulated"]
_FP32, _LOW = frozenset(FP32), frozenset(LOW)


@dataclass(frozen=True)
class Cast:
    """A cast that would be made there: elements, and the two formats."""

    numel: int
    source: torch.dtype
    target: torch.dtype


@dataclass(frozen=True)
class Elsewhere:
    """One op there. inputs: the formats of its tensors; gone: it would not run at all; casts: made for it."""

    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    gone: bool = False
    way: Way = "as it is"
    casts: tuple[Cast, ...] = ()


def in_fp32(ops: Sequence[Op]) -> list[Elsewhere]:
    """The same run with every 16-bit tensor in fp32, and without casts between the two."""
    found = []
    for op in ops:
        inputs, outputs = (tuple(torch.float32 if t.dtype in HALF else t.dtype for t in ts) for ts in (op.inputs, op.outputs))
        formats = {t.dtype for t in (*op.inputs, *op.outputs) if t.is_float}
        gone = op.cls == "casts" and formats <= {torch.float32, *HALF}
        found.append(Elsewhere(inputs, outputs, gone))
    return found


def under_policy(ops: Sequence[Op], policy: Policy, held: Iterable[str] = (), emulated: Iterable[str] = ()) -> list[Elsewhere]:
    """A run in fp32 as it would be under `policy`.

    held: modules that it holds in fp32. emulated: the families of products that would be emulated there. Ops are judged by the function of torch that
    called them, as halfstep's autocast does; torch's own list (ops=device) is taken for CUDA's.
    """
    follower = _Follower(policy, tuple(held), frozenset(emulated))
    return [follower.follow(op) for op in ops]


@dataclass
class _Follower:
    """The formats of the tensors so far, by their numbers."""

    policy: Policy
    held: tuple[str, ...]
    emulated: frozenset[str]
    formats: dict[int, torch.dtype] = field(default_factory=dict)
    forward: set[int] = field(default_factory=set)  # what the forward pass has made, so that the backward pass knows it from its gradients
    statistics: set[int] = field(default_factory=set)  # means, deviations, logarithms of sums: fp32 beside results of any format
    turned: set[tuple[int, torch.dtype]] = field(default_factory=set)  # gradients that were cast already: once, whoever takes them
    narrow: set[str] = field(default_factory=set)  # forward ops that ran as 16-bit products ("linear", "conv")
    wide: set[tuple[str, str, str]] = field(default_factory=set)  # products that ran in fp32, by module, line and op

    def follow(self, op: Op) -> Elsewhere:
        have = tuple(self._format(t, op) for t in op.inputs)
        wide = any(t.dtype == torch.float64 for t in op.floats)
        if wide or not (op.floats or any(t.is_float for t in op.outputs)):
            return self._made(op, have, None)
        if op.cls == "products":
            return self._product(op, have)
        if op.cls == "casts":
            return self._made(op, have, op.outputs[0].dtype if op.outputs else None, gone=True)
        if not op.floats:
            return self._made(op, have, torch.float32)
        if not op.backward and self._wants_fp32(op):
            return self._cast_to(op, have, torch.float32)
        if op.cls == "norms":
            place = 1 if op.backward else 0
            floats = [d for t, d in zip(op.inputs, have, strict=True) if t.is_float]
            at = floats[min(place, len(floats) - 1)]
            return self._cast_to(op, have, at, only=1) if op.backward else self._made(op, have, at)
        if op.backward:
            known = [d for t, d in zip(op.inputs, have, strict=True) if t.is_float and (t.number in self.forward or t.given)]
            if known:
                return self._cast_to(op, have, _widest(known))
            if all((t.number, self.policy.dtype) in self.turned for t in op.floats) and op.forward_op in self.narrow:
                return self._cast_to(op, have, self.policy.dtype)
        return self._made(op, have, _widest_of(op.inputs, have))

    def _format(self, t: Operand, op: Op) -> torch.dtype:
        if t.dtype not in (torch.float32, *HALF):
            return t.dtype
        if t.number in self.formats:
            return self.formats[t.number]
        if t.given and (self.policy.whole or (self.policy.is_lean and t.weight and op.cls == "products")) and not self._is_held(op):
            return self.policy.dtype
        return t.dtype

    def _is_held(self, op: Op) -> bool:
        return any(op.place.module == name or op.place.module.startswith(f"{name}.") for name in self.held)

    def _wants_fp32(self, op: Op) -> bool:
        """Whether the list, the user or a rule has it in fp32, or it stands outside of the model, which gives fp32."""
        if op.called in self.policy.fp32_ops or self._is_held(op):
            return True
        if not op.place.module and not op.place.kind:
            return self.policy.output == "fp32"
        return self.policy.is_mixed and op.called in _FP32 and op.called not in self.policy.half_ops

    def _product(self, op: Op, have: tuple[torch.dtype, ...]) -> Elsewhere:
        outside = not op.backward and not op.place.module and not op.place.kind
        if self._is_held(op) or op.called in self.policy.fp32_ops or outside or (op.backward and self._was_wide(op)):
            return self._cast_to(op, have, torch.float32)
        family = FAMILY.get(op.base, "")
        way: Way = "emulated" if family in self.emulated else "as it is"
        narrow = self.policy.dtype
        made = self._cast_to(op, have, narrow, way=way)
        if not op.backward:
            self.narrow.add(op.place.op)
        if op.backward or way == "emulated":
            return made
        back = [Cast(t.numel, narrow, torch.float32) for t, d in zip(op.inputs, have, strict=True) if t.weight and d == torch.float32]
        return Elsewhere(made.inputs, made.outputs, way=way, casts=(*made.casts, *back))

    def _was_wide(self, op: Op) -> bool:
        """Whether the forward op of a backward product ran in fp32, and saved fp32 operands."""
        return (op.place.module, op.place.source, op.forward_op) in self.wide

    def _cast_to(self, op: Op, have: tuple[torch.dtype, ...], to: torch.dtype, only: int = 0, way: Way = "as it is") -> Elsewhere:
        """The op on operands cast to one format; only: how many of the first it casts, 0 for all."""
        casts, inputs = [], []
        for place, (t, d) in enumerate(zip(op.inputs, have, strict=True)):
            change = d in (torch.float32, *HALF) and d != to and (not only or place < only) and t.number not in self.statistics
            inputs.append(to if change else d)
            kept = op.backward and op.cls == "products" and (t.given or t.number in self.forward)  # the forward product has kept its cast operands
            if change and not kept and not (op.backward and (t.number, to) in self.turned):
                casts.append(Cast(t.numel, d, to))
                if op.backward:
                    self.turned.add((t.number, to))
        if op.cls == "products" and not op.backward and to == torch.float32:
            self.wide.add((op.place.module, op.place.source, op.place.op))
        return self._made(op, tuple(inputs), to, casts=tuple(casts), way=way)

    def _made(
        self, op: Op, inputs: tuple[torch.dtype, ...], to: torch.dtype | None, gone: bool = False, casts: tuple[Cast, ...] = (), way: Way = "as it is"
    ) -> Elsewhere:
        given = {t.number for t in op.inputs}
        outputs = []
        for place, t in enumerate(op.outputs):
            keeps = to is None or t.dtype not in (torch.float32, *HALF) or (t.number in given and t.number >= 0)
            statistic = place > 0 and ((op.cls == "norms" and not self.policy.whole) or (op.cls == "products" and not op.backward))
            if statistic:
                self.statistics.add(t.number)
            made = self.formats.get(t.number, t.dtype) if keeps else torch.float32 if statistic else to
            assert made is not None
            outputs.append(made)
            self.formats[t.number] = made
            if not op.backward:
                self.forward.add(t.number)
        return Elsewhere(inputs, tuple(outputs), gone, way, casts)


def _widest(formats: Iterable[torch.dtype]) -> torch.dtype:
    kinds = set(formats)
    return kinds.pop() if len(kinds) == 1 else torch.float32


def _widest_of(operands: Sequence[Operand], have: Sequence[torch.dtype]) -> torch.dtype:
    """What torch promotes operands to: those without dimensions count only where no other is floating."""
    floats = [(t, d) for t, d in zip(operands, have, strict=True) if t.is_float]
    large = [d for t, d in floats if t.shape] or [d for _, d in floats]
    return _widest(large)


def families(policy: Policy, known: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    """The families of products that `policy` emulates on a CPU; known: those that are measured to be faster so, of a format."""
    if policy.autocast == "fp32":
        return ()
    asked = families_of(policy.products)
    return known(policy.autocast) if asked is None else asked
