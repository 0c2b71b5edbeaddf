"""Bind a policy to a module: its forward pass then runs under the policy wherever it is called from."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.autocast import Products, autocast, forward_context
from halfstep.amp.joined import JoinedWeights, joined_weights
from halfstep.amp.lean import before_compiled, layout_of, prepare, refuse_cast, undo
from halfstep.amp.mode import Within, inside
from halfstep.amp.ops import HALF, check_lists
from halfstep.amp.settling import Care, minded, settle
from halfstep.errors import ConfigError
from halfstep.policy import Policy, chosen, select

_CAST = (torch.float32, *HALF)
PINS = "halfstep_pins"  # the attribute of a module that has pinned parts: a dict of handles by name


@dataclass(frozen=True)
class Binding:
    """What `bind` did. `remove()` undoes it; `fp32` names the modules held in fp32."""

    module: nn.Module
    fp32: tuple[str, ...]
    changed: tuple[tuple[str, Any, Any], ...] = ()  # name of a module, its forward now, and the one that stood on the instance before, if any

    def remove(self) -> None:
        """Give the module and its parts the forward methods back that they had; a part that was bound anew since then keeps its own.

        Weights and buffers that the policy holds in 16 bits become fp32, each exactly its master. Pins are removed first.
        """
        for pinned in reversed(list(self.module.__dict__.get(PINS, {}).values())):
            pinned.remove()
        undo(self.module)
        for name, ours, before in self.changed:
            part = self.module.get_submodule(name)
            if part.__dict__.get("forward") is not ours:
                continue
            del part.forward
            if before is not None:
                part.forward = before


def bound_policy(module: nn.Module) -> Policy | None:
    """The policy that `module` is bound to, or None. It stands on the bound method: a module that lost that has no policy."""
    forward = module.__dict__.get("forward")
    policy = getattr(getattr(forward, "__func__", None), "halfstep_policy", None)
    return policy if isinstance(policy, Policy) else None


def products_of(module: nn.Module) -> Products | None:
    """How the products of a bound module run on a CPU, or None for one that is not bound. Changed in place; copies of the module share it."""
    block = getattr(getattr(module.__dict__.get("forward"), "__func__", None), "halfstep_block", None)
    return block.products if isinstance(block, Block) else None


def bind(module: nn.Module, policy: Policy, device: torch.device, products: Products | None = None) -> Binding:
    """Make `module.forward` run under `policy`, in every thread, with its 16-bit outputs cast up to fp32 if the policy says so.

    Its submodules do so too when they are called by themselves, from wherever (`model.head(x)`, a checkpointed block computed again): called
    inside the module's own forward pass they add nothing, and a block that the user opens there is obeyed.
    Modules that `policy.fp32` names run with autocast off and their 16-bit inputs cast up; they leave fp32 outputs.
    Weights: under `*-mixed` none is touched when the module was loaded in fp32. Of one loaded in 16 bits those that autocast only casts stay so
    and get masters, and everything else goes up to fp32. Under `*-lean` the first call puts into 16 bits what autocast only casts
    (`halfstep.amp.layout` tells which), after a rehearsal of its forward pass that leaves no trace. Under `*-true` everything goes to 16 bits
    now, but for modules of `policy.fp32`, batch norms, and frequencies of rotary embeddings; floating inputs are cast.
    products: how products run on a CPU, read at each call; without it as the policy says.
    The bound methods follow the module through deepcopy, the masters through pickle too. Bytes: `halfstep.policy.bytes_per_parameter`.
    Raises PolicyError when `*-lean` finds nothing to keep in 16 bits (at the first call); ConfigError for a pattern that matches no module, or
    one that torch never calls, for a name of an op that is none, and for a module that is bound.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"a {type(module).__name__} has no forward method in Python that a policy could be bound to",
            "Prepare the module that it was traced or scripted from, and use torch.compile for speed.",
        )
    already = bound_policy(module)
    if already is not None:
        raise ConfigError(f"this {type(module).__name__} is already bound to {already}", "Call remove() on that binding first, or bind a copy.")
    held = _called(module, select((name for name, _ in module.named_modules()), policy.fp32)) if policy.fp32 else ()
    own = {name: bound_policy(part) for name, part in module.named_modules() if name and bound_policy(part) is not None}
    for name in held:
        if any(f"{name}.".startswith(f"{o}.") for o in own):
            raise ConfigError(
                f"fp32={name} has no effect: that part is bound to a policy of its own, {next(iter(own.values()))}", "Leave the name out of fp32=."
            )
        if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise ConfigError(
                f"fp32={name} has no effect: nn.MultiheadAttention reads its weights and never calls it", "Name the attention module itself."
            )
    check_lists(chosen(policy).fp32_ops, policy.half_ops)
    pinned = list(module.__dict__.get(PINS, {}).values())
    for handle in reversed(pinned):
        handle.remove()
    apart = tuple(own)
    made = prepare(module, policy, device, held, apart)
    care: Care = "tables" if policy.whole or (policy.is_mixed and policy.weights == "plain") else "masters" if made is not None else "none"
    block = Block(policy, device, care, products if products is not None else Products(policy.products))
    changed: list[tuple[str, Any, Any]] = []
    for name, part in list(module.named_modules()):
        if name and (not _binds(part) or any(f"{name}.".startswith(f"{o}.") for o in own) or not (block.acts or device.type != "cpu")):
            continue
        if not name:
            function = _under(inner_function(part), block)
            function.halfstep_policy = policy  # type: ignore[attr-defined]  # read by bound_policy
        elif name in held:
            function = in_island(inner_function(part), block)
        else:
            narrow = policy.whole and any(p is not None and p.dtype == policy.dtype for p in part._parameters.values())
            function = _part(inner_function(part), block, any(name.startswith(f"{outer}.") for outer in held), narrow)
        before = part.__dict__.get("forward")
        part.forward = MethodType(function, part)
        changed.append((name, part.__dict__["forward"], before))
    for handle in pinned:  # what was held in fp32 before stays so
        handle.again()
    return Binding(module, held, tuple(changed))


@dataclass(frozen=True)
class Block:
    """In what the forward passes of a bound module and its parts run. products: how those of a CPU run, the same for all of them."""

    policy: Policy
    device: torch.device
    care: Care = "none"
    products: Products | None = None

    @property
    def acts(self) -> bool:
        """Whether anything is different in it, on a CPU."""
        return self.policy.is_mixed or self.policy.whole

    @property
    def joins(self) -> JoinedWeights | None:
        """What is done to functions that are given weights kept in 16 bits."""
        return joined_weights(self.policy, self.device.type) if self.care == "masters" else None


def _binds(part: nn.Module) -> bool:
    """Whether a submodule gets a bound method: it is called itself, and is no compiled script."""
    called = type(part).forward is not nn.Module.forward or "forward" in part.__dict__
    return called and not isinstance(part, torch.jit.ScriptModule)


def settle_now(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a bound module decide now on its weights, as its first compiled call with these arguments would; nothing for one with nothing to decide."""
    made, forward = layout_of(module), module.__dict__.get("forward")
    under = getattr(getattr(forward, "__func__", None), "halfstep_under", None)
    if made is not None and not made.settled and under is not None:
        settle(module, made, under, args, kwargs, compiled=True)


def inner_function(module: nn.Module) -> Callable[..., Any]:
    """The forward method of a module, before it was bound as a part of another, as a function of (module, ...).

    So that it can be bound anew and survive a deepcopy.
    """
    forward: Any = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        within: Callable[..., Any] | None = getattr(forward.__func__, "halfstep_part_of", None)
        return within or forward.__func__

    @functools.wraps(forward)
    def borrowed(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    del borrowed.__wrapped__  # it has no `self`, so its signature would lose the first argument
    own = inspect.signature(forward)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    borrowed.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    return borrowed


def _called(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """The modules of `names`, with containers that are never called themselves (ModuleList, ModuleDict) replaced by what they hold."""
    found: list[str] = []
    for name in names:
        part = module.get_submodule(name)
        if type(part).forward is nn.Module.forward and "forward" not in part.__dict__:
            found += _called(module, tuple(f"{name}.{child}" for child, _ in part.named_children()))
        else:
            found.append(name)
    return tuple(found)


def _under(forward: Callable[..., Any], block: Block) -> Callable[..., Any]:
    """The forward method of a bound module: each call is inside a block of its own."""
    policy, device, care, joins, products = block.policy, block.device, block.care, block.joins, block.products

    inner = kept_as(forward, policy)
    plain = not block.acts and device.type == "cpu" and care == "none" and inner is forward  # there is nothing to open

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unread, inside.unread = inside.unread, False  # those of modules inside are read
        if care == "masters" and (made := layout_of(self)) is not None:
            if not made.settled:
                settle(self, made, forward, args, kwargs, torch.compiler.is_compiling())
            elif torch.compiler.is_compiling():
                before_compiled(made.key)
            elif made.frozen:
                made.thaw()
        elif policy.whole:
            if not torch.compiler.is_compiling():
                refuse_cast(self)
            args, kwargs = cast_floating(args, policy.dtype), cast_floating(kwargs, policy.dtype)
        if plain and inside.policy is None:
            outputs = forward(self, *args, **kwargs)
        else:
            with Within(policy, joins, unread), forward_context(policy, device, products), minded(care, device.type):
                outputs = inner(self, *args, **kwargs)
        return upcast(outputs) if policy.output == "fp32" and not unread else outputs

    run.halfstep_under = forward  # type: ignore[attr-defined]  # read by discovery.forward_of, and by pins
    run.halfstep_block = block  # type: ignore[attr-defined]
    return run


def _part(forward: Callable[..., Any], block: Block, in_held: bool, narrow: bool) -> Callable[..., Any]:
    """The forward method of a submodule: as it is inside the bound module's forward pass, else under the policy.

    in_held: it is a part of a module held in fp32, and runs in fp32 by itself too. narrow: it has 16-bit weights and no autocast, so that its inputs
    must be 16-bit too.
    """
    policy, device, care, joins, products = block.policy, block.device, block.care, block.joins, block.products
    from halfstep.amp.written_out import in_fewer_passes  # where something is bound

    inner, call = kept_as(forward, policy), in_fewer_passes(forward)

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if narrow:
            args, kwargs = cast_floating(args, policy.dtype), cast_floating(kwargs, policy.dtype)
        if inside.policy is policy:
            return call(self, *args, **kwargs)
        island = autocast(device.type, enabled=False) if in_held else nullcontext()
        with Within(policy, joins), forward_context(policy, device, products), minded(care, device.type), island:
            outputs = inner(self, *args, **kwargs)
        return outputs if policy.output == "compute" or _computed_again() else upcast(outputs)

    run.halfstep_part_of = forward  # type: ignore[attr-defined]  # read by inner_function: binding it anew binds what it had
    run.halfstep_block = block  # type: ignore[attr-defined]  # read by pins
    return run


def in_island(forward: Callable[..., Any], block: Block) -> Callable[..., Any]:
    """The forward method of a module held in fp32: under the policy of its model, with autocast off and inputs cast up."""
    policy, device, care, joins, products = block.policy, block.device, block.care, block.joins, block.products
    inner = kept_as(forward, policy)

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside.policy is policy:
            with autocast(device.type, enabled=False):
                return forward(self, *upcast(args), **upcast(kwargs))
        with Within(policy, joins), forward_context(policy, device, products), minded(care, device.type), autocast(device.type, enabled=False):
            return inner(self, *upcast(args), **upcast(kwargs))

    run.halfstep_part_of = forward  # type: ignore[attr-defined]
    run.halfstep_block = block  # type: ignore[attr-defined]
    return run


def kept_as(forward: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """The forward method of a module that is called by itself: it keeps for the backward pass what the policy says."""
    if policy.activations == "full":
        return forward
    from halfstep.amp.saving import compressed  # only for those who ask for it

    return compressed(forward, policy)


def _computed_again() -> bool:
    """Whether this call is made by a backward pass (activation checkpointing): its outputs must then be as they were, in 16 bits."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def upcast(value: Any) -> Any:
    """`value` with every 16-bit floating tensor in it cast to fp32; containers keep their type, other objects are returned as they are."""
    if type(value) is dict and all(type(v) is Tensor and v.dtype is torch.float32 for v in value.values()):  # what most models give
        return value
    return cast_floating(value, torch.float32)


def cast_floating(value: Any, to: torch.dtype) -> Any:
    """`value` with every fp32 and 16-bit floating tensor in it cast to `to`; containers keep their type, other objects are returned as they are."""
    if isinstance(value, Tensor):
        return value.to(to) if value.dtype in _CAST else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(v, to) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(v, to) for v in value)
    if is_dataclass(value) and not isinstance(value, type | Mapping):
        changed = {f.name: new for f in fields(value) if f.init and (new := cast_floating(old := getattr(value, f.name), to)) is not old}
        return replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        cast = {k: cast_floating(v, to) for k, v in value.items()}
        if all(cast[k] is v for k, v in value.items()):
            return value
        if type(value) is dict or not isinstance(value, MutableMapping):
            return cast
        twin = copy.copy(value)  # keeps its type: OrderedDict, transformers' ModelOutput and BatchEncoding
        for key, item in cast.items():
            twin[key] = item
        return twin
    return value
