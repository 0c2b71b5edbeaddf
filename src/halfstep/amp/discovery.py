"""Which weights can live in 16 bits with the forward pass unchanged: those that autocast only ever casts, and tables that rows are looked up in.

Two rules, and a weight must pass both. The owner rule looks at the modules that hold it: every one is of a kind whose forward pass hands this weight
to a 16-bit product or looks rows up in it, and does nothing else with it. The use rule looks at one forward pass: whatever happened to the weight was
a cast to the 16-bit format or a lookup. A weight that this forward pass did not reach (an expert that no token went to) passes by the owner rule.

Tables: rows are fp32 under autocast, so only storages whose residual makes the fp32 value of a row keep tables in 16 bits, and their gradient stays
fp32. With 2 bytes of residual (split) that saves nothing but the 16-bit copy that a product makes, so it is done for tables that are the weight of
a product too; with 1 byte (split24) for all. Frozen tables need no residual where 16 bits hold them exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.amp.ops import LOW_ON_CUDA_ONLY
from halfstep.amp.rehearsal import storage_of
from halfstep.numerics.standins import asked, is_shape
from halfstep.optim.masters import LARGEST_FP16
from halfstep.policy import Policy, select
from halfstep.policy.policy import TABLES


@dataclass(frozen=True)
class Kind:
    """A type of module whose forward pass only casts its weights. ops: what it hands them to; one run in fp32 keeps them fp32."""

    type: type[nn.Module]
    weights: tuple[str, ...]  # names, or beginnings of names that end in _
    ops: tuple[str, ...]


Use = Literal["cast", "rows", "other"]
PAIR = ("weight", "bias")
RECURRENT = ("weight_", "bias_")
KINDS = (
    Kind(nn.Linear, PAIR, ("linear",)),
    *(Kind(getattr(nn, f"Conv{n}d"), PAIR, (f"conv{n}d",)) for n in (1, 2, 3)),
    *(Kind(getattr(nn, f"ConvTranspose{n}d"), PAIR, (f"conv_transpose{n}d",)) for n in (1, 2, 3)),
    Kind(nn.LSTM, RECURRENT, ("lstm",)),
    Kind(nn.GRU, RECURRENT, ("gru",)),
    Kind(nn.RNN, RECURRENT, ("rnn_tanh", "rnn_relu")),
    Kind(nn.LSTMCell, RECURRENT, ("lstm_cell",)),
    Kind(nn.GRUCell, RECURRENT, ("gru_cell",)),
    Kind(nn.RNNCell, RECURRENT, ("rnn_tanh_cell", "rnn_relu_cell")),
    # its bias_k and bias_v are joined to fp32 keys; nn.Bilinear is not here: autocast runs it in the widest format of its operands
    Kind(nn.MultiheadAttention, ("in_proj_", "q_proj_", "k_proj_", "v_proj_"), ("linear",)),
)
FOREIGN = (("transformers.", "Conv1D", PAIR, ("addmm",)),)  # package, class, weights, ops: known by name, so that nothing needs be imported


BY_PRODUCTS_TOO = ("split",)  # of the storages that keep tables, those that save memory by it only where a product has the table for its weight


def castable(
    module: nn.Module,
    policy: Policy,
    device: torch.device,
    run: Callable[[], Any],
    apart: Collection[str] = (),
    lookups: Mapping[int, int] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Names of the fp32 parameters of `module` that pass both rules, in the module's order; a tied one by its first name.

    run: one forward pass under the policy, with gradients off; it should leave no trace (`Rehearsal`). apart: names of parts that are bound to a
    policy of their own, whose parameters are left alone. lookups: how often `run` has given a parameter, by its id, to a lookup that will be seen
    later too: other lookups are uses like any.
    """
    allowed = owned(module, policy, device, apart)
    watch = _Uses(allowed, policy.dtype)
    with watch:
        run()
    known = {who: count for who, count in lookups.items() if who in tables(module)}
    unseen = {name for name, count in watch.lookups.items() if count > known.get(id(allowed[name]), 0)}
    return tuple(name for name in allowed if name not in watch.direct and name not in unseen)


def owned(module: nn.Module, policy: Policy, device: torch.device, apart: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters that pass the owner rule, by name: fp32 ones, and those in the policy's 16-bit format already. `tables` are among them.

    Not among them: parts of modules that `policy.fp32` holds in fp32, parametrized and normed weights, views of each other, frozen weights that the
    16-bit format does not hold exactly, and under fp16 weights of a magnitude above 2^15.
    """
    held = (*(select((name for name, _ in module.named_modules()), policy.fp32) if policy.fp32 else ()), *apart)
    owners: dict[int, list[Use]] = {}
    found: dict[str, nn.Parameter] = {}
    for place, part in module.named_modules(remove_duplicate=False):
        free = not any(place == h or place.startswith(f"{h}.") or not h for h in held)
        for name, p in part._parameters.items():
            if p is not None:
                found.setdefault(f"{place}.{name}" if place else name, p)
                owners.setdefault(id(p), []).append(_use(part, name, policy, device) if free else "other")
    views = _overlapping(list({id(p): p for p in found.values()}.values()))
    passed: dict[int, str] = {}
    for name, p in found.items():
        if id(p) not in passed and id(p) not in views and _may(owners[id(p)], p, policy) and _fits(p, policy.dtype):
            passed[id(p)] = name
    return {name: found[name] for name in passed.values()}


def storage_for(policy: Policy) -> str:
    """How a weight that a policy holds in 16 bits keeps its master."""
    return "split" if policy.weights == "fp32" else policy.weights


def tables(module: nn.Module) -> dict[int, bool]:
    """The weights of embeddings, by id; whether one of them has a forward method of its own, of which only a look at a forward pass can tell more."""
    found: dict[int, bool] = {}
    for part in module.modules():
        p = part._parameters.get("weight") if isinstance(part, nn.Embedding) else None
        if p is not None:
            found[id(p)] = found.get(id(p), False) or type(part).forward is not nn.Embedding.forward
    return found


def _may(uses: list[Use], p: nn.Parameter, policy: Policy) -> bool:
    """Whether a parameter that modules use so may be kept in 16 bits, and is not better kept in fp32."""
    if "other" in uses:
        return False
    if "rows" not in uses or not p.requires_grad:
        return True
    storage = storage_for(policy)
    return storage in TABLES and (storage not in BY_PRODUCTS_TOO or "cast" in uses)


def _use(part: nn.Module, name: str, policy: Policy, device: torch.device) -> Use:
    """What this module does with the weight of that name: it hands it to 16-bit products, or looks rows up in it, or something else."""
    if isinstance(part, nn.Embedding):
        plain = part.max_norm is None and not part.sparse and "embedding" not in policy.half_ops and forward_of(part) is type(part).forward
        return "rows" if name == "weight" and plain else "other"
    return "cast" if _only_casts(part, name, policy, device) else "other"


def _only_casts(part: nn.Module, name: str, policy: Policy, device: torch.device) -> bool:
    """Whether this module hands the weight of that name to 16-bit products and does nothing else with it."""
    weights, ops, forward = (), (), None  # type: tuple[str, ...], tuple[str, ...], Any
    for kind in KINDS:
        if isinstance(part, kind.type):
            weights, ops, forward = kind.weights, kind.ops, kind.type.forward
            break
    for package, known, its_weights, its_ops in FOREIGN:
        for base in type(part).__mro__:
            if base.__name__ == known and base.__module__.startswith(package):
                weights, ops, forward = its_weights, its_ops, vars(base).get("forward")
    if not any(name == w or (w[-1] == "_" and name.startswith(w)) for w in weights) or forward_of(part) is not forward:
        return False
    on_device = policy.ops == "cuda" or device.type == "cuda" or not any(op in LOW_ON_CUDA_ONLY for op in ops)
    return on_device and not any(op in policy.fp32_ops for op in ops)


def forward_of(part: nn.Module) -> Any:
    """The function that a module's forward pass runs, below what `bind` has put around it."""
    forward = part.__dict__.get("forward")
    if forward is None:
        return type(part).forward
    function = getattr(forward, "__func__", None)
    if getattr(forward, "__self__", None) is not part or not isinstance(forward, MethodType):
        return forward  # borrowed from elsewhere
    stands_for = getattr(function, "halfstep_stands_for", None)  # of a head whose output is left out: casting.py copies the attribute
    if stands_for is not None:
        return stands_for
    return getattr(function, "halfstep_under", getattr(function, "halfstep_part_of", function))


def _overlapping(parameters: list[nn.Parameter]) -> set[int]:
    """Those that share memory with another parameter: casting one would part them."""
    places: dict[int | None, list[tuple[int, int, int]]] = {}
    for p in parameters:
        if not torch.nn.parameter.is_lazy(p) and not is_shape(p) and p.numel():
            places.setdefault(storage_of(p), []).append((p.data_ptr(), p.data_ptr() + _extent(p), id(p)))
    found: set[int] = set()
    for key, ranges in places.items():
        end, last = 0, 0
        for start, stop, who in sorted(ranges) if key is not None else ():
            if start < end:
                found |= {who, last}
            if stop > end:
                end, last = stop, who
    return found


def _extent(p: Tensor) -> int:
    """Bytes from the first to the last element of a strided tensor."""
    return p.element_size() * (1 + sum((size - 1) * step for size, step in zip(p.shape, p.stride(), strict=True)))


def _fits(p: Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight may be stored in `dtype`: dense, fp32 or in that format already, in range, and exactly when it is frozen."""
    if p.dtype not in (torch.float32, dtype) or p.layout != torch.strided or torch.nn.parameter.is_lazy(p) or p.device.type == "meta":
        return False
    # of a weight without numbers: it is in range, and if it is frozen not exactly of that format by chance
    if dtype == torch.float16 and p.numel() and not asked(p, lambda values: bool((values.abs() <= LARGEST_FP16).all()), True):
        return False
    return p.requires_grad or p.dtype == dtype or asked(p, lambda values: torch.equal(values.to(dtype).float(), values), False)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of the parameters are used other than by a cast to `dtype` or a lookup, and counts these, by the memory that ops are given."""

    supports_higher_order_operators = True

    def __init__(self, watched: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.direct, self.lookups = dtype, set[str](), Counter[str]()
        self._names: dict[int | None, list[str]] = {}
        for name, p in watched.items():
            if p.dtype == torch.float32:  # a use of one that is 16-bit looks like a cast one's: these are told by their functions
                self._names.setdefault(storage_of(p), []).append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "is_view", False):
            given = enumerate((*args, *kwargs.values()))
            for place, t in ((i, t) for i, a in given for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, Tensor)):
                names = self._names.get(storage_of(t))
                if names is None or self._casts(func, place, args, kwargs):
                    continue
                if func is torch.ops.aten.embedding.default and place == 0:
                    self.lookups.update(names)
                else:
                    self.direct.update(names)
        return func(*args, **kwargs)

    def _casts(self, func: Any, place: int, args: Any, kwargs: Any) -> bool:
        if func is torch.ops.prim.device.default:  # asked of fake tensors
            return True
        if func is torch.ops.aten._to_copy.default:
            return bool(kwargs.get("dtype") == self.dtype)
        return func is torch.ops.aten.copy_.default and place == 1 and args[0].dtype == self.dtype
