"""A book of every op of one run: formats, sizes, bytes, operations, who asked for a cast, and which tensor came from where.

The tensors of a run get numbers as they appear, so that what is written here can be read as a graph when they are gone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from halfstep.amp.mode import opened
from halfstep.amp.rehearsal import storage_of
from halfstep.tracing.costs import Class, bytes_of, class_of, flops_of
from halfstep.tracing.findings import Finding, Place
from halfstep.tracing.observe import Event

By = Literal["", "product", "list", "edge", "autocast", "model", "backward"]
KEPT = 64 * 2**20  # bytes of integer arguments (ids, masks, places) that are kept, so that an op can be run again on them
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HALFSTEP = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LOOKERS = tuple(os.path.join(_HALFSTEP, part) + os.sep for part in ("tracing", "diagnostics", "cli"))
_DEMO = os.path.join(_HALFSTEP, "demo") + os.sep
_PASSING = ("mode.py", "autocast.py", "whole.py", "settling.py", "pins.py", "rehearsal.py", "large.py", "recycled.py", "loss.py", "dropout.py")
_SPOKEN = frozenset((Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as, Tensor.copy_))


@dataclass(frozen=True)
class Operand:
    """One tensor of an op. number: of the memory it stands in, by order of appearance. weight: it is a leaf that a gradient is made for.

    given: nothing in the run has made it (a weight, a buffer, the batch).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    number: int = -1
    weight: bool = False
    given: bool = False
    value: Tensor | None = field(default=None, compare=False, repr=False, hash=False)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()

    @property
    def is_float(self) -> bool:
        """Whether it is of a floating format of real numbers."""
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Op:
    """One op that has run.

    by: of a cast, who asked for it, and of a product, who runs it: "product" halfstep's emulated products, "list" its lists of ops, "edge" its casts
        of a model's inputs and outputs, "autocast" torch's autocast, "model" the code of the model, "backward" autograd; "" for other ops.
    called: the function of torch that Python called ("softmax"), "" for what autograd runs. on: whether autocast was on there.
    seconds: of this op in a timed run, 0 where none was. call: function and arguments with Operands in the place of tensors.
    """

    name: str
    cls: Class
    place: Place
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    bytes: int = 0
    flops: int = 0
    by: By = ""
    called: str = ""
    on: bool = False
    seconds: float = 0.0
    forward_op: str = ""
    call: tuple[Any, Any, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def backward(self) -> bool:
        """Whether it is part of the backward pass."""
        return self.place.direction == "backward"

    @property
    def base(self) -> str:
        """The name without namespace and overload."""
        return self.name.split(".", 2)[1] if "." in self.name else self.name

    @property
    def floats(self) -> tuple[Operand, ...]:
        """The floating inputs."""
        return tuple(t for t in self.inputs if t.is_float)


class Calls(TorchFunctionMode):
    """The outermost block of a run: which function of torch Python has called. To be opened before the model's own modes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.name, self.spoken, self.on = "", False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # a function of torch that is made of others
            with self:
                return opened(func)(*args, **kwargs)
        before = self.name, self.spoken, self.on
        self.name, self.spoken, self.on = getattr(func, "__name__", ""), func in _SPOKEN, torch.is_autocast_enabled(self.device)
        try:
            return func(*args, **kwargs)
        finally:
            self.name, self.spoken, self.on = before


class Ledger:
    """The detector that keeps the book.

    ops: what has run, in order, views left out; places: of each among all ops, whose names are `names`. owners: names of the weights and buffers that
    ops were given, by number.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.ops: list[Op] = []
        self.names: list[str] = []
        self.places: list[int] = []
        self.owners: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._made: set[int] = set()
        self._weights: set[int] = set()
        self._owners: dict[int, str] = {}  # by memory
        self._next, self._kept = 0, 0

    def begin(self, model: nn.Module) -> None:
        """Forget earlier runs; learn which tensors are weights."""
        self.__init__(self.calls)  # type: ignore[misc]
        self._weights = {key for p in model.parameters() if p.requires_grad and (key := storage_of(p)) is not None}
        named = (*model.named_buffers(), *model.named_parameters())
        self._owners = {key: name for name, t in named if (key := storage_of(t)) is not None}

    def see(self, event: Event) -> None:
        """Write an op down."""
        self.names.append(event.name)
        if event.error is not None:
            return
        cls = class_of(event)
        given = [self._operand(t) for t in event.inputs]
        if not (cls == "views" or event.mutable):
            for t in event.outputs:
                self._renew(t, event.inputs)
        if cls == "views":
            return
        made = tuple(self._operand(t) for t in event.outputs)
        waiting = iter(given)
        args, kwargs = tree_map_only(Tensor, lambda _: next(waiting), (event.args, event.kwargs))
        by: By = _by(event, self.calls) if cls in ("casts", "products") else ""
        called, on = ("", False) if event.backward else (self.calls.name, self.calls.on)
        self.places.append(len(self.names) - 1)
        self.ops.append(
            Op(
                event.name,
                cls,
                event.place,
                tuple(given),
                made,
                bytes_of(event),
                flops_of(event) if cls == "products" else 0,
                by,
                called,
                on,
                forward_op=event.forward_op if event.backward else "",
                call=(event.func, args, kwargs),
            )
        )

    def findings(self) -> list[Finding]:
        """None: what is in the book is judged by others."""
        return []

    def _renew(self, t: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """A new number for the memory of a tensor that an op has made."""
        key = storage_of(t)
        if key is not None and all(storage_of(i) != key for i in inputs):
            self._numbers[key] = self._next
            self._made.add(self._next)
            self._next += 1

    def _operand(self, t: Tensor) -> Operand:
        key = storage_of(t)
        if key is None:
            return Operand(tuple(t.shape), (), t.dtype)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._next += 1
            if key in self._owners:
                self.owners[number] = self._owners[key]
        value = None
        if not t.is_floating_point() and not t.is_complex() and self._kept + t.nbytes <= KEPT:
            value = t.detach().clone()
            self._kept += t.nbytes
        return Operand(tuple(t.shape), tuple(t.stride()), t.dtype, number, key in self._weights, number not in self._made, value)


def _by(event: Event, calls: Calls) -> By:
    """Who asked for a cast, or runs a product: the innermost code that is neither torch's nor passes calls on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HALFSTEP) and not file.startswith((*_LOOKERS, _DEMO)):
            name = os.path.basename(file)
            if name == "routes.py":
                return "list"
            if name == "casting.py":
                if frame.f_code.co_name in ("upcast", "cast_floating", "<genexpr>", "<dictcomp>", "<lambda>"):
                    return "edge"
            elif name not in _PASSING:
                return "product"
        elif not file.startswith((_TORCH, *_LOOKERS)):
            break
        frame = frame.f_back
    if event.backward:
        return "backward"
    return "model" if calls.spoken or not calls.on else "autocast"
