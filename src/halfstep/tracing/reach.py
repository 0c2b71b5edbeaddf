"""How far the values of a run reach, by place; and which of these values another run would have in 16 bits, beyond what those can hold.

Two runs of the same code. The first, in fp32, is asked how far each value reaches (`Reach`). In the second, under a precision, only formats are
looked at (`Narrow`): a value that is 16-bit there, and that reached too far in the first, is a fault of the module that made it so. Nothing needs to
overflow to be found, and what has overflowed already does not hide what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.tracing.findings import HALF
from halfstep.tracing.observe import Event
from halfstep.tracing.products import is_product, limit
from halfstep.tracing.tags import Tags

MASKED = -1e7  # what stands below it, outside of products, is there to be masked away
MASK = -1e4  # a tensor of 0 and one number below this is a mask
_CASTS = ("_to_copy", "copy")
_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_HANDS_ON = ("clone", "detach", "_reshape_alias", "_unsafe_view", "contiguous", "alias", "cat", "stack", "repeat", "expand")
Key = tuple[str, str, str]  # module, line of the user's code, op


@dataclass(frozen=True)
class Far:
    """Magnitudes in one place, over a whole run. given: of what a product multiplies, 0 for other ops. made: of the results."""

    given: float = 0.0
    made: float = 0.0

    @property
    def largest(self) -> float:
        """The larger of the two."""
        return max(self.given, self.made)

    def __or__(self, other: Far) -> Far:
        return Far(max(self.given, other.given), max(self.made, other.made))


def key_of(event: Event) -> Key:
    """Where an op ran, as another run of the same code says it too."""
    place = event.place
    return place.module, place.source, "product" if is_product(event) else event.base.rstrip("_")


def reach_of(t: Tensor, product: bool = False) -> float:
    """The largest finite magnitude of a floating tensor; 0 where it has none. Masks do not count, unless a product made them."""
    if t.is_meta or not t.numel() or not t.is_floating_point() or t.layout != torch.strided:
        return 0.0
    lowest, highest = (float(x) for x in t.detach().float().aminmax())
    if not product and lowest <= MASK and bool(((t == 0) | (t == lowest)).all()):
        return 0.0
    usual = lowest == lowest and highest < float("inf") and (lowest > float("-inf") if product else lowest > MASKED)
    if usual:
        return max(abs(lowest), abs(highest))
    values = t.detach().float()
    kept = values.isfinite() if product else values.isfinite() & (values > MASKED)
    return float(torch.where(kept, values.abs(), 0.0).amax())


class Reach:
    """Measures each floating result of the forward pass. `far`: by place."""

    def __init__(self) -> None:
        self.far: dict[Key, Far] = {}

    def begin(self, model: nn.Module) -> None:
        """Nothing: several runs add up."""

    def see(self, event: Event) -> None:
        """Measure one op; of a product its operands too, without the mask of an attention."""
        if event.backward or event.error is not None or not event.outputs or event.is_view or event.base in _UNFILLED:
            return
        product = is_product(event)
        made = max((reach_of(t, product) for t in event.outputs[:1] if t.dtype != torch.float64), default=0.0)
        given = max((reach_of(t, True) for t in event.inputs[:3]), default=0.0) if product else 0.0
        key = key_of(event)
        self.far[key] = self.far.get(key, Far()) | Far(given, made)

    def findings(self) -> list[object]:
        """None: it only measures."""
        return []

    def of(self, key: Key) -> Far | None:
        """What was measured in a place."""
        return self.far.get(key)


@dataclass(frozen=True)
class Offence:
    """A value that is 16-bit in a module and reaches too far.

    module, kind: in whose forward pass. op, source: of which line. far: how far the value reaches in fp32. inherited: it comes of one that had
    reached too far before. read: it was made in fp32, elsewhere, and is cast here. operands: the modules that the values come from, largest first.
    """

    module: str
    kind: str
    op: str
    source: str
    far: Far
    inherited: bool
    read: bool = False
    operands: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Note:
    """What is known of a tensor: where it was made, how far it reaches, and whether it is, or comes straight of, a 16-bit one beyond the range."""

    module: str
    far: float
    hot: bool


class Narrow:
    """Looks for values in 16-bit `dtype` that, times `growth`, reach beyond its largest number. `offences`: in the order of the run, one a place."""

    def __init__(self, reach: Reach, dtype: torch.dtype, growth: float) -> None:
        self._reach, self._dtype = reach, dtype
        self._end = limit(dtype) / growth
        self._notes: Tags[_Note] = Tags()
        self._found: dict[Key, Offence] = {}
        self._products = {key[:2]: far for key, far in reach.far.items() if key[2] == "product"}

    def begin(self, model: nn.Module) -> None:
        """Forget which tensors were seen."""
        self._notes = Tags()

    @property
    def offences(self) -> tuple[Offence, ...]:
        """Those found so far."""
        return tuple(self._found.values())

    def findings(self) -> list[object]:
        """None: what is found are offences."""
        return []

    def see(self, event: Event) -> None:
        """Look at the format of one result."""
        given = [(t, note) for t in event.inputs if (note := self._notes.get(t)) is not None]
        self._notes.follow(event)
        if event.backward or event.error is not None or not event.outputs or not event.outputs[0].is_floating_point() or event.base in _UNFILLED:
            return
        out, base, key = event.outputs[0], event.base.rstrip("_"), key_of(event)
        hot = any(note.hot for _, note in given)
        cast = base in _CASTS
        if event.is_view or base in _HANDS_ON:
            self._hand_on(out, given)
            return
        at_product = self._products.get(key[:2])
        far, source = self._far_of(event, key, given, cast)
        if cast and at_product is not None and out.dtype == self._dtype:
            far = at_product
        beyond = out.dtype == self._dtype and far.largest > self._end
        if beyond and key not in self._found:
            read = cast and at_product is None and source is not None and source != key[0]
            places = tuple(dict.fromkeys(note.module for _, note in sorted(given, key=lambda pair: -pair[1].far)))
            self._found[key] = Offence(key[0], event.place.kind, event.op, key[1], far, hot, read, places)
        passes = cast or (is_product(event) and out.dtype != self._dtype)
        self._notes.put(out, _Note(source if source is not None else key[0], far.made, beyond or (hot and passes)))

    def _far_of(self, event: Event, key: Key, given: list[tuple[Tensor, _Note]], cast: bool) -> tuple[Far, str | None]:
        """How far a result reaches in fp32, and the module that it comes from where it is a cast of what was made in this run."""
        if not cast:
            return self._reach.of(key) or Far(), None
        source = event.inputs[-1] if event.inputs else event.outputs[0]
        note = next((note for t, note in given if t is source), None)
        if note is not None:
            return Far(0.0, note.far), note.module
        own = reach_of(source) if source.dtype not in HALF else 0.0  # a weight, a buffer, an input: what it holds is no result of this run
        return Far(0.0, own), None

    def _hand_on(self, out: Tensor, given: list[tuple[Tensor, _Note]]) -> None:
        if given:
            largest = max((note for _, note in given), key=lambda note: note.far)
            self._notes.put(out, _Note(largest.module, largest.far, any(note.hot for _, note in given)))
