"""Gradient checkpointing: the activations inside a model's repeated blocks are not kept for the backward pass but computed again in it.

transformers models switch their own on. In any other module the blocks that repeat are found, and their forward methods wrapped in
`torch.utils.checkpoint`. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, suggest
from halfstep.numerics.standins import is_shape

SETTINGS = frozenset({"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"})
WHOLE = frozenset({"every_n_layers", "offload"})  # what transformers models know beside these


class Recomputed:
    """What `recompute_blocks` did. `blocks` names the modules that are computed again; `remove()` undoes it."""

    def __init__(self, blocks: tuple[str, ...], undo: Callable[[], None]) -> None:
        self.blocks = blocks
        self._undo = undo

    def remove(self) -> None:
        """Keep the activations again."""
        self._undo()


def recompute_blocks(model: nn.Module, settings: Mapping[str, Any] | None = None) -> Recomputed:
    """Compute the activations of the repeated blocks of `model` again in the backward pass, while it trains; returns a handle that undoes it.

    A model with a method for it (of transformers: `activation_checkpointing_enable`, or `gradient_checkpointing_enable`) does it itself, and its
    forward pass gets use_cache=False: keys and values for later tokens are of no use in training (and a run with them rounds otherwise). In any
    other model these are the members of each ModuleList or Sequential that has two or more of one class, each with parts of its own; of nested ones
    the outermost.

    settings: arguments of `torch.utils.checkpoint.checkpoint`, use_reentrant=False unless they say otherwise. Losses, gradients, buffers and random
    states are those without checkpointing, bit for bit: each block begins again with the random state and the buffers that it began with (those that
    its first forward pass in the same training modes changes; under torch.compile torch looks after them). With use_reentrant=True gradients of a
    block that is used more than once are summed up in another order.
    Memory: of each block its inputs instead of all its activations. Time: one more forward pass of the blocks in each step.
    Raises ConfigError for a model in which there is nothing to compute again.
    """
    chosen = {"use_reentrant": False, **(settings or {})}
    own = _method(model, "enable")
    for name in set(chosen) - (SETTINGS if own is None else SETTINGS | WHOLE):
        raise ConfigError(f"gradient_checkpointing_kwargs has {name!r}, which torch.utils.checkpoint does not know", suggest(name, SETTINGS))
    if own is not None:
        return _switched_on(model, own, chosen)
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"gradient_checkpointing=True has nothing to act on: this {type(model).__name__} has no ModuleList or Sequential with two or more blocks "
            "of one class that have parts of their own",
            "Leave it out, put the repeated blocks into an nn.ModuleList, or call torch.utils.checkpoint in the model's forward.",
        )
    on = [True]
    changed = [(block, block.__dict__.get("forward")) for block in blocks.values()]
    ours = []
    for block in blocks.values():
        block.forward = MethodType(_wrapped(block, chosen, on), block)
        ours.append(block.__dict__["forward"])

    def undo() -> None:
        on.clear()  # for what others have kept of it meanwhile: a pin restores the forward method that it found
        for (block, before), mine in zip(changed, ours, strict=True):
            if block.__dict__.get("forward") is mine:
                del block.forward
                if before is not None:
                    block.forward = before

    return Recomputed(tuple(blocks), undo)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost repeated blocks of a model by name, each module once."""
    found: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or any(f"{name}.".startswith(f"{outer}.") for outer in found):
            continue
        kinds = [type(child) for child in part]
        for place, child in part.named_children():
            if kinds.count(type(child)) > 1 and next(child.children(), None) is not None and type(child).forward is not nn.Module.forward:
                found[f"{name}.{place}" if name else place] = child
    return found


def _switched_on(model: nn.Module, enable: Callable[..., Any], settings: dict[str, Any]) -> Recomputed:
    """Let a transformers model do it; one that does it already goes on doing it afterwards."""
    already = any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules())
    apart = {name: settings.pop(name) for name in WHOLE if name in settings}
    try:
        enable(settings, **apart)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"gradient_checkpointing=True was refused by this {type(model).__name__}: {error}", "Leave it out.") from error
    blocks = tuple(name for name, m in model.named_modules() if getattr(m, "gradient_checkpointing", False) is True)
    if not blocks:
        raise ConfigError(f"gradient_checkpointing=True has nothing to act on: no part of this {type(model).__name__} takes it", "Leave it out.")
    hook = model.register_forward_pre_hook(_without_cache, with_kwargs=True) if _takes_cache(model) else None

    def undo() -> None:
        if hook is not None:
            hook.remove()
        if not already:
            _method(model, "disable")()

    return Recomputed(blocks, undo)


def _method(model: nn.Module, verb: str) -> Any:
    """The model's own method to enable or disable it, by its newer or its older name; None without any."""
    return getattr(model, f"activation_checkpointing_{verb}", None) or getattr(model, f"gradient_checkpointing_{verb}", None)


def _takes_cache(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "use_cache", False))


def _without_cache(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    return (args, {"use_cache": False, **kwargs}) if model.training else None


def _wrapped(block: nn.Module, settings: Mapping[str, Any], on: list[bool]) -> Callable[..., Any]:
    """A forward method for a block that keeps its inputs only."""
    forward: Any = block.forward
    from torch.utils.checkpoint import checkpoint

    learnt = WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], tuple[str, ...]]]()  # the buffers that a forward pass of a block changes
    function, given = getattr(forward, "__func__", forward), forward
    own = getattr(forward, "__self__", None) is block

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = MethodType(function, self) if own else given  # a copy of the block runs its own
        if not on or not self.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling() or next(self.buffers(), None) is None:
            return checkpoint(forward, *args, **settings, **kwargs)
        modes = tuple(part.training for part in self.modules())  # batch norms that are in evaluation now may be in training later
        known = learnt.setdefault(self, {}).get(modes)
        held = {name: b.detach().clone() for name, b in self.named_buffers() if known is None or name in known}
        outputs = checkpoint(_Once(forward, self, held), *args, **settings, **kwargs)
        if known is None:
            now = dict(self.named_buffers())
            learnt[self][modes] = tuple(name for name, b in held.items() if name not in now or is_shape(b) or not torch.equal(b, now[name]))
            for name in set(held) - set(learnt[self][modes]):
                del held[name]
        return outputs

    return functools.wraps(function)(run) if function is not given else run


class _Once:
    """The forward pass of a block: the first leaves its buffers as it makes them, any later one begins and ends as `_Again` says."""

    def __init__(self, forward: Callable[..., Any], block: nn.Module, held: dict[str, Tensor]) -> None:
        self._forward, self._block, self._held = forward, block, held
        self._done = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Again(self._block, self._held) if self._done else nullcontext():
            self._done = True
            return self._forward(*args, **kwargs)


class _Again(AbstractContextManager[None]):
    """The block of a second forward pass: buffers begin as they did in the first, and are afterwards what they were before it."""

    def __init__(self, block: nn.Module, held: dict[str, Tensor]) -> None:
        self.block, self.held = block, held
        self._now: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self._now = {name: b.detach().clone() for name, b in self.block.named_buffers() if name in self.held}
        self._write(self.held)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write(self._now)
        self._now = {}

    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, b in self.block.named_buffers():
            if name in values:
                b.data.copy_(values[name])  # no new version: graphs that hold the buffer stay valid
