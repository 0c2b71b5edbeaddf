"""A forward pass that leaves no trace: what it changes is put back, so that it can be run to learn something and then for good."""

from __future__ import annotations

import itertools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.numerics.standins import is_shape, walking

LARGEST_WALK = 200_000  # objects looked at; state that lies beyond them is not put back
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type, ModuleType)


class Rehearsal:
    """The block in which a forward pass may run without leaving a trace.

    Put back at its end: buffers and every tensor that was there before and was written to; attributes of modules, and of whatever their attributes
    and `given` (the arguments of the forward pass) hold: containers, objects, generators of random numbers; random states of torch on the CPU and
    every GPU in use, of Python and numpy. Hooks on modules run, and what they close over is put back too. Not seen: state inside objects
    written in C (open files, iterators), global variables, and writes of kernels that do not declare them to anything but buffers.
    Memory while it is open: a copy of the buffers and of what was written to.

    writes: False leaves writes to tensors that are no buffers where they are, and the ops inside run as fast as they do outside.
    """

    def __init__(self, modules: Iterable[nn.Module], given: Any, writes: bool = True) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # holds the objects, whose addresses must stay theirs
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._writes, self._sees_writes = _Writes(), writes
        self._roots = ([*modules], given)

    def __enter__(self) -> Rehearsal:
        modules, given = self._roots
        self._undo.append(random_states())
        self._walk([*modules, given])
        known: dict[int, Tensor] = {id(b): b for module in modules for b in module.buffers() if b.layout == torch.strided}
        self._buffers = [(b, b.detach().clone()) for b in known.values() if not torch.nn.parameter.is_lazy(b)]
        if self._sees_writes:
            self._writes.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._sees_writes:
            self._writes.__exit__(*error)  # type: ignore[no-untyped-call]
        for undo in reversed(self._undo):
            undo()
        with torch.no_grad():
            for tensor, before in [*self._buffers, *self._writes.before.values()]:
                if not _same_bits(tensor, before):
                    tensor.detach().copy_(before)

    def _walk(self, roots: list[Any]) -> None:
        """Note how to put back everything that can be reached from `roots`."""
        waiting = deque(roots)
        while waiting and len(self._seen) < LARGEST_WALK:
            item = waiting.popleft()
            if isinstance(item, (*_PLAIN, Tensor)) or id(item) in self._seen:
                continue
            self._seen[id(item)] = item
            undo, inner = _remembered(item)
            if undo is not None:
                self._undo.append(undo)
            waiting.extend(inner)


class Repetition(Rehearsal):
    """The same for runs that are timed: nothing looks at their ops, and they may be many.

    like: a rehearsal of the same run that has ended. What it saw written to is copied now and put back at the end.
    """

    def __init__(self, modules: Iterable[nn.Module], given: Any, like: Rehearsal) -> None:
        super().__init__(modules, given)
        self._writes = _Known(like._writes)


def _remembered(item: Any) -> tuple[Callable[[], None] | None, Iterable[Any]]:
    """How to put one object back to what it is now, and the objects that it holds."""
    if isinstance(item, torch.Generator):
        state = item.get_state()
        return (lambda: _set(item.set_state, state)), ()
    if isinstance(item, random.Random):
        own = item.getstate()
        return (lambda: item.setstate(own)), ()
    if isinstance(item, MethodType):
        return None, (item.__self__, item.__func__)
    if isinstance(item, FunctionType):
        return None, [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
    if isinstance(item, dict):
        pairs = list(dict.items(item))
        return (lambda: _put_pairs(item, pairs)), [*(v for _, v in pairs), *_attributes(item)]
    if isinstance(item, list | deque):
        values = list(item)
        return (lambda: _put_values(item, values)), [*values, *_attributes(item)]
    if isinstance(item, set):
        members = set(item)
        return (lambda: _put_members(item, members)), ()
    if isinstance(item, tuple | frozenset):
        return None, item
    if type(item).__module__.startswith("numpy"):
        return _numpy_state(item), ()
    attributes, slots = getattr(item, "__dict__", None), _slots(item)
    if not isinstance(attributes, dict) and not slots:
        return None, ()
    pairs = list(attributes.items()) if isinstance(attributes, dict) else []

    def undo() -> None:
        if isinstance(attributes, dict):
            _put_pairs(attributes, pairs)
        for name, value in slots:
            if getattr(item, name, None) is not value:
                object.__setattr__(item, name, value)

    return undo, [*(v for _, v in pairs), *(v for _, v in slots)]


def _attributes(item: Any) -> tuple[Any, ...]:
    """The attributes of an object that is a container too, as one dict; it is the object's own, so putting it back puts them back."""
    own = getattr(item, "__dict__", None)
    return (own,) if isinstance(own, dict) and own else ()


def _slots(item: Any) -> list[tuple[str, Any]]:
    names = itertools.chain.from_iterable(
        [s] if isinstance(s := vars(c).get("__slots__", ()), str) else s for c in type(item).__mro__ if c.__module__ != "builtins"
    )
    return [(name, getattr(item, name)) for name in names if name not in ("__dict__", "__weakref__") and hasattr(item, name)]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  a cell of a variable that is not set yet raises
    except ValueError:
        return False
    return True


def _put_pairs(into: Any, pairs: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(into))
    if len(now) == len(pairs) and all(k is k0 and v is v0 for (k, v), (k0, v0) in zip(now, pairs, strict=True)):
        return
    kind: Any = OrderedDict if isinstance(into, OrderedDict) else dict  # past what a subclass makes of writes
    kind.clear(into)
    for key, value in pairs:
        kind.__setitem__(into, key, value)


def _put_values(into: Any, values: list[Any]) -> None:
    if len(into) != len(values) or any(a is not b for a, b in zip(into, values, strict=True)):
        into.clear()
        into.extend(values)


def _put_members(into: set[Any], members: set[Any]) -> None:
    if into != members:
        into.clear()
        into.update(members)


def _set(setter: Callable[[Any], Any], state: Any) -> None:
    setter(state)


def _numpy_state(item: Any) -> Callable[[], None] | None:
    """For numpy's two kinds of random generator; arrays and the rest of numpy are left."""
    bits = getattr(item, "bit_generator", None) or getattr(item, "_bit_generator", None)
    if bits is None:
        return None
    state = bits.state

    def undo() -> None:
        bits.state = state

    return undo


def random_states() -> Callable[[], None]:
    """What puts the random states of torch, Python and numpy back to what they are now."""
    cpu, own = torch.get_rng_state(), random.getstate()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy = sys.modules.get("numpy")
    theirs = numpy.random.get_state() if numpy is not None else None

    def undo() -> None:
        torch.set_rng_state(cpu)
        random.setstate(own)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        if numpy is not None:
            numpy.random.set_state(theirs)

    return undo


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values, NaNs counted as equal. Of those without numbers nobody knows."""
    if is_shape(a):
        return False
    return bool(torch.equal(a, b)) or (
        a.is_floating_point() and bool(torch.equal(a.nan_to_num(), b.nan_to_num()) & torch.equal(a.isnan(), b.isnan()))
    )


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an op of torch is going to write to, as it declares."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.name in kwargs else args[place] if place < len(args) else None
            found += [t for t in (value if isinstance(value, list | tuple) else (value,)) if isinstance(t, Tensor)]
    return found


def storage_of(t: Tensor) -> int | None:
    """What tells the memory of a tensor from others while it lives; None for kinds without one memory (sparse)."""
    return t.untyped_storage()._cdata if t.layout == torch.strided else None


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies what is written to before it is, unless it was made inside the block."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: torch would import its compiler for it, which takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # a higher-order op has none
        if schema is not None and schema.is_mutable and not walking():
            for t in written(func, args, kwargs):
                key = storage_of(t)
                if key is not None and key not in self._made and key not in self.before:
                    flat = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
                    self.before[key] = (flat, flat.clone())
        result = func(*args, **kwargs)
        if schema is not None and not func.is_view and not schema.is_mutable:
            given = {storage_of(t) for t in _tensors((args, kwargs))}
            self._made.update(key for t in _tensors(result) if (key := storage_of(t)) is not None and key not in given)
        return result


class _Known(_Writes):  # type: ignore[no-untyped-call]
    """Copies what an earlier look saw written to, and looks at nothing itself."""

    def __init__(self, earlier: _Writes) -> None:
        super().__init__()
        self._places = {key: flat for key, (flat, _) in earlier.before.items()}

    def __enter__(self) -> _Known:
        self.before = {key: (flat, flat.clone()) for key, flat in self._places.items()}
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing was opened."""


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in the arguments or results of an op."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [t for v in value for t in _tensors(v)]
