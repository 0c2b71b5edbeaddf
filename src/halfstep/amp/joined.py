"""Weights kept in 16 bits that are used otherwise than in a 16-bit product: such a use sees the fp32 master.

`w.norm()`, `w * mask`, a penalty in the forward pass: stock autocast hands these the fp32 weight. Inside the forward pass of a module whose weights a
policy keeps in 16 bits they get the master, joined anew at each use, and their gradient goes to the weight. Products, views and questions about shape
see the 16-bit weight, and a lookup of rows gets those of the master; its `dtype` is answered with fp32, so that the code of a model takes the same
branches. torch.compile traces past this: discovery has made sure that the first forward pass needs none of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.amp.embedding import rows
from halfstep.amp.mode import OPENED, inside
from halfstep.amp.ops import HALF, LOW, LOW_ON_CUDA_ONLY, every_form, names
from halfstep.amp.rounding import forward_mode, transformed
from halfstep.numerics.standins import FakeTensor
from halfstep.optim import Master, master_of
from halfstep.policy import Policy

_QUESTIONS = names(
    """dim ndimension size numel nelement stride storage_offset is_contiguous data_ptr untyped_storage storage element_size get_device dim_order
    is_floating_point is_complex is_signed is_same_size is_shared is_pinned is_inference is_set_to has_names requires_grad_ register_hook retain_grad
    register_post_accumulate_grad_hook share_memory_ _is_view __len__ __hash__ __repr__ __format__ __deepcopy__ __reduce_ex__ __dir__"""
)
_VIEWS = names(
    """view view_as reshape t transpose permute unsqueeze squeeze expand chunk split tensor_split split_with_sizes unbind narrow select __getitem__
    flatten unflatten movedim moveaxis swapaxes swapdims diagonal as_strided contiguous ravel adjoint hsplit vsplit dsplit unfold __iter__"""
)
LOOKUPS = frozenset((F.embedding, torch.embedding))
_DTYPE = inspect.getattr_static(torch._C.TensorBase, "dtype").__get__
_IN_PLACE = frozenset(f"__i{name}__" for name in names("add sub mul truediv floordiv mod pow and or xor lshift rshift")) | {"__setitem__"}


@functools.cache
def _listed(listed: tuple[str, ...]) -> frozenset[Any]:
    return frozenset((*every_form(listed), *(f for name in listed if (f := getattr(Tensor, name, None)) is not None)))


class _Joined(torch.autograd.Function):
    """The fp32 master of a weight, whose gradient is the weight's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # in fp32; autograd casts it where the weight takes 16-bit gradients


def joined(t: Tensor) -> Tensor:
    """A 16-bit parameter or buffer in fp32: its master where it has one, else its value cast up. The gradient of a parameter goes to it."""
    with torch._C.DisableTorchFunction():  # a mode that is open would join it once more
        master = master_of(t)
        if master is None:
            return t.float()
        values = _strided(master, t)
        return _Joined.apply(t, values) if t.requires_grad and torch.is_grad_enabled() else values  # type: ignore[no-untyped-call]


class JoinedWeights:
    """What becomes of functions that are given a weight kept in 16 bits, under one policy on one type of device.

    seen: when given, uses are noted there and nothing is said about them.
    """

    def __init__(self, policy: Policy, device: str, seen: Seen | None = None) -> None:
        self.dtype, self.seen = policy.dtype, seen
        listed = [op for op in LOW if policy.ops == "cuda" or device == "cuda" or op not in LOW_ON_CUDA_ONLY]
        wide = every_form(policy.fp32_ops)
        self._products = frozenset(every_form(listed)) - frozenset(wide)
        self._asked, self._views = _listed(_QUESTIONS) | OPENED, _listed(_VIEWS)

    def touches(self, device: str, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether this call is given such a weight, or a view of one, and is no 16-bit product of it."""
        if self.seen is not None and func in LOOKUPS:
            self.seen.looked_up(_lookup(func, args, kwargs))
        if func in self._products and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == self.dtype:
            if self.seen is not None:
                self.seen.multiplied(args, kwargs)
            return False
        for value in args if not kwargs else (*args, *kwargs.values()):  # as _weights, which is slower
            if isinstance(value, Tensor):
                if _is_kept(value):
                    break
            elif type(value) in (list, tuple) and any(isinstance(t, Tensor) and _is_kept(t) for t in value):
                break
        else:
            return False
        if isinstance(func, torch._ops.OpOverload):  # those run in compiled code
            return False
        return torch._C._current_graph_task_id() == inside.backward  # a derivative taken inside the forward pass works on what that was given

    def settled(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any, Any, Any]:
        """The result of the call, or what to call the function with: (done, result, args, kwargs)."""
        if func == _DTYPE and sys._getframe(2).f_globals.get("__name__") != "torch.utils.checkpoint":
            return True, torch.float32, (), {}  # but for who compares what a second forward pass has saved: that of a frozen weight is itself
        name = getattr(func, "__name__", "")
        if func in LOOKUPS and (found := self._rows(func, args, kwargs)) is not None:
            return True, found, (), {}
        if func in self._asked or func == _DTYPE or name in ("__get__", "__set__"):
            return False, None, args, kwargs
        if func in self._views:
            result = func(*args, **kwargs)
            bases = {id(_base(t)) for t in _weights(args, kwargs)}
            if all(id(_base(t)) in bases for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, Tensor)):
                return True, result, (), {}
        if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE:
            target = args[0] if args else None
            if isinstance(target, Tensor) and _is_kept(target) and not (target.requires_grad and torch.is_grad_enabled()):
                return True, self._write(func, target, args, kwargs), (), {}
        join = functools.partial(self._join, name)
        return False, None, [_replaced(a, join) for a in args], {k: _replaced(v, join) for k, v in kwargs.items()}

    def _join(self, name: str, t: Tensor) -> Tensor:
        p = _base(t)
        master = master_of(p)
        if master is None:  # somebody cast the weight to the other 16-bit format, and its master is gone
            return t
        self._tell(p, name)
        values = _strided(master, p)
        if t.requires_grad and torch.is_grad_enabled():
            values = _Joined.apply(p, values)  # type: ignore[no-untyped-call]
        return values if t is p else _same_view(values, t, p)

    def _rows(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Rows of a kept table, or None where its master has to be joined as a whole."""
        given = _lookup(func, args, kwargs)
        weight = given["weight"]
        if _is_unusual(given) or type(weight) is Tensor or transformed() or forward_mode():
            return None
        if weight.requires_grad and weight.grad_dtype != torch.float32:  # no table, but a weight of products
            self._tell(weight, func.__name__)
        return rows(**given)

    def _write(self, func: Any, target: Tensor, args: Any, kwargs: Any) -> Tensor:
        """A write to a weight, done to its master."""
        p = _base(target)
        master = master_of(p)
        if master is None:
            func(*args, **kwargs)
            return target
        values = _strided(master, p)
        join = functools.partial(self._join, func.__name__)
        others, named = [_replaced(a, join) for a in args[1:]], {k: _replaced(v, join) for k, v in kwargs.items()}
        func(values if target is p else _same_view(values, target, p), *others, **named)
        master.write(values)
        return target

    def _tell(self, p: Tensor, name: str) -> None:
        """Say once that a weight is used directly."""
        if self.seen is not None:
            self.seen.direct.add(id(p))
        elif not getattr(p, "halfstep_told", False):
            p.halfstep_told = True  # type: ignore[attr-defined]
            warnings.warn(
                f"{getattr(p, 'halfstep_name', 'a weight')} {tuple(p.shape)} is kept in 16 bits, and {name} uses it in fp32, which the first forward "
                "pass did not do: its master is joined for this use, and each time from now on. The numbers are those of an fp32 weight; to save "
                "the work, hold its module in fp32 (fp32=PATTERN in the precision).",
                stacklevel=6,
            )


class Seen:
    """What a rehearsal shows of the weights that are 16-bit already, or may become so. By id of the parameter."""

    def __init__(self) -> None:
        self.direct: set[int] = set()  # kept ones that something else than a product was given
        self.lookups: dict[int, int] = {}  # how often each was given to an embedding, by functions that a mode sees
        self._products: dict[tuple[int, int], int] = {}

    def looked_up(self, given: dict[str, Any]) -> None:
        """Note the table of a lookup; one whose rows are renormalized, or whose gradient is a list of rows, as used otherwise."""
        table = given["weight"]
        self.lookups[id(table)] = self.lookups.get(id(table), 0) + 1
        if _is_unusual(given):
            self.direct.add(id(table))

    def multiplied(self, args: Any, kwargs: Any) -> None:
        """Note the weights that a product is given; parts of one (packed projections) count by themselves."""
        for t in _tensors(args, kwargs):
            if isinstance(p := _base(t), nn.Parameter):
                key = (id(p), int(t.storage_offset()))
                self._products[key] = self._products.get(key, 0) + 1

    @property
    def shared(self) -> set[int]:
        """Those that several products were given."""
        return {who for (who, _), count in self._products.items() if count > 1}


_EMBEDDING = names("input weight padding_idx max_norm norm_type scale_grad_by_freq sparse")
_BARE_EMBEDDING = names("weight input padding_idx scale_grad_by_freq sparse")


def _lookup(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a lookup by the names that F.embedding has for them."""
    if func is F.embedding:
        return dict(zip(_EMBEDDING, args, strict=False)) | (kwargs or {})
    given = dict(zip(_BARE_EMBEDDING, args, strict=False)) | {"input" if k == "indices" else k: v for k, v in (kwargs or {}).items()}
    padding = given.pop("padding_idx", -1)  # which is no row here
    return given | {"padding_idx": padding if padding >= 0 else None}


def _is_unusual(given: dict[str, Any]) -> bool:
    """Whether a lookup writes to its table, or gives it a sparse gradient."""
    return given.get("max_norm") is not None or bool(given.get("sparse"))


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among arguments, also in a list or tuple."""
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def _weights(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments that are weights kept in 16 bits, or views of one."""
    return (t for t in _tensors(args, kwargs) if _is_kept(t))


def _replaced(value: Any, by: Callable[[Tensor], Tensor]) -> Any:
    """An argument in which kept weights are replaced."""
    if isinstance(value, Tensor):
        return by(value) if _is_kept(value) else value
    return type(value)(_replaced(v, by) for v in value) if type(value) in (list, tuple) else value


def _base(t: Tensor) -> Tensor:
    """The parameter that a tensor is a view of, or the tensor itself."""
    return t if type(t) not in (Tensor, FakeTensor) or t._base is None else t._base


def _is_kept(t: Tensor) -> bool:
    """Whether a tensor is a weight kept in 16 bits, or a view of one. Asked for every argument of every function, so it must be fast."""
    p = t._base if type(t) is Tensor else t if type(t) is not FakeTensor or t._base is None else t._base
    return p is not None and type(p) is not Tensor and "halfstep_master" in p.__dict__ and t.dtype in HALF


def _strided(master: Master, p: Tensor) -> Tensor:
    """The master in the memory layout of its parameter, so that views of one are views of the other."""
    values = master.read()
    return values if values.stride() == p.stride() else torch.empty_strided(p.size(), p.stride(), dtype=values.dtype, device=p.device).copy_(values)


def _same_view(values: Tensor, t: Tensor, p: Tensor) -> Tensor:
    return values.as_strided(t.size(), t.stride(), t.storage_offset() - p.storage_offset() + values.storage_offset())


@functools.cache
def joined_weights(policy: Policy, device: str) -> JoinedWeights:
    """The one for a policy on a type of device."""
    return JoinedWeights(policy, device)
