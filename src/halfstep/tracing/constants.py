"""Constants that do not fit the format they meet: an eps that becomes 0, a mask that becomes -inf, a bound that bounds nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor, nn

from halfstep.numerics import FORMATS
from halfstep.tracing.findings import HALF, Fault, Finding, Place, Range, number, range_of, short
from halfstep.tracing.observe import Event
from halfstep.tracing.tags import Collected, Tags

_ROLES = {  # what a constant is for, by op
    **dict.fromkeys(("add", "sub", "rsub"), "term"),
    **dict.fromkeys(("div", "floor_divide", "remainder", "fmod"), "divisor"),
    "mul": "factor",
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "maximum", "minimum", "fmax", "fmin", "logit"), "bound"),
    **dict.fromkeys(("masked_fill", "index_fill", "scatter", "constant_pad_nd", "fill", "full", "full_like", "new_full", "where"), "filling"),
    "scalar_tensor": "filling",
}
_BOTH = ("add", "mul", "maximum", "minimum", "fmax", "fmin", "where")  # a constant may be the first operand
_NAMED = ("other", "value", "min", "max", "min_val", "max_val", "fill_value", "s", "eps", "scalar")  # arguments that hold constants
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "addmv", "mv", "dot")
_MADE = ("scalar_tensor", "full", "lift_fresh", "_to_copy", "clone", "detach", "alias", "expand", "view")  # what leaves a constant a constant
_MASKS = -1e4  # a mask has numbers below it


@functools.cache
def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as a number of `dtype`, rounded to nearest; inf beyond the largest."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def eps_fault(value: float, dtype: torch.dtype) -> str:
    """What becomes of a number that is too small for `dtype`; "" when it is a number of it, or is 0."""
    if value == 0 or rounded(value, dtype) != 0:
        return ""
    form = FORMATS[short(dtype)]
    return f"becomes 0 in {form.name}, whose smallest number is {number(form.smallest_subnormal)}"


class Constants:
    """Python numbers and 0-dimensional constants against the 16-bit tensors they meet, in forward passes and in optimizer steps.

    Reported: a term, divisor or bound that rounds to 0 ("eps", "clamp"); a bound next to 1 that rounds to 1 ("clamp"); a constant beyond the
    largest number ("mask", "clamp"); a mask of finite numbers that becomes -inf in a cast; and, once a NaN has come of it, a mask at the lowest
    number of its format that becomes -inf in a cast or in a sum with a score. Explicit infinities are meant and are no fault; torch's norms compute
    in fp32 inside, and their eps is none either.
    """

    def __init__(self) -> None:
        self._found = Collected()
        self._computed: Tags[bool] = Tags()  # 0-dimensional results, which are no constants
        self._products: Tags[bool] = Tags()
        self._waiting: list[Finding] = []  # masks that became -inf, until a NaN comes of one

    def begin(self, model: nn.Module) -> None:
        """Look at buffers that hold an eps and have become 0 in 16 bits."""
        for name, part in model.named_modules():
            for own, buffer in part._buffers.items():
                if buffer is not None and buffer.dtype in HALF and buffer.dim() == 0 and "eps" in own.lower() and float(buffer) == 0:
                    self._add(
                        Finding(
                            "eps",
                            Place(name, type(part).__name__, own),
                            f"the buffer {own} is 0 in {short(buffer.dtype)}: the eps it held was smaller than the format's smallest number",
                            f"Keep {own} as a Python number or in fp32, and at least 1e-4 where it meets fp16.",
                        ),
                        own,
                    )

    def see(self, event: Event) -> None:
        """Look at one op."""
        self._computed.follow(event)
        self._products.follow(event)
        base = _base(event)
        if base in _PRODUCTS and event.outputs:
            self._products.put(event.outputs[0], True)
        elif event.outputs and event.outputs[0].dim() == 0 and not (base in _MADE and all(self._is_constant(t) for t in event.inputs)):
            self._computed.put(event.outputs[0], True)
        if event.backward:
            return
        if self._waiting:
            self._confirm(event)
        dtype = _format(event)
        if dtype not in HALF:
            return
        if base == "_to_copy":
            self._cast(event, dtype)
            return
        role = _ROLES.get(base)
        if role is None:
            return
        for value in self._numbers(event, base):
            self._judge(event, role, value, dtype)
        if base == "add" and event.outputs:
            self._pushed_over(event)

    def modules(self) -> list[tuple[Finding, tuple[str, ...]]]:
        """The same, each with all modules that have it."""
        return self._found.modules()

    def findings(self) -> list[Finding]:
        """One finding for each constant on each line; how many modules share it is said."""
        return self._found.findings()

    def _add(self, finding: Finding, key: Hashable) -> None:
        place = finding.place
        self._found.add(finding, place.op, place.source or place.module, key)

    def _numbers(self, event: Event, base: str) -> Iterator[float]:
        """The constants among the arguments of an op."""
        schema = event.func._schema.arguments
        given = [(schema[i].name, value) for i, value in enumerate(event.args) if i < len(schema)]
        for name, value in (*given, *event.kwargs.items()):
            if isinstance(value, bool) or not (name in _NAMED or (name == "self" and base in _BOTH)):
                continue
            if isinstance(value, int | float) or (
                isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() and self._is_constant(value)
            ):
                yield float(value)

    def _is_constant(self, t: Tensor) -> bool:
        return not t.requires_grad and not t.is_meta and self._computed.get(t) is None

    def _judge(self, event: Event, role: str, value: float, dtype: torch.dtype) -> None:
        """Report a constant that `dtype` turns into another thing than its role needs."""
        if value == 0 or not math.isfinite(value):
            return
        near, form = rounded(value, dtype), FORMATS[short(dtype)]
        if math.isinf(near):
            self._beyond(event, role, value, dtype)
        elif near == 0:
            smallest = eps_fault(value, dtype)
            if role == "term":
                self._report(event, "eps", value, f"the constant {number(value)} {smallest}, so it adds nothing", _eps(dtype))
            elif role == "divisor":
                self._report(event, "eps", value, f"the divisor {number(value)} {smallest}, so it divides by 0", _eps(dtype))
            elif role == "bound":
                self._report(event, "clamp", value, f"the bound {number(value)} {smallest}, so it keeps nothing away from 0", _eps(dtype))
            elif role == "filling":
                self._report(event, "eps", value, f"the constant {number(value)} {smallest}", _eps(dtype))
            elif event.outputs and not event.outputs[0].any() and any(t.dim() and t.is_floating_point() and bool(t.any()) for t in event.inputs):
                self._report(event, "eps", value, f"the factor {number(value)} {smallest}, and the whole product is 0", _eps(dtype))
        elif role == "bound" and (_becomes_one(value, dtype) or (_base(event) == "logit" and _becomes_one(1 - value, dtype))):
            bound = value if _becomes_one(value, dtype) else 1 - value
            self._report(
                event,
                "clamp",
                value,
                f"the bound {_digits(bound)} becomes {number(rounded(bound, dtype))} in {form.name}, whose steps below 1 are "
                f"{number(form.epsilon / 2)}, so it keeps nothing away from 1",
                "Compute this in fp32; for a loss on probabilities use its form on logits (F.binary_cross_entropy_with_logits).",
            )

    def _beyond(self, event: Event, role: str, value: float, dtype: torch.dtype) -> None:
        if role == "divisor":
            return
        form, outcome = FORMATS[short(dtype)], "inf" if value > 0 else "-inf"
        fate = "and torch refuses it" if event.error is not None else f"and becomes {outcome}"
        what = f"{number(value)}, which is beyond {form.name}'s limit of {number(form.largest)} {fate}"
        if role == "bound":
            self._report(event, "clamp", value, f"the bound is {what}: it bounds nothing", f"Use a bound within {form.name}, or clamp in fp32.")
        elif role != "factor" or (event.outputs and not bool(event.outputs[0].isfinite().all())):
            self._masked(event, value, f"the constant is {what}")

    def _cast(self, event: Event, dtype: torch.dtype) -> None:
        """A mask of finite numbers, or an eps, that a cast has changed."""
        given, made = event.inputs[0] if event.inputs else None, event.outputs[0] if event.outputs else None
        if given is None or made is None or given.dtype not in (torch.float32, torch.float64) or given.is_meta or not given.numel():
            return
        if given.dim() == 0:
            if self._is_constant(given):
                self._judge(event, "filling", float(given), dtype)
        elif self._products.get(given) is None and bool(made.isinf().any()):
            value = _lowest_of_mask(given)
            if value is not None and math.isinf(rounded(value, dtype)):
                form = FORMATS[short(dtype)]
                what = f"the mask's {number(value)} is beyond {form.name}'s limit of {number(form.largest)} and becomes -inf in the cast"
                self._masked(event, value, what)

    def _masked(self, event: Event, value: float, what: str) -> None:
        """Report a mask that became -inf; the lowest number of fp32, which means -inf, only once a NaN has come of it."""
        if value == -FORMATS["fp32"].largest and event.error is None:
            what = f"{what}, and a row with nothing else in it became NaN"
            self._waiting.append(Finding("mask", event.place, what, _mask(value), _ranges(event), range_of(event.outputs[0]), at=event.index))
        else:
            self._report(event, "mask", value, what, _mask(value))

    def _pushed_over(self, event: Event) -> None:
        """A mask at the format's lowest number, and a score that pushes the sum to -inf."""
        made, given = event.outputs[0], [t for t in event.inputs if t.is_floating_point() and t.dim()]
        if len(given) != 2 or made.is_meta or not bool((made == -math.inf).any()):
            return
        given = given[1:] if event.mutable else given  # the first one is the sum already
        if not all(bool(t.isfinite().all()) for t in given):
            return
        for mask in given:
            value, lowest = _lowest_of_mask(mask), float(mask.amin())
            if value is None and lowest == -FORMATS[short(made.dtype)].largest:
                value = lowest
            if value is not None:
                what = (
                    f"the mask's {number(value)} plus the scores it is added to is beyond {short(made.dtype)} and becomes -inf, and a row with "
                    "nothing else in it became NaN"
                )
                self._waiting.append(Finding("mask", event.place, what, _mask(value), _ranges(event), range_of(made), at=event.index))
                return

    def _confirm(self, event: Event) -> None:
        """Report the waiting masks when this op makes a NaN of a -inf."""
        if not any(t.is_floating_point() and bool(t.isnan().any()) for t in event.outputs):
            return
        given = [t for t in event.inputs if t.is_floating_point()]
        if any(bool(t.isinf().any()) for t in given) and not any(bool(t.isnan().any()) for t in given):
            for finding in self._waiting:
                self._add(finding, "pushed over")
            self._waiting = []

    def _report(self, event: Event, fault: Fault, value: float, what: str, remedy: str) -> None:
        output = range_of(event.outputs[0]) if event.outputs else None
        self._add(Finding(fault, event.place, what, remedy, _ranges(event), output, at=event.index), value)


def _base(event: Event) -> str:
    """The op without the spelling that writes in place or takes lists: "add" for add_ and _foreach_add_."""
    return event.base.removeprefix("_foreach_").rstrip("_")


def _format(event: Event) -> torch.dtype | None:
    """The format an op computes in, as its constants see it."""
    if event.outputs:
        return event.outputs[0].dtype
    if event.mutable and event.error is None:
        return event.inputs[0].dtype if event.inputs else None
    if event.error is None or "without overflow" not in str(event.error):
        return None
    named = event.kwargs.get("dtype")
    return named if named is not None else next((t.dtype for t in event.inputs if t.dtype in HALF), None)


def _becomes_one(value: float, dtype: torch.dtype) -> bool:
    return abs(value) != 1 and abs(rounded(value, dtype)) == 1


def _lowest_of_mask(t: Tensor) -> float | None:
    """The number that an additive mask has where it masks, when the tensor is one: nothing but 0 and one number far below it."""
    if not t.numel() or t.is_meta:
        return None
    lowest = float(t.amin())
    if not (lowest <= _MASKS and math.isfinite(lowest)):
        return None
    return lowest if bool(((t == 0) | (t == lowest)).all()) else None


def _ranges(event: Event) -> tuple[Range, ...]:
    return tuple(range_of(t) for t in event.inputs[:3])


def _digits(value: float) -> str:
    return f"{value:.10g}"


def _eps(dtype: torch.dtype) -> str:
    form = FORMATS[short(dtype)]
    return f"Compute this in fp32, or use at least {number(form.smallest_normal)} ({form.name}'s smallest number with all its bits)."


def _mask(value: float) -> str:
    if value > 0:
        return "Compute this in fp32, or use a number that the format has."
    return "Mask with -inf by masked_fill where no row is masked as a whole, else add the mask in fp32 (scores.float()) and take the softmax there."
