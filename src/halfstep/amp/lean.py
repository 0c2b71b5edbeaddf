"""Weights in 16 bits: which are, how they become so, and what stands in a saved state.

Under a `*-lean` policy the first call of a bound module finds out which of its weights autocast only ever casts, and puts these into 16 bits with a
master beside them: forward pass and gradients stay what they are under autocast, bit for bit. A model that was loaded in 16 bits is brought to the
same state under `*-mixed` and `*-lean`. Under `*-true` the whole model goes to 16 bits when it is bound.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from halfstep.amp.discovery import owned, storage_for, tables
from halfstep.amp.loads import follow_loads, leave_loads
from halfstep.amp.ops import HALF
from halfstep.errors import ConfigError, PolicyError, suggest
from halfstep.numerics import table_loss
from halfstep.numerics.standins import asked
from halfstep.optim import Master, attach, detach, dtype_name, full_values, master_of
from halfstep.optim.masters import LARGEST_FP16
from halfstep.policy import Policy, select
from halfstep.policy.policy import TABLES

logger = logging.getLogger("halfstep")
LAYOUT = "halfstep_layout"  # the attribute of a bound module
WIDE = (torch.float32, *HALF)
# The statistics of these are sums over the whole run, and torch wants their weights in the same format. Their inputs may be 16-bit.
FP32_MODULES = (nn.modules.batchnorm._NormBase,)


class _Layouts:
    """Layouts by text, which torch.compile takes for a constant."""

    def __init__(self) -> None:
        self.known: WeakValueDictionary[str, Layout] = WeakValueDictionary()
        self._count = itertools.count()

    def add(self, layout: Layout) -> str:
        key = f"layout {next(self._count)}"
        self.known[key] = layout
        return key


_layouts = _Layouts()


def before_compiled(key: str) -> None:
    """Make the trained embedding tables of a model fp32 that a graph is made of: torch.compile would round the gradient of a 16-bit one."""
    found = _layouts.known[key]
    for name in [name for name in found.tables if found.kept[name].requires_grad]:
        found.give_up(name)


before_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it runs when a graph is made, before that looks at the weights


class Layout:
    """What became of the weights of one bound module. It stands on the module, and goes with it through deepcopy and pickle.

    kept: the parameters in 16 bits, by name. tables: those of them that rows are looked up in. shared: these, and what several products of one
    forward pass are given. loaded: the dtype each floating parameter and buffer had when the module was bound. settled: whether the first call, which
    decides on `kept`, has been.
    """

    def __init__(self, policy: Policy, device: torch.device, loaded: dict[str, torch.dtype], apart: tuple[str, ...] = ()) -> None:
        self.policy, self.device, self.loaded, self.apart = policy, device, loaded, apart
        self.settled = False
        self.given = False  # whether `kept` is decided, by a checkpoint
        self.frozen = False  # whether weights are kept that were frozen, without the rest of a master
        self.kept: dict[str, nn.Parameter] = {}
        self.tables: set[str] = set()
        self.shared: set[str] = set()
        self.key = _layouts.add(self)

    @property
    def storage(self) -> str:
        """How a weight that is in 16 bits keeps its master."""
        return storage_for(self.policy)

    def keep(self, module: nn.Module, name: str, table: bool = False) -> None:
        """Put a parameter into 16 bits with its master beside it. A frozen one is held exactly, and needs nothing beside it until it is trained.

        table: rows are looked up in it, whose gradients are summed in fp32.
        """
        p = module.get_parameter(name)
        attach(p, self.storage if p.requires_grad else "plain", self.policy.dtype)
        self.frozen |= not p.requires_grad
        p.halfstep_name = name  # type: ignore[attr-defined]  # for what may have to be said about it
        self.kept[name] = p
        if table:
            self.tables.add(name)
            self.share(name)
        follow_loads(module, p)

    def share(self, name: str) -> None:
        """Let the gradients that several uses have for a parameter be summed in fp32, as those of an fp32 weight are: 4 bytes per weight.

        Autograd casts each of them to the dtype that the parameter takes, and then adds.
        """
        p = self.kept[name]
        self.shared.add(name)
        gradient, p.grad = p.grad, None
        p.grad_dtype = torch.float32
        if gradient is not None:
            p.grad = gradient.float()

    def give_up(self, name: str) -> None:
        """Make a parameter fp32 again, exactly its master."""
        p = self.kept.pop(name)
        detach(p)
        for mark in ("halfstep_name", "halfstep_told"):
            p.__dict__.pop(mark, None)
        self.tables.discard(name)
        self.shared.discard(name)

    def thaw(self) -> None:
        """Give masters to weights that were frozen when they were put into 16 bits, and are trained now; tables that cannot have one become fp32."""
        for name, p in list(self.kept.items()):
            if not p.requires_grad or (master := master_of(p)) is None or master.storage.name != "plain":
                continue
            if name in self.tables and self.storage not in TABLES:
                self.give_up(name)
            elif self.storage != "plain":
                del p.halfstep_master  # type: ignore[attr-defined]
                attach(p, self.storage)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.key = _layouts.add(self)
        for name in self.shared:  # pickle leaves out what a parameter says of its gradient
            self.share(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        twin = Layout(self.policy, self.device, dict(self.loaded), self.apart)
        twin.settled, twin.given, twin.frozen = self.settled, self.given, self.frozen
        for name, p in self.kept.items():
            twin.kept[name] = other = copy.deepcopy(p, memo)  # that of the copied module: the same memo
            master = master_of(p)
            if other is p or master is None or other.dtype != p.dtype or master_of(other) is not None:
                continue
            master.follow()
            residual = None if master.residual is None else master.residual.clone()
            other.halfstep_master = Master(other, master.storage, residual)  # type: ignore[attr-defined]
            other.halfstep_name = name  # type: ignore[attr-defined]
            if name in self.shared:
                twin.share(name)
        twin.tables = set(self.tables)
        return twin


def layout_of(module: nn.Module) -> Layout | None:
    """The record of a bound module whose weights a policy has to do with, or None."""
    found = getattr(module, LAYOUT, None)
    return found if isinstance(found, Layout) else None


def layout(module: nn.Module) -> dict[str, Any]:
    """What became of a module's weights, as plain values.

    `16bit`: names of the parameters kept in 16 bits. `loaded`: the dtype of each floating parameter and buffer when the module was bound.
    """
    found = layout_of(module)
    if found is None:
        return {"16bit": [], "loaded": {}}
    return {
        "16bit": [name for name, p in found.kept.items() if p.dtype in HALF],
        "loaded": {name: str(d).removeprefix("torch.") for name, d in found.loaded.items()},
    }


def is_kept(module: nn.Module, name: str) -> bool:
    """Whether a parameter is one that the module's policy keeps in 16 bits."""
    found = layout_of(module)
    return found is not None and name in found.kept


def refuse_cast(module: nn.Module) -> None:
    """Raise ConfigError when a weight of a `*-true` model was cast since it was bound: its inputs are cast to the policy's format."""
    found = layout_of(module)
    for name, p in found.kept.items() if found is not None else ():
        if found is not None and p.dtype != found.policy.dtype:
            raise ConfigError(
                f"{name} was {dtype_name(found.policy.dtype)} when the model was prepared under {found.policy} and is {dtype_name(p.dtype)} now: "
                "it was cast from outside",
                "Leave the dtypes to the precision; for a copy in another dtype use copy.deepcopy(accelerator.unwrap_model(model)).",
            )


def prepare(module: nn.Module, policy: Policy, device: torch.device, held: Collection[str], apart: Collection[str]) -> Layout | None:
    """Bring a module that is being bound to where its first call decides the rest; None when its weights stay as they are.

    held: names of the modules that the policy holds in fp32. apart: of parts that are bound to a policy of their own.
    """
    before = layout_of(module)
    if before is not None and before.policy == policy:  # a copy by pickle, bound again
        return before
    floats = _floating(module, apart)
    loaded = before.loaded if before is not None else {name: t.dtype for name, t in floats.items()}
    if before is not None:
        undo(module)
    sixteen = [name for name, t in floats.items() if t.dtype in HALF and isinstance(t, nn.Parameter)]
    if not (policy.is_lean or policy.whole or (policy.is_mixed and policy.weights != "plain" and sixteen)):
        return None
    made = Layout(policy, device, loaded, tuple(apart))
    if policy.whole:
        _make_whole(module, made, held)
    elif sixteen:
        _bring_up(module, made, len(sixteen))
    module.__dict__[LAYOUT] = made
    module.register_load_state_dict_post_hook(_look_again)  # type: ignore[no-untyped-call]
    return made


def undo(module: nn.Module) -> None:
    """Make every weight and buffer fp32 again, exactly its master, and forget the record."""
    found = layout_of(module)
    if found is None:
        return
    for name in list(found.kept):
        found.give_up(name)
    if found.policy.whole:
        for t in _floating(module, found.apart).values():
            _widen(t)
    for part in module.modules():
        leave_loads(part, _look_again)
    del module.__dict__[LAYOUT]


def convert(module: nn.Module, policy: Policy, names: Iterable[str]) -> None:
    """Put exactly the named parameters of a bound module into 16 bits: those of a checkpoint, whatever a first call would find.

    Without names the first call decides. Raises PolicyError for a module that `policy` keeps no weights of in 16 bits, and for a name that it has no
    parameter of.
    """
    found, wanted = layout_of(module), list(names)
    if found is None or found.policy != policy:
        if not wanted:
            return
        raise PolicyError(
            f"{len(wanted)} weights are to be 16-bit, and this {type(module).__name__} is not bound to a policy that keeps any so",
            f"Bind it to {policy}.",
        )
    known, looked_up = dict(module.named_parameters()), tables(module)
    for name in wanted:
        if name not in known:
            raise PolicyError(f"{name} is to be 16-bit, and the model has no parameter of that name", suggest(name, known))
    with settling:
        for name in [n for n in found.kept if n not in wanted]:
            found.give_up(name)
        for name in wanted:
            if name not in found.kept:
                found.keep(module, name, id(known[name]) in looked_up)
        found.given = bool(wanted)


def model_state(module: nn.Module, instead: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The state dict to be saved for others: every weight and buffer in the dtype it was loaded in, a 16-bit one rounded once from its fp32 master.

    instead: values to take for some parameters and buffers, by name (an average). Memory: a copy of the weights that are cast.
    """
    found = layout_of(module)
    loaded = found.loaded if found is not None else {}
    known = dict(module.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in module.named_parameters()}
    state: dict[str, Any] = module.state_dict()
    instead = instead or {}
    made: dict[int, Tensor] = {}  # a weight that stands under two names stays one tensor
    for key, value in state.items():
        p = known.get(key)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if p is None:
            state[key] = instead.get(key, value).to(loaded.get(key, value.dtype))
            continue
        if id(p) not in made:
            name, master = first[id(p)], master_of(p)
            full = instead[name] if name in instead else value if master is None else full_values(p)
            made[id(p)] = full.to(loaded.get(name, value.dtype if master is None else torch.float32))
        state[key] = made[id(p)]
    return state


settling = threading.RLock()  # one module is settled at a time; forward passes of settled ones do not wait


def _floating(module: nn.Module, apart: Collection[str] = ()) -> dict[str, Tensor]:
    """The fp32 and 16-bit parameters and buffers by name, without those of parts bound to a policy of their own."""
    foreign = {id(t) for name in apart for part in [module.get_submodule(name)] for t in (*part.parameters(), *part.buffers())}
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: t for name, t in named if t.dtype in WIDE and id(t) not in foreign and not torch.nn.parameter.is_lazy(t)}


@torch.no_grad()
def _cast(t: Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter or buffer in its place, with its gradient."""
    if t.dtype == dtype:
        return
    gradient, t.grad = t.grad, None
    t.data = torch.empty_like(t, dtype=dtype).copy_(t.detach())
    if isinstance(t, nn.Parameter):
        t.grad_dtype = dtype
    if gradient is not None:
        t.grad = gradient.to(dtype)


def _widen(t: Tensor) -> None:
    detach(t)
    _cast(t, torch.float32)


def _bring_up(module: nn.Module, made: Layout, count: int) -> None:
    """A model loaded in 16 bits: castable weights of the policy's format keep their bits and get masters, everything else goes up to fp32."""
    policy, own = made.policy, owned(module, made.policy, made.device, made.apart)
    kept = [name for name, p in own.items() if p.dtype == policy.dtype]
    stay = {id(own[name]) for name in kept}
    for t in _floating(module, made.apart).values():
        if id(t) not in stay:
            _widen(t)
    looked_up = tables(module)
    for name in kept:
        made.keep(module, name, id(own[name]) in looked_up)
    made.settled = not kept and not policy.is_lean
    logger.info(
        "%s: %d parameters were loaded in 16 bits; %d that autocast only casts stay %s with %s masters, the others went up to fp32, so that the "
        "forward pass is that of the model loaded in fp32",
        policy,
        count,
        len(kept),
        policy.autocast,
        made.storage,
    )


def _make_whole(module: nn.Module, made: Layout, held: Collection[str]) -> None:
    """Every weight and buffer in 16 bits, but for modules held in fp32, those that keep running statistics, and tables that 16 bits would spoil."""
    policy, wide = made.policy, dict[int, str]()
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, FP32_MODULES) or any(name == h or name.startswith(f"{h}.") for h in held):
            wide |= {id(t): name for t in (*part.parameters(False), *part.buffers(False))}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, FP32_MODULES) or any(name == h or name.startswith(f"{h}.") for h in held):
            continue
        tied = [n for n, p in part._parameters.items() if p is not None and id(p) in wide]
        if tied:
            raise PolicyError(
                f"{name}.{tied[0]} is tied to a weight of {wide[id(part._parameters[tied[0]])]}, which fp32= holds in fp32, and is itself not held",
                f"Hold both: add |{name} to fp32=.",
            )
    for name, t in _floating(module, made.apart).items():
        if id(t) in wide or (not isinstance(t, nn.Parameter) and _is_table(name.rpartition(".")[2], t, policy.dtype)):
            _widen(t)
        elif not isinstance(t, nn.Parameter) or not t.requires_grad:
            _cast(t, policy.dtype)
        else:
            if policy.dtype == torch.float16 and t.numel() and asked(t, lambda values: float(values.abs().amax()) > LARGEST_FP16, False):
                raise PolicyError(
                    f"{name} has weights of a magnitude above 2^15, and a step could take them out of fp16's range",
                    f"Hold its module in fp32 (fp32={name.rpartition('.')[0] or '...'}), or use bf16-true.",
                )
            if t.dtype != policy.dtype:
                _widen(t)
            made.keep(module, name)
    made.settled = True


def _is_table(own: str, buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether a buffer is a table that `dtype` would spoil: frequencies of rotary embeddings, positions, schedules, sines. One loaded in 16 bits is
    kept as wide too, if it is of frequencies: what is computed of them is in fp32 then.
    """
    return own.endswith("inv_freq") or asked(buffer, lambda values: table_loss(own, values.to(dtype)) is not None, False)


def _look_again(module: nn.Module, *_: Any) -> None:
    """After a state was loaded with assign=True the parameters are others."""
    found = layout_of(module)
    for name, before in list(found.kept.items()) if found is not None else ():
        p = module.get_parameter(name)
        if p is not before and found is not None:
            found.kept[name], p.halfstep_name = p, name  # type: ignore[attr-defined]
            if name in found.shared:
                found.share(name)


def not_castable(module: nn.Module, policy: Policy) -> PolicyError:
    """For a module of which a lean policy can keep nothing in 16 bits."""
    held = select((name for name, _ in module.named_modules()), policy.fp32) if policy.fp32 else ()
    mixed = policy.preset.replace("lean", "mixed")
    return PolicyError(
        f"{policy} keeps weights in 16 bits that autocast only casts (of linear layers, convolutions, attention, recurrent networks), and this "
        f"{type(module).__name__} has none" + (f" outside fp32={'|'.join(held)}" if held else ""),
        f"Use {mixed}, whose weights are fp32; or {policy.autocast}-true, which puts the whole model into {policy.autocast}.",
    )
