"""Products (linear layers, convolutions, attention): how close their results come to the limit of their format.

On a CPU without 16-bit instructions halfstep multiplies rounded operands in fp32 and casts the result. There the product that overflows is the
op before the cast; it is remembered with the ranges of its operands until its memory is written again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from halfstep.amp.rehearsal import storage_of
from halfstep.numerics import stored
from halfstep.tracing.findings import CLOSEST, HALF, Finding, Place, Range, number, range_of, short
from halfstep.tracing.observe import Event

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot", "vdot", "convolution", "linear", "einsum", "matmul"))
NEAR = 0.5  # of the limit: one doubling away


@dataclass(frozen=True)
class Product:
    """One product: what it is called, the ranges of its operands, the largest finite magnitude of its result, and where it ran."""

    op: str
    inputs: tuple[Range, ...]
    largest: float
    place: Place
    at: int


def is_product(event: Event) -> bool:
    """Whether an op sums products."""
    return event.base in PRODUCTS or event.base.startswith("_scaled_dot_product")


def limit(dtype: torch.dtype) -> float:
    """The largest finite number of a format."""
    return float(torch.finfo(dtype).max)


def magnitude(t: Tensor) -> float:
    """The largest finite magnitude of a floating tensor, 0 when it has none."""
    if not t.numel():
        return 0.0
    largest = float(t.abs().amax())
    if largest < float("inf"):
        return largest
    return float(t.abs().nan_to_num(0.0, 0.0, 0.0).amax())


def is_bad(t: Tensor) -> bool:
    """Whether a floating tensor holds a value that is not finite."""
    if not (t.is_floating_point() or t.is_complex()) or t.is_meta or not t.numel():
        return False
    values = stored(t)
    if values.itemsize < 2:
        values = values.float()
    if values.dtype in (*HALF, torch.float32) and math.isfinite(float(values.sum(dtype=torch.float32))):
        return False  # one pass, and right: only a sum of fp32 numbers may overflow where none of them has
    return not bool(values.isfinite().all())


class Products:
    """Follows products. `shares`: largest result over limit (inf when it overflowed), by module, of the 16-bit products of the forward pass."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self._wide: dict[int, Product] = {}  # fp32 results by memory, where a cast to 16 bits may follow
        self._near: dict[str, Finding] = {}

    def begin(self, model: nn.Module) -> None:
        """Forget earlier runs."""
        self.shares, self._wide, self._near = {}, {}, {}

    def see(self, event: Event) -> None:
        """Measure a product; a cast of one too."""
        if event.error is not None or not event.outputs:
            return
        out = event.outputs[0]
        if is_product(event):
            if out.dtype in HALF:
                self._note(event, event.op, out, event.inputs, ())
            elif out.dtype == torch.float32 and (key := storage_of(out)) is not None:
                largest = magnitude(out)
                near = largest > NEAR * limit(torch.float16)
                ranges = tuple(range_of(t) for t in event.inputs) if near else ()
                self._wide[key] = Product(event.op, ranges, largest, event.place, event.index)
        elif event.base == "_to_copy" and out.dtype in HALF:
            product = self.before(event)
            if product is not None:
                ranges = tuple(replace(r, dtype=out.dtype) for r in product.inputs)  # their values are 16-bit ones
                self._note(event, product.op, out, (), ranges)
        elif not event.is_view:
            for t in event.outputs:
                key = storage_of(t)
                if key is not None:
                    self._wide.pop(key, None)

    def before(self, event: Event) -> Product | None:
        """The fp32 product whose result this op casts, in the same module, or None."""
        given = event.inputs[0] if event.inputs else None
        product = self._wide.get(storage_of(given) or 0) if given is not None and given.dtype == torch.float32 else None
        return product if product is not None and (product.place.module, product.place.source) == (event.place.module, event.place.source) else None

    def _note(self, event: Event, op: str, out: Tensor, inputs: tuple[Tensor, ...], ranges: tuple[Range, ...]) -> None:
        if event.backward:
            return
        largest, end = magnitude(out), limit(out.dtype)
        if is_bad(out) and not bool(out.isnan().any()) and not any(map(is_bad, event.inputs)):
            largest = math.inf  # it has made the inf itself, which is no mask that was added
        name = event.place.named or event.place.source
        share = largest / end
        if share <= self.shares.get(name, 0.0):
            return
        self.shares[name] = share
        if share > NEAR:
            place = replace(event.place, op=op)
            what = f"the product reaches {number(largest)}, and {short(out.dtype)} ends at {number(end)}: a growth by {end / largest:.2g} overflows"
            if math.isinf(share):
                what = f"the product goes beyond {number(end)}, where {short(out.dtype)} ends, and becomes inf; what follows has made it finite again"
            self._near[name] = Finding(
                "near",
                place,
                what,
                held(place.module, "" if math.isinf(share) else "if it grows"),
                ranges or tuple(range_of(t) for t in inputs),
                range_of(out),
                at=event.index,
            )

    @property
    def closest(self) -> tuple[tuple[str, float], ...]:
        """Modules by how close their products came to the limit, worst first; those below a thousandth of it are left out."""
        found = sorted(self.shares.items(), key=lambda item: -item[1])
        return tuple((name, share) for name, share in found if share >= 1e-3)[:CLOSEST]

    def findings(self) -> list[Finding]:
        """Products within 2x of the limit, one a module."""
        return list(self._near.values())


def held(module: str, when: str = "") -> str:
    """The remedy that holds a module in fp32."""
    when = f" {when}" if when else ""
    if not module:
        return f"compute this line in fp32{when} (x.float(), or halfstep.amp.autocast(enabled=False)), or train in bf16, which has fp32's range"
    return f"hold it in fp32{when} (fp32={module} in the precision), or train in bf16, which has fp32's range"
