"""Errors that torch raises because of dtypes: where, between which tensors, and what to do. torch's messages name neither module nor tensor."""

from __future__ import annotations

import re

from torch import Tensor, nn

from halfstep.tracing.findings import HALF, Fault, Finding, Place, number, range_of, short
from halfstep.tracing.observe import Event
from halfstep.tracing.products import limit

_DTYPES = re.compile(
    r"same (d?type|scalar type|data ?type)|dtypes? (must|to be|match|of)|scalar type|mixed dtype|does not match weight dtype|Input dtypes|"
    r"[Ii]nput type .* should be the same|Type promoting not supported|[Ff]ound dtype|expected dtype|not implemented for '(Half|BFloat16)'|"
    r"to have same dtypes|"
    r"to have the same type as|Expected self\.dtype"
)
_TOO_LARGE = re.compile(r"cannot be converted to type (c10::|at::)?(Half|BFloat16) without overflow")


class Mismatch:
    """Watches for an op that raised because dtypes met that do not go together, or because a constant does not fit."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._errors: list[BaseException] = []
        self._weights: dict[int, str] = {}

    def begin(self, model: nn.Module) -> None:
        """Learn the names of the weights."""
        self._found, self._errors = [], []
        self._weights = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}

    def see(self, event: Event) -> None:
        """Look at an op that raised."""
        error = event.error
        if error is None or not isinstance(error, Exception):
            return
        given = [t for t in event.inputs if t.is_floating_point()]
        formats = list(dict.fromkeys(t.dtype for t in given))
        if _TOO_LARGE.search(str(error)):
            self._add(error, _constant(event, given, str(error)))
        elif (len(formats) > 1 and any(d in HALF for d in formats)) or (any(d in HALF for d in formats) and _DTYPES.search(str(error))):
            names = " and ".join(dict.fromkeys(self._name(t, event) for t in given))
            what = f"{event.op} met {names}: torch raised {_line(error)!r}"
            ranges = tuple(range_of(t) for t in given)
            self._add(error, Finding("mismatch", event.place, what, remedy(event.place), ranges, at=event.index))

    def _add(self, error: BaseException, finding: Finding) -> None:
        self._errors.append(error)
        self._found.append(finding)

    def finding(self, error: BaseException) -> Finding | None:
        """The finding for this very error, or None."""
        return next((f for e, f in zip(self._errors, self._found, strict=True) if e is error), None)

    def _name(self, t: Tensor, event: Event) -> str:
        name = self._weights.get(id(t)) or (self._weights.get(id(t._base)) if t._base is not None else None)
        return f"{short(t.dtype)} {name or 'input'}"

    def findings(self) -> list[Finding]:
        """The errors so far; the code that was run may have caught some of them."""
        return list(self._found)


def of_error(error: BaseException, place: Place, model: nn.Module | None = None) -> Finding | None:
    """The finding for an error that no op raised (a check before it), None when it is not about dtypes. model: tells the formats of the weights."""
    text = str(error)
    if not isinstance(error, RuntimeError | ValueError | TypeError | NotImplementedError):
        return None
    fault: Fault = "mask" if _TOO_LARGE.search(text) else "mismatch"
    if fault == "mismatch" and not _DTYPES.search(text):
        return None
    own = model.get_submodule(place.module).named_parameters(recurse=False) if model is not None else ()
    weights = " and ".join(f"{short(p.dtype)} {place.module}{'.' if place.module else ''}{name}" for name, p in own)
    what = f"torch raised {_line(error)!r}" + (f", and the module has {weights}" if weights else "")
    return Finding(fault, place, what, remedy(place) if fault == "mismatch" else MASK_REMEDY)


MASK_REMEDY = "use torch.finfo(x.dtype).min of the tensor that is filled: the same code then works in every format"


def remedy(place: Place) -> str:
    """What to do where a cast is missing."""
    if place.direction == "backward":
        return "cast the gradient to the dtype of its tensor in the custom backward (grad.to(x.dtype))"
    where = f"of {place.module} " if place.module else ""
    return (
        f"cast the input {where}to the dtype of its weight (x.to(weight.dtype)), or run the forward pass inside halfstep.amp.autocast, which casts "
        "the operands of products"
    )


def _constant(event: Event, given: list[Tensor], text: str) -> Finding:
    numbers = [float(a) for a in (*event.args, *event.kwargs.values()) if isinstance(a, int | float) and not isinstance(a, bool)]
    dtype = given[0].dtype if given else event.kwargs.get("dtype")
    worst = max(numbers, key=abs, default=None)
    named = f"the constant {number(worst)}" if worst is not None else "a constant"
    ends = f", which ends at {number(limit(dtype))}" if dtype in HALF else ""
    what = f"{named} does not fit {short(dtype) if dtype is not None else '16 bits'}{ends}: torch raised {text.splitlines()[0]!r}"
    return Finding("mask", event.place, what, MASK_REMEDY, tuple(range_of(t) for t in given), at=event.index)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
