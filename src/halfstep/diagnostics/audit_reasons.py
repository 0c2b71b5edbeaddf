"""From rows of ops to the reasons why 16 bits are not faster, each with what it costs and what to do. Pure functions of records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from halfstep.diagnostics.audit_why import Row
from halfstep.policy import parse

LEAST = 0.03  # of the step: what takes less is no reason
FLOOR = 0.4  # of the step outside of ops, from where on the tensors are too small
HEAVY = 0.5  # of the step in ops that only move bytes
OP_CAUSES = ("list", "rule", "cast", "off", "edge", "fp32_ops")
PRODUCT_CAUSES = ("rule", "fp32_ops", "off", "custom", "cast", "promotion", "input")


@dataclass(frozen=True)
class Reason:
    """One cause of a slow step. share: what it takes of the step. cost: what the step would gain without it, as a share, by what was measured.

    cause: "fp32 products", "emulated", "slow products", "casts of the code", "casts of weights", "casts of the list", "promotion", "fp32 ops",
    "fp32 loss", "shape", "outside", "memory", "tf32" or "nothing in 16 bits".
    """

    cause: str
    module: str
    op: str
    what: str
    remedy: str
    share: float
    cost: float

    def __str__(self) -> str:
        return f"{self.cause}: {self.what}\n  remedy: {self.remedy}"


@dataclass(frozen=True)
class Padded:
    """A product with a size that is no multiple of 8: seconds as it is and padded, each alone. sizes, fit: the operands' sizes now and padded."""

    module: str
    sizes: str
    fit: str
    seconds: float
    padded_seconds: float
    share: float


@dataclass(frozen=True)
class Facts:
    """What is known besides the rows.

    precision: as text; compute: its 16-bit format, "fp32" for none. kind: "cpu" or "cuda". native: formats that the device has instructions for.
    step: seconds by the clock. outside: share of it outside of ops, the time that torch takes to call them counted. tf32: whether fp32 products of
    the GPU round to tf32 now. gain: how many times as fast as in fp32 this run's products are in 16 bits, 0 where it was not measured.
    """

    precision: str
    compute: str
    device: str
    kind: str
    native: tuple[str, ...]
    step: float
    outside: float = 0.0
    tf32: bool = False
    gain: float = 0.0
    padded: tuple[Padded, ...] = ()


def reasons(rows: Sequence[Row], facts: Facts) -> tuple[Reason, ...]:
    """All reasons that take a share of the step worth a word, the costliest first."""
    found: list[Reason] = []
    for look in (_fp32_products, _native, _emulated, _casts, _promotions, _fp32_ops, _shapes, _outside, _memory, _tf32):
        found += look(rows, facts)
    return tuple(sorted((r for r in found if r.share >= LEAST), key=lambda r: (-r.cost, -r.share)))


def share_of(rows: Iterable[Row], facts: Facts) -> float:
    """What rows take of the step."""
    return sum(row.seconds for row in rows) / facts.step if facts.step else 0.0


def _grouped(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return sorted(groups.items(), key=lambda item: -sum(r.seconds for r in item[1]))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"


def modules_of(rows: Sequence[Row]) -> str:
    """The modules of rows as words: the slowest, and how many others."""
    names = list(dict.fromkeys(row.where for row in sorted(rows, key=lambda r: -r.seconds)))
    more = f" and {len(names) - 1} other{'s' if len(names) > 2 else ''}" if len(names) > 1 else ""
    return f"{names[0]}{more}"


_WIDE = {
    "rule": (
        "the precision or a pin holds {origin} in fp32",
        "Name less in fp32=: only modules whose values leave 16 bits (halfstep.plan says which).",
    ),
    "fp32_ops": ("the precision has {origin} in fp32_ops", "Take {origin} out of fp32_ops=."),
    "off": (
        "autocast is off there, at {origin}",
        "Run it inside the bound model's forward pass, or open halfstep.amp.autocast there; out of an autocast(enabled=False) block move it.",
    ),
    "custom": (
        "autocast does not look into {origin}, a custom op or Function",
        "Cast its inputs to the 16-bit format before it is called (torch.library.register_autocast, or torch.amp.custom_fwd(cast_inputs=...)).",
    ),
    "cast": ("the code casts its operands up at {origin}", "Leave that .float() out, or run the product under autocast, which casts its operands."),
    "promotion": ("an fp32 operand ({origin}) has made its input fp32", "Cast {origin} to the other operand's dtype (x.to(y.dtype))."),
    "input": ("weights and inputs are fp32 there", "Run it under a 16-bit precision."),
}


def _fp32_products(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    if facts.compute == "fp32":
        return []
    flops = sum(row.flops for row in rows)
    found = []
    wide = [r for r in rows if r.cls in ("products", "custom") and not r.narrow and r.why in PRODUCT_CAUSES]
    for (why, origin), group in _grouped(wide, lambda r: (r.why, r.origin)):
        share, part = share_of(group, facts), sum(r.flops for r in group) / flops if flops else 0.0
        cost = share * (1 - 1 / facts.gain) if facts.gain else share / 2
        said, remedy = (text.format(origin=origin or "this line") for text in _WIDE[why])
        name = "the op" if all(r.cls == "custom" for r in group) else "products"
        what = f"{name} of {modules_of(group)} ran in fp32 ({_percent(part)} of the product flops, {_percent(share)} of the step): {said}"
        gain = f"; in {facts.compute} products are {facts.gain:.2f} times as fast here" if facts.gain else ""
        found.append(Reason("fp32 products", group[0].module, group[0].op, what + gain, remedy, share, max(cost, 0.0)))
    return found


def _native(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    mine = [r for r in rows if r.cls == "products" and r.narrow and "emulated" not in r.format]
    share = share_of(mine, facts)
    if not mine or not facts.gain or facts.gain >= 1.05:
        return []
    what = (
        f"{facts.compute} products run at {facts.gain:.2f} times fp32's rate on {facts.device} at these sizes, and take {_percent(share)} of the step"
    )
    other = next((f for f in ("bf16", "fp16") if f in facts.native and f != facts.compute), "")
    use = f"Train in {other}-mixed, which is native here" if other else "Train in fp32; the *-lean precisions save memory"
    return [Reason("slow products", mine[0].module, mine[0].op, what, f"{use}.", share, max(0.0, share * (1 - facts.gain)))]


def _emulated(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    mine = [r for r in rows if r.why == "emulated" and r.cls == "products"]
    roundings = [r for r in rows if r.cls == "casts" and r.by == "product"]
    share, rounding = share_of(mine, facts), share_of(roundings, facts)
    if not mine:
        return []
    native = facts.compute in facts.native
    what = (
        f"{facts.compute} products of {modules_of(mine)} are emulated on {facts.device}: fp32's kernel ({_percent(share)} of the step) and the "
        f"rounding of operands and results ({_percent(rounding)}), since torch's own kernels are slower"
    )
    other = next((f for f in ("bf16", "fp16") if f in facts.native and f != facts.compute), "")
    remedy = (
        f"Train in {other}-mixed, which this device has instructions for."
        if other and not native
        else "No precision is faster here for these; 16 bits save memory (*-lean). products=native takes torch's kernels."
    )
    return [Reason("emulated", mine[0].module, mine[0].op, what, remedy, share + rounding, rounding)]


def _casts(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    casts = [r for r in rows if r.cls == "casts" and r.by != "product"]
    code = {(r.module, r.source) for r in casts if r.by == "model"}
    mine = [r for r in casts if not r.weights and (r.by == "model" or (r.by == "backward" and (r.module, r.source) in code))]
    weights = [r for r in casts if r.weights]
    others = [r for r in casts if r not in mine and not r.weights]
    found = []
    if mine:
        share, lines = share_of(mine, facts), list(dict.fromkeys(r.source for r in mine if r.source))
        calls = sum(r.calls for r in mine)
        what = f"the code casts {calls} times a step ({_percent(share)} of it), in {modules_of(mine)}, at {', '.join(lines[:3])}"
        remedy = "Leave .float() and .to() out between layers: autocast casts where a format is needed, and ops that need fp32 get it."
        found.append(Reason("casts of the code", mine[0].module, "to", what, remedy, share, share))
    if weights:
        share = share_of(weights, facts)
        what = f"fp32 weights are cast to {facts.compute} in each forward pass, and their gradients back ({_percent(share)} of the step)"
        lean = facts.compute in ("bf16", "fp16") and "-mixed" in facts.precision
        remedy = f"{facts.compute}-lean keeps them in 16 bits (and their fp32 masters beside them)." if lean else "Use a larger batch per step."
        found.append(Reason("casts of weights", weights[0].module, "to", what, remedy, share, share))
    if others:
        share = share_of(others, facts)
        what = f"activations are cast between fp32 and 16 bits around ops that autocast runs in one of the two ({_percent(share)} of the step)"
        remedy = "half_ops= in the precision runs an op in 16 bits (half_ops=layer_norm), ops=device takes the device's own, shorter list on a CPU."
        if "-true" in facts.precision:  # no lists there
            what = f"sums in fp32 are rounded, gradients of embeddings above all, and inputs and outputs are cast ({_percent(share)} of the step)"
            remedy = "Nothing is to be mended: in 16 bits such sums would be lost."
        found.append(Reason("casts of the list", others[0].module, "to", what, remedy, share, share))
    return found


def _promotions(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    found = []
    wide = [r for r in rows if r.cls not in ("products", "casts", "custom") and r.why == "promotion" and r.direction == "forward"]
    for (origin,), group in _grouped(wide, lambda r: (r.origin,)):
        share = share_of(group, facts)
        met = f"{origin or 'an fp32 tensor'} is fp32 and meets 16-bit tensors in {modules_of(group)}"
        what = f"{met}: what follows runs in fp32 ({_percent(share)} of the step)"
        remedy = f"Cast {origin or 'it'} to the other operand's dtype (x.to(y.dtype)), unless it is a residual sum that shall stay fp32."
        found.append(Reason("promotion", group[0].module, group[0].op, what, remedy, share, share / 2))
    return found


def _fp32_ops(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    if facts.compute == "fp32":
        return []
    wide = [r for r in rows if r.cls not in ("products", "casts", "custom") and "fp32" in r.format and r.why in OP_CAUSES]
    loss = [
        r for r in wide if r.cls == "softmax and losses" and (not r.module or "loss" in r.op or "loss" in r.origin or "cross_entropy" in r.origin)
    ]
    others = [r for r in wide if r not in loss]
    found = []
    share = share_of(loss, facts)
    if share >= 0.1:
        what = f"the loss runs in fp32 over all of its logits ({_percent(share)} of the step)"
        remedy = "A language model's: chunked_loss='on', or halfstep.amp.linear_cross_entropy, which makes no logits. Else a smaller head."
        found.append(Reason("fp32 loss", loss[0].module, loss[0].op, what, remedy, share, share / 2))
    share = share_of(others, facts)
    if share >= 0.1:
        ops = list(dict.fromkeys(r.op for r in others))
        named = f"{', '.join(ops[:4])} {'run' if len(ops) > 1 else 'runs'} in fp32 by autocast's list, a rule or a cast"
        what = f"{named} ({_percent(share)} of the step), which 16 bits would halve at best"
        remedy = "half_ops= in the precision runs a listed op in 16 bits; torch.compile joins such ops into one pass."
        found.append(Reason("fp32 ops", others[0].module, others[0].op, what, remedy, share, share / 4))
    return found


def _shapes(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    found = []
    for p in facts.padded:
        cost = p.share * (1 - p.padded_seconds / p.seconds)
        if p.padded_seconds > 0.95 * p.seconds:
            continue
        much = f"it takes {p.seconds / p.padded_seconds:.2f} times as long as {p.fit}, measured alone"
        where = f"the product of {p.sizes} in {p.module or 'code outside of the model'}"
        what = f"{where} has a size that is no multiple of 8: {much} ({_percent(p.share)} of the step)"
        found.append(Reason("shape", p.module, "mm", what, f"Pad to {p.fit}.", p.share, max(0.0, cost)))
    return found


def _outside(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    if facts.outside < FLOOR:
        return []
    calls = sum(r.calls for r in rows)
    what = (
        f"{_percent(facts.outside)} of the step passes outside of the ops' work, in Python, autograd and the calling of {calls} ops: the tensors are "
        "too small for a format to matter"
    )
    graphs = " On a GPU, CUDA graphs (mode='reduce-overhead')." if facts.kind == "cuda" else ""
    return [Reason("outside", "", "", what, f"A larger batch per step; torch.compile, which joins ops.{graphs}", facts.outside, facts.outside)]


def _memory(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    moved = [r for r in rows if r.cls in ("norms", "softmax and losses", "lookups", "sums", "copies", "elementwise")]
    share = share_of(moved, facts)
    if share < HEAVY:
        return []
    kinds = [name for (name,), _ in _grouped(moved, lambda r: (r.cls,))]
    what = f"{_percent(share)} of the step is in ops that multiply no matrices ({', '.join(kinds[:3])}): 16 bits can only halve their bytes"
    return [Reason("memory", moved[0].module, moved[0].op, what, "torch.compile joins them into fewer passes over memory.", share, share / 4)]


def _tf32(rows: Sequence[Row], facts: Facts) -> list[Reason]:
    wide = [r for r in rows if r.cls == "products" and r.format == "fp32"]
    share = share_of(wide, facts)
    if facts.kind != "cuda" or facts.tf32 or "tf32" not in facts.native or not wide:
        return []
    what = f"fp32 products ({_percent(share)} of the step) run without tf32, which {facts.device} has"
    by_hand = facts.precision == facts.compute  # 16 bits without a precision of halfstep's
    wider = "torch.backends.cuda.matmul.allow_tf32 = True" if by_hand else f"{parse(facts.precision).preset},tf32=on"
    on = "precision='tf32', or tf32=True" if facts.compute == "fp32" else wider
    return [Reason("tf32", wide[0].module, wide[0].op, what, f"Switch it on ({on}): operands are rounded to 10 bits of mantissa.", share, share / 2)]
