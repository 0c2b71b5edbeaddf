"""The first values that are not finite, and what became of them.

Every tensor that holds an inf or a NaN carries the number of the op that it descends from, so that a loss or a gradient names the op where its NaN
was born, and an inf that comes to nothing (exp overflows, 1 / (1 + inf) is 0) is no fault. An inf that the code writes itself (a mask) is none
either; the NaN that it becomes where a whole row is masked is.

Tensors are known by their memory, since autograd makes new tensors over it. Memory is forgotten when an op fills it anew with finite values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.amp.rehearsal import storage_of, written
from halfstep.tracing.findings import HALF, Fault, Finding, Place, Range, number, range_of, short
from halfstep.tracing.observe import Event, quiet, tensors_in
from halfstep.tracing.products import Products, held, is_bad, is_product, limit

UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_")
LINEAGE = 8  # ancestors that one tensor is said to have
_DIVIDES = frozenset(("div", "reciprocal", "rsqrt", "true_divide", "floor_divide", "fmod", "remainder"))
_ROOTS = ("sqrt", "rsqrt", "norm", "linalg_vector_norm", "pow", "std", "var", "div", "reciprocal")
_SOFTMAX = ("softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "exp", "sub")


@dataclass(frozen=True)
class Mark:
    """Where the non-finite values of some memory come from: births, by number. None: written on purpose. unwritten: memory that nobody filled."""

    births: tuple[int, ...] = ()
    unwritten: bool = False

    @property
    def meant(self) -> bool:
        """Whether the code itself wrote it."""
        return not self.births and not self.unwritten


class Births:
    """Finds where values that are not finite came to be. `trace` of the loss and the gradients gives those that matter."""

    def __init__(self) -> None:
        self.products = Products()
        self._births: list[Finding] = []
        self._marks: dict[int, Mark] = {}
        self._weights: dict[int, str] = {}
        self._bad_weights: set[int] = set()
        self._given: dict[int, str] = {}
        self._alive: list[Tensor] = []  # tensors that are known by name: their memory stays theirs
        self._number: tuple[int, ...] = ()  # ancestors of the last non-finite number that was read to Python
        self._ends: tuple[int, ...] | None = None

    def begin(self, model: nn.Module) -> None:
        """Learn the names of weights and buffers."""
        self.products.begin(model)
        self._births, self._marks, self._number, self._ends = [], {}, (), None
        named = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if not torch.nn.parameter.is_lazy(t)}
        self._weights = {key: name for name, t in named.items() if (key := storage_of(t)) is not None}
        self._bad_weights = {key for t in named.values() if (key := storage_of(t)) is not None and is_bad(t)}

    def know(self, given: Mapping[str, Tensor]) -> None:
        """The names of tensors that the run is given: "batch['x']"."""
        self._alive += given.values()
        self._given |= {key: name for name, t in given.items() if (key := storage_of(t)) is not None}

    def see(self, event: Event) -> None:
        """Follow what is not finite through one op."""
        if event.error is not None:
            return
        if event.base == "_local_scalar_dense" and event.inputs and is_bad(event.inputs[0]):
            self._number = self._lineage(event, (event.inputs[0],)) or ()
        for out in event.outputs or _written(event):
            key = storage_of(out)
            if key is None:
                continue
            if event.base in UNWRITTEN:
                self._marks.pop(key, None)
                if is_bad(out):
                    self._marks[key] = Mark(unwritten=True)
            elif not is_bad(out):
                if not event.is_view and out.numel() * out.element_size() >= out.untyped_storage().nbytes():
                    self._marks.pop(key, None)
            elif not event.is_view:
                self._mark(event, out, key)
                if "batch_norm" in event.base:
                    self._spread(event, self._marks[key])
        self.products.see(event)

    def _mark(self, event: Event, out: Tensor, key: int) -> None:
        """Say where the values of an output that are not finite come from."""
        before = self._marks.get(key) if event.mutable else None
        if before is not None and before.births:
            return
        parents = self._parents(event, key)
        births = tuple(sorted({b for p in parents for b in p.births}))[:LINEAGE]
        constants = _constants(event)
        meant = before is not None or bool(parents) or any(not math.isfinite(c) for c in constants)
        if births:
            self._marks[key] = Mark(births)
        elif any(p.unwritten for p in parents):
            what, remedy = "it reads memory that was never written (torch.empty)", "fill the tensor before it is read (torch.zeros)"
            self._born(Finding("nonfinite", event.place, what, remedy, at=event.index), key)
        elif any(not math.isfinite(c) for c in constants) and self._number and event.base not in ("masked_fill", "masked_fill_", "full", "full_like"):
            self._marks[key] = Mark(self._number)
        elif meant and not bool(out.isnan().any()):
            self._marks[key] = Mark()
        elif meant:
            self._born(_from_mask(event, out), key)
        elif event.base == "lift_fresh" and out.numel() == 1 and not bool(out.isnan()):
            self._marks[key] = Mark()  # torch.tensor(-inf)
        else:
            self._born(self._birth(event, out), key)

    def _parents(self, event: Event, out: int) -> list[Mark]:
        """The marks of the inputs that are not finite."""
        found = []
        changed = {storage_of(t) for t in _written(event)} if event.mutable else set()
        for t in event.inputs:
            key = storage_of(t)
            if key is None or key in changed or not is_bad(t):
                continue
            if key in self._weights and key not in self._bad_weights and key not in self._marks:
                continue  # running statistics, which batch norms write to without saying so
            found.append(self._marks.get(key) or self._root(event, t, key))
        return found

    def _spread(self, event: Event, mark: Mark) -> None:
        """The running statistics that an op has written to are as bad as its result."""
        for t in event.inputs:
            key = storage_of(t)
            if key is not None and key in self._weights and key not in self._marks and is_bad(t):
                self._marks[key] = mark

    def _lineage(self, event: Event, tensors: Iterable[Tensor]) -> tuple[int, ...] | None:
        """The births that the non-finite ones of some tensors descend from; None when all are finite."""
        marks = [self._marks.get(key) for t in tensors if is_bad(t) and (key := storage_of(t)) is not None]
        return tuple(sorted({b for m in marks if m is not None for b in m.births})) if marks else None

    def _root(self, event: Event, t: Tensor, key: int) -> Mark:
        """A tensor that no op has made: a weight, the data, or a constant."""
        finite = t[t.isfinite()]
        weight, name = self._weights.get(key), self._given.get(key)
        flat = not bool(t.isnan().any()) and (t.numel() == 1 or not bool((t == math.inf).any()))
        if flat and (t.numel() == 1 or not finite.numel() or bool((finite == finite[0]).all()) or (weight is not None and not t.requires_grad)):
            self._marks[key] = Mark()  # a mask: -inf beside one other number
            return self._marks[key]
        seen = range_of(t)
        bad = " and ".join(f"{count} {word}" for count, word in ((seen.nan, "NaN"), (seen.inf, "inf")) if count)
        fault: Fault = "data" if weight is None else "weights"
        what = f"{weight or name or 'a tensor given to it'} holds {bad} of {t.numel()} values before anything has run"
        remedy = (
            "look at this batch, and drop or mend the samples that are not finite"
            if weight is None
            else "load the last good checkpoint; halfstep's steps refuse updates that are not finite"
        )
        self._born(Finding(fault, event.place, what, remedy, (seen,), at=event.index), key)
        return self._marks[key]

    def _born(self, finding: Finding, key: int) -> None:
        self._births.append(finding)
        self._marks[key] = Mark((len(self._births) - 1,))

    def _birth(self, event: Event, out: Tensor) -> Finding:
        """An op that made something of finite inputs that is not finite."""
        seen = range_of(out)
        constant = _too_large(event, out)
        if constant is not None:
            what = f"the constant {number(constant)} does not fit {short(out.dtype)}, which ends at {number(limit(out.dtype))}: it became inf"
            return _finding("mask", event, what, _MASK_REMEDY, out=seen)
        if event.base == "_to_copy" and out.dtype in HALF:
            return self._cast_birth(event, out, seen)
        inputs = tuple(range_of(t) for t in event.inputs if t.is_floating_point())
        wide = _in_fp32(event, out)
        if wide is not None and wide.finite:
            name = "the product" if is_product(event) else f"the result of {event.op}"
            what = f"{name} reaches {number(wide.largest)}, and {short(out.dtype)} ends at {number(limit(out.dtype))}"
            return _finding("overflow", event, what, _overflow_remedy(event.place), inputs, seen)
        if wide is None and out.dtype in HALF and not seen.nan:
            what = f"{event.op} goes beyond {number(limit(out.dtype))}, where {short(out.dtype)} ends"
            return _finding("overflow", event, what, _overflow_remedy(event.place), inputs, seen)
        what, remedy = _by_op(event, seen)
        return _finding("nonfinite", event, what, remedy, inputs, seen)

    def _cast_birth(self, event: Event, out: Tensor, seen: Range) -> Finding:
        """A cast to 16 bits of finite values: the product before it, a mask, or a plain cast."""
        given = range_of(event.inputs[0])
        end = f"{short(out.dtype)} ends at {number(limit(out.dtype))}"
        product = self.products.before(event)
        if product is not None:
            what = f"the product reaches {number(given.largest)}, and {end}"
            inputs = tuple(replace(r, dtype=out.dtype) for r in product.inputs)
            return replace(_finding("overflow", event, what, _overflow_remedy(event.place), inputs, seen), place=replace(event.place, op=product.op))
        lost = event.inputs[0][out.isinf()]
        if given.largest >= 1e30 or (bool((lost == lost[0]).all()) and float(lost[0]) < 0 and lost.numel() > 1 and given.shape):
            what = f"the constant {number(float(lost[0]))} is cast to {short(out.dtype)}, which ends at {number(limit(out.dtype))}: it became inf"
            return _finding("mask", event, what, _MASK_REMEDY, (given,), seen)
        what = f"a value of {number(given.largest)} is cast to {short(out.dtype)}, and {end}"
        return _finding("overflow", event, what, _overflow_remedy(event.place), (given,), seen)

    def blame(self, ends: Iterable[Tensor]) -> bool:
        """Report only what these tensors (the loss, the gradients) descend from. Returns whether one of them is not finite."""
        with quiet():
            bad = [t for t in ends if is_bad(t)]
        marks = [self._marks.get(key) for t in bad if (key := storage_of(t)) is not None]
        self._ends = tuple(sorted({*(self._ends or ()), *(b for m in marks if m is not None for b in m.births)}))
        return bool(bad)

    def findings(self) -> list[Finding]:
        """The births that the ends descend from (all, before `blame` was called), earliest first; if any is forward, only those."""
        chosen = [self._births[i] for i in (range(len(self._births)) if self._ends is None else self._ends)]
        forward = [f for f in chosen if f.place.direction == "forward"]
        return forward or chosen  # what a backward pass makes of a forward pass that went wrong is no news


_MASK_REMEDY = "use torch.finfo(x.dtype).min of the tensor that is masked, or compute the masked softmax in fp32"


def _finding(fault: Fault, event: Event, what: str, remedy: str, inputs: tuple[Range, ...] = (), out: Range | None = None) -> Finding:
    return Finding(fault, event.place, what, remedy, inputs, out, at=event.index)


def _overflow_remedy(place: Place) -> str:
    if place.direction == "backward":
        return f"lower the loss scale (halfstep's dynamic scale does it by itself); if it is 1, {held(place.module)}"
    return held(place.module)


def _from_mask(event: Event, out: Tensor) -> Finding:
    """An inf that was written on purpose has become a NaN."""
    rows = f" ({int(out.isnan().sum())} of {out.numel()} values)"
    if event.op in _SOFTMAX or "softmax" in event.forward_op:
        what = f"a whole row is masked, and {event.op} of nothing but -inf is NaN{rows}"
        remedy = "leave one position of every row unmasked, or mask with torch.finfo(x.dtype).min instead of -inf"
    else:
        what = f"{event.op} made NaN of an inf that was written on purpose{rows}"
        remedy = "select with torch.where or masked_fill instead of multiplying or subtracting an inf"
    return _finding("mask", event, what, remedy, tuple(range_of(t) for t in event.inputs if t.is_floating_point()), range_of(out))


def _by_op(event: Event, seen: Range) -> tuple[str, str]:
    """What to say of an op whose result is not finite in fp32 either."""
    kind = "NaN" if seen.nan else "inf"
    of = f"the backward pass of {event.forward_op or event.op}" if event.backward else event.op
    what = f"{of} gives {kind} for finite inputs, in fp32 too ({seen.nan} NaN, {seen.inf} inf of {math.prod(seen.shape)} values)"
    zero = any(bool((t == 0).any()) for t in event.inputs)
    if (event.base in _DIVIDES or (event.backward and event.forward_op in _ROOTS)) and zero:
        return f"{what}: a division by 0", "add an eps that the format can hold to the divisor, inside of a square root"
    if event.base.startswith("log") and zero:
        return f"{what}: the logarithm of 0", "use the form that takes logits (log_softmax, logsigmoid), or clamp the argument"
    return what, "the numbers are at fault and not the format: look at the inputs, the learning rate and the initialisation"


def _constants(event: Event) -> list[float]:
    """The numbers among the arguments of an op, those given as tensors without dimensions too."""
    found = [float(a) for a in (*event.args, *event.kwargs.values()) if isinstance(a, int | float) and not isinstance(a, bool)]
    return found + [
        float(a)
        for a in event.args
        if isinstance(a, Tensor)
        and a.dim() == 0
        and a.is_floating_point()
        and not a.requires_grad
        and event.base in ("where", "masked_fill", "masked_fill_")
    ]


def _too_large(event: Event, out: Tensor) -> float | None:
    """A finite constant of an op that its 16-bit result cannot hold."""
    if out.dtype not in HALF or event.backward:
        return None
    return next((c for c in _constants(event) if math.isfinite(c) and abs(c) > limit(out.dtype)), None)


def _written(event: Event) -> list[Tensor]:
    """The arguments that an op has written to."""
    return written(event.func, event.args, event.kwargs) if event.mutable else []


def _in_fp32(event: Event, out: Tensor) -> Range | None:
    """The range of the same op's result on fp32 copies of its inputs; None when that cannot be known."""
    results = again_in_fp32(event) if out.dtype in HALF else None
    first = next((t for t in results or () if t.shape == out.shape and t.is_floating_point()), None)
    return range_of(first) if first is not None else None


def again_in_fp32(event: Event) -> tuple[Tensor, ...] | None:
    """The results of an op on fp32 copies of its inputs; None for one that writes to them or draws random numbers, or is there in 16 bits only."""
    func = event.func
    if event.mutable or not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
        return None

    def up(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().float() if value.dtype in HALF else value
        return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value

    try:
        return tensors_in(func(*tree_map(up, event.args), **tree_map(up, event.kwargs)))
    except (RuntimeError, TypeError):
        return None
