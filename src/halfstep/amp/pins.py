"""Submodules held in fp32 from some point of a run on, because 16 bits do not hold their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.autocast import autocast
from halfstep.amp.casting import PINS, Block, in_island, inner_function, upcast
from halfstep.amp.joined import joined
from halfstep.amp.ops import HALF
from halfstep.errors import ConfigError, suggest


@dataclass(frozen=True)
class Pin:
    """A part of a model that is held in fp32, why, and since which step."""

    module: str
    why: str = ""
    step: int | None = None


@dataclass(frozen=True)
class Pinned:
    """What `pin` did. `remove()` undoes it."""

    model: nn.Module
    pin: Pin
    changed: tuple[tuple[nn.Module, Any, Any], ...]  # a part, its forward now, and the one that stood on the instance before, if any

    def remove(self) -> None:
        """Give the part, and those inside it, the forward methods back that they had; what others have put there since stays."""
        held = _standing(self.model)
        for other in reversed(held.values()):  # pins may stand inside of each other: all are taken off, and the others put on again
            _undo(other.changed)
            hooks = other.changed[0][0]._forward_hooks
            for key in [key for key, hook in hooks.items() if hook is _is_called]:
                del hooks[key]
        self.model.__dict__.pop(PINS, None)
        for other in held.values():
            if other.pin.module != self.pin.module:
                other.again()

    def again(self) -> Pinned:
        """Pin the same part again, after this was removed."""
        return pin(self.model, self.pin.module, self.pin.why, self.pin.step)


def _is_called(part: nn.Module, args: Any, output: Any) -> None:
    """A hook that does nothing: where a part has one, torch's fused transformer layers call their parts instead of reading their weights."""


def _standing(model: nn.Module) -> dict[str, Pinned]:
    """The pins of a model that are in force. Methods go through pickle by name, so that a part of a model from a file has its own again."""
    held: dict[str, Pinned] = model.__dict__.get(PINS, {})
    return {name: made for name, made in held.items() if _stands(*made.changed[0][:2])}


def _stands(part: nn.Module, ours: Any) -> bool:
    return part.__dict__.get("forward") is ours and hasattr(getattr(ours, "__func__", None), "halfstep_pinned")


def pin(model: nn.Module, name: str, why: str = "", step: int | None = None) -> Pinned:
    """Hold the submodule `name` of `model` in fp32 from its next call on. Returns a handle that undoes it.

    Its floating inputs are cast up, it runs with autocast off, 16-bit weights in it are used as their fp32 masters (without a master: cast up), and
    its outputs are left in fp32. The weights stay what and where they are, so optimizers and checkpoints do not notice. `model` may be bound to a
    policy or not; plain `torch.autocast` around it is switched off inside too. Memory: nothing per parameter; while the part runs, an fp32 copy of
    its 16-bit weights, kept for its backward pass.

    In a model that you cast to 16 bits yourself the code after the part must take fp32: a residual sum does, a 16-bit layer does not. Bind such a
    model to a `*-true` policy, whose layers cast their inputs.

    why, step: kept with the pin and told by `pins(model)`. Raises ConfigError for a name that the model does not have, for the model itself, for a
    container that is never called, and for a part that is pinned already.
    """
    if not isinstance(model, nn.Module) or not isinstance(name, str):
        raise ConfigError(f"pin was given a {type(model).__name__} and a {type(name).__name__}", "Give it an nn.Module and the name of a part of it.")
    names = dict(model.named_modules())
    if name == "" or name not in names:
        known = [n for n in names if n]
        remedy = "Use an fp32 precision for the whole model." if name == "" else suggest(name, known) if known else "It has none at all."
        raise ConfigError("the whole model cannot be pinned" if name == "" else f"the model has no module {name!r} to pin", remedy)
    part, held = names[name], _standing(model)
    if name in held:
        raise ConfigError(f"{name} is pinned already", "Call remove() on its handle first.")
    if type(part).forward is nn.Module.forward and "forward" not in part.__dict__:
        children = ", ".join(f"{name}.{child}" for child, _ in part.named_children())
        raise ConfigError(f"{name} is a container that is never called, so pinning it has no effect", f"Pin what it holds: {children}.")
    if isinstance(names[name.rpartition(".")[0]], nn.MultiheadAttention):
        raise ConfigError(f"{name} is never called: nn.MultiheadAttention reads its weights", "Pin the attention module itself.")
    inside = [p.changed[0][0] for n, p in held.items() if n.startswith(f"{name}.")]  # parts of it that are pinned keep their own
    changed = _change_all(part, inside)
    part.register_forward_hook(_is_called)
    made = Pinned(model, Pin(name, why, step), changed)
    model.__dict__[PINS] = held | {name: made}
    return made


def pins(model: nn.Module) -> tuple[Pin, ...]:
    """The parts of `model` that `pin` holds in fp32, in the order in which they were pinned."""
    return tuple(p.pin for p in _standing(model).values())


def unpin(model: nn.Module, names: str | Iterable[str]) -> None:
    """Let pinned parts of `model` (one name, or several) run in 16 bits again. Raises ConfigError for one that is not pinned."""
    for name in [names] if isinstance(names, str) else list(names):
        held = _standing(model)
        if name not in held:
            raise ConfigError(f"{name} is not pinned", f"Pinned are: {', '.join(held) or 'none'}.")
        held[name].remove()


def pinned_call(model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a part of `model` would give if it were pinned, from what its forward method got. "" stands for the model. Its own hooks are not run."""
    part = model.get_submodule(name)
    pinned = _standing(model)
    if name in pinned:
        return part.forward(*args, **kwargs)
    held = [p.changed[0][0] for n, p in pinned.items() if name == "" or n.startswith(f"{name}.")]
    changed = _change_all(part, held)
    try:
        return part.forward(*args, **kwargs)
    finally:
        _undo(changed)


Changes = tuple[tuple[nn.Module, Any, Any], ...]


def _change_all(part: nn.Module, inside: list[nn.Module]) -> Changes:
    """Put a part into fp32, and the bound ones within it, which would else cast their inputs down when a policy has no autocast."""
    changed = [_change(part, _wide(part))]
    kept = {id(m) for held in inside for m in held.modules()}
    for inner in part.modules():
        block = _block(inner)
        if inner is not part and id(inner) not in kept and block is not None:
            changed.append(_change(inner, in_island(inner_function(inner), block)))
    return tuple(changed)


def _change(part: nn.Module, function: Callable[..., Any]) -> tuple[nn.Module, Any, Any]:
    before = part.__dict__.get("forward")
    part.forward = MethodType(function, part)
    return part, part.__dict__["forward"], before


def _undo(changed: Changes) -> None:
    """Forward methods as they were; what others have put there since stays."""
    for part, ours, before in changed:
        if part.__dict__.get("forward") is not ours:
            continue
        del part.forward
        if before is not None:
            part.forward = before


def _block(part: nn.Module) -> Block | None:
    """The block that a bound submodule runs in, or None for one that is not bound."""
    block = getattr(getattr(part.__dict__.get("forward"), "__func__", None), "halfstep_block", None)
    return block if isinstance(block, Block) else None


def _wide(part: nn.Module) -> Callable[..., Any]:
    """The forward method of a part as a pin wants it."""
    function, block = inner_function(part), _block(part)
    function = getattr(function, "halfstep_under", function)
    forward = in_island(function, block) if block is not None else function

    @functools.wraps(function)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with widened(self), _off(self, args, kwargs):
            return upcast(forward(self, *upcast(args), **upcast(kwargs)))

    run.halfstep_part_of = function  # type: ignore[attr-defined]  # read by inner_function: binding it anew binds what it had
    run.halfstep_block = block  # type: ignore[attr-defined]
    run.halfstep_pinned = True  # type: ignore[attr-defined]
    return run


def _off(part: nn.Module, args: Any, kwargs: Any) -> ExitStack:
    """Autocast switched off on the devices that the part has to do with."""
    tensors = [t for t in (*args, *kwargs.values(), *part.parameters()) if isinstance(t, Tensor)]
    stack = ExitStack()
    for device in {t.device.type for t in tensors} & {"cpu", "cuda"}:
        stack.enter_context(autocast(device, enabled=False))
    return stack


@contextmanager
def widened(part: nn.Module) -> Iterator[None]:
    """Inside, the 16-bit parameters and floating buffers of a module stand there in fp32: masters where there are, else the values cast up.

    Gradients go to the parameters themselves. What is written into a buffer goes back to it.
    """
    with ExitStack() as stack:
        with torch._C.DisableTorchFunction():  # inside a bound model a kept weight says that it is fp32
            places = [place for module in part.modules() for place in (module._parameters, module._buffers)]
            narrow = [(place, key, t) for place in places for key, t in place.items() if t is not None and t.dtype in HALF]
        for place, key, held in narrow:
            stack.enter_context(_in_place_of(place, key, held))
        for module in part.modules():
            if isinstance(module, nn.RNNBase):
                stack.enter_context(_flat(module))
        yield


@contextmanager
def _in_place_of(place: dict[str, Any], key: str, held: Tensor) -> Iterator[None]:
    wide = joined(held)
    version = None if wide.is_inference() else wide._version  # inference tensors count none, and nothing is trained there
    place[key] = wide
    try:
        yield
    finally:
        place[key] = held
        if version is not None and wide._version != version and not isinstance(held, nn.Parameter):
            held.copy_(wide)


@contextmanager
def _flat(module: nn.RNNBase) -> Iterator[None]:
    """Recurrent networks read their weights from a list of their own."""
    before = module._flat_weights
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    try:
        yield
    finally:
        module._flat_weights = before
