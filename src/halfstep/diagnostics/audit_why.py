"""Why an op ran in fp32 although 16 bits were asked for, and rows of ops that are alike. Pure functions of what a ledger holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from halfstep.amp.ops import FP32
from halfstep.policy import Policy
from halfstep.tracing.findings import HALF, short
from halfstep.tracing.ledger import Op, Operand

WHYS = {
    "": "runs in 16 bits, or has no floating numbers",
    "emulated": "16-bit products by fp32's kernel, with operands and result rounded",
    "rule": "its module is held in fp32 by the precision (fp32=) or by a pin",
    "fp32_ops": "the precision names this op (fp32_ops=)",
    "list": "autocast's list has it in fp32",
    "promotion": "an fp32 operand met a 16-bit one",
    "cast": "the model's code cast its input up",
    "off": "autocast is off there",
    "custom": "autocast does not look into what calls it",
    "input": "weights and batch came in fp32",
    "edge": "the model's outputs are cast up",
}
_FP32 = frozenset(FP32)


@dataclass(frozen=True)
class Why:
    """The cause of fp32, by its key in WHYS, and where it began: a line, an op, or the name of a tensor."""

    key: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Row:
    """Ops of one module, kind, direction and format. seconds, bytes and flops are of all `calls` of one step.

    by: who asked for a cast or runs a product (`halfstep.tracing.ledger.Op`). why, origin: of fp32. weights: a cast of weights, or of their
    gradients. sizes: of a product's operands.
    """

    module: str
    kind: str
    op: str
    direction: str
    dtype_in: str
    dtype_out: str
    cls: str
    by: str = ""
    why: str = ""
    origin: str = ""
    source: str = ""
    sizes: str = ""
    weights: bool = False
    calls: int = 1
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0

    @property
    def format(self) -> str:
        """What it computes in: "bf16", "fp32", "bf16 emulated", "" for no floating numbers."""
        return self.dtype_in if self.dtype_in == self.dtype_out or "emulated" in self.dtype_in else self.dtype_out or self.dtype_in

    @property
    def where(self) -> str:
        """The module as words."""
        return f"{self.module} ({self.kind})" if self.module else self.kind or "outside of the model"

    @property
    def narrow(self) -> bool:
        """Whether its product is a 16-bit one, by whatever kernel."""
        return self.format.startswith(("bf16", "fp16", "16-bit"))


def explained(ops: Sequence[Op], policy: Policy | None, held: Iterable[str] = (), names: Mapping[int, str] | None = None) -> list[Why]:
    """The cause of fp32 of every op. held: modules that the policy holds in fp32. names: of weights and buffers, by number."""
    return _Follower(policy, tuple(held), dict(names or {})).all(ops)


@dataclass
class _Follower:
    policy: Policy | None
    held: tuple[str, ...]
    names: dict[int, str]
    causes: dict[int, Why] = field(default_factory=dict)  # of fp32 tensors, by number
    products: dict[tuple[str, str, str], Why] = field(default_factory=dict)

    def all(self, ops: Sequence[Op]) -> list[Why]:
        asked = self.policy is not None and self.policy.autocast != "fp32"
        if not asked and not any(t.dtype in HALF for op in ops for t in (*op.inputs, *op.outputs)):
            return [Why("input") if op.floats else Why() for op in ops]
        found = []
        for op in ops:
            why = self._of(op)
            found.append(why)
            after = self._after(op, why)
            self.causes.update({t.number: after for t in op.outputs if t.is_float})
        return found

    def _of(self, op: Op) -> Why:
        if op.cls == "products":
            return self._product(op)
        if op.cls == "casts" or not op.floats or all(t.dtype in HALF for t in op.outputs if t.is_float):
            return Why()
        if self._is_held(op):
            return Why("rule", self._rule(op))
        if self.policy is not None and op.called and op.called in self.policy.fp32_ops:
            return Why("fp32_ops", op.called)
        if op.cls == "custom":
            return Why("custom", op.name)
        large = [t for t in op.floats if t.shape]
        wide = [t for t in large if t.dtype not in HALF]
        if len(wide) < len(large) and wide and op.cls != "norms":
            return Why("promotion", self._named(wide[0]))
        came = [self.causes[t.number] for t in op.floats if t.number in self.causes]
        for key in ("list", "promotion", "cast", "off", "custom", "rule", "fp32_ops"):
            for cause in came:
                if cause.key == key:
                    return cause
        if op.called in _FP32 and self.policy is not None:
            return Why("list", op.called)
        return came[0] if came else Why("input")

    def _product(self, op: Op) -> Why:
        key = (op.place.module, op.place.source, op.forward_op if op.backward else op.place.op)
        if op.by == "product":
            return Why("emulated")
        if all(t.dtype in HALF for t in op.outputs if t.is_float):
            return Why()
        if op.backward and key in self.products:
            return self.products[key]
        why = self._fp32_product(op)
        if not op.backward:
            self.products[key] = why
        return why

    def _fp32_product(self, op: Op) -> Why:
        if self._is_held(op):
            return Why("rule", self._rule(op))
        if self.policy is not None and op.called in self.policy.fp32_ops:
            return Why("fp32_ops", op.called)
        if op.on:
            return Why("custom", op.called)
        for t in op.floats:
            cause = self.causes.get(t.number)
            if cause is not None and cause.key in ("cast", "promotion"):
                return cause
        return Why("off", op.place.source)

    def _after(self, op: Op, why: Why) -> Why:
        """What stands behind an fp32 result of this op."""
        if op.cls != "casts":
            return why
        if op.by == "model":
            return Why("cast", op.place.source)
        if op.by == "edge":
            return Why("edge")
        return Why("list", op.called) if op.by in ("list", "autocast") else Why()

    def _is_held(self, op: Op) -> bool:
        return bool(self._rule(op))

    def _rule(self, op: Op) -> str:
        return next((name for name in self.held if op.place.module == name or op.place.module.startswith(f"{name}.")), "")

    def _named(self, t: Operand) -> str:
        if t.number in self.names:
            return self.names[t.number]
        cause = self.causes.get(t.number)
        if cause is not None and cause.origin:
            return f"what {cause.origin} left in fp32"
        return "an input of the run" if t.given else "a tensor that was in fp32 already"


def rows_of(ops: Sequence[Op], whys: Sequence[Why], compute: str = "16-bit") -> tuple[Row, ...]:
    """Rows of ops that are alike, the slowest first. compute: the format that emulated products stand for."""
    weights = {
        (op.place.module, op.place.source, op.inputs[-1].numel) for op in ops if op.cls == "casts" and not op.backward and op.inputs[-1].weight
    }
    raised = {t.number for op in ops if op.cls == "casts" and op.by == "model" and op.inputs[-1].dtype in HALF for t in op.outputs}
    found: dict[Row, list[Op]] = defaultdict(list)
    for op, why in zip(ops, whys, strict=True):
        back = op.cls == "casts" and op.by in ("autocast", "list", "product") and op.inputs[-1].number in raised  # down again what the code cast up
        of_weights = op.cls == "casts" and (op.place.module, op.place.source, op.inputs[-1].numel) in weights
        emulated = why.key == "emulated"
        given, made = _formats(op.inputs), _formats(op.outputs)
        if op.cls == "casts":
            given, made = short(op.inputs[-1].dtype), short(op.outputs[0].dtype)
        elif emulated:
            given = made = f"{compute} emulated"
        key = Row(
            op.place.module,
            op.place.kind,
            op.place.op,
            op.place.direction,
            given,
            made,
            op.cls,
            "model" if back else op.by,
            why.key,
            why.origin,
            op.place.source,
            _sizes(op) if op.cls == "products" else "",
            of_weights,
        )
        found[key].append(op)
    made_rows = [
        replace(key, calls=len(same), seconds=sum(o.seconds for o in same), bytes=sum(o.bytes for o in same), flops=sum(o.flops for o in same))
        for key, same in found.items()
    ]
    return tuple(sorted(made_rows, key=lambda row: -row.seconds))


def _formats(operands: Sequence[Operand]) -> str:
    return ", ".join(dict.fromkeys(short(t.dtype) for t in operands if t.is_float))


def _sizes(op: Op) -> str:
    shapes = [t.shape for t in op.floats if len(t.shape) > 1]
    return " by ".join("x".join(map(str, s)) for s in shapes[:2])
