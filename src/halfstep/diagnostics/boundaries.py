"""What passes the boundaries of modules in one forward and backward pass: recorded in one run, put in the place of its own in another.

A boundary is what a module is given, or gives. Between two of them runs one piece of code, of one module. A replay runs each piece in the reference
on exactly the numbers that the recorded run gave it, forward and backward, so a difference at a boundary arises in the piece before it and nowhere
else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Side = Literal["in", "out"]
OUTSIDE = "<outside>"  # caller of the model: makes its inputs, and the gradients of its outputs


@dataclass
class Boundary:
    """Tensors at one boundary, in their order. module: path; side: what it was given, or gave. caller: path of the module that called it.

    values: detached. gradients: of each, None where there is none.
    """

    module: str
    side: Side
    caller: str
    values: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def maker(self) -> str:
        """The module whose code has made the values."""
        return self.caller if self.side == "in" else self.module

    @property
    def gradient_maker(self) -> str:
        """The module whose code has made the gradients: on the way back it is the other one."""
        return self.module if self.side == "in" else self.caller


class Recorder:
    """The block in which the boundaries of one forward pass, and the gradients of the backward pass after it, are noted.

    names: paths of the modules of interest by id. Memory: a copy of every tensor that passes a boundary, and of its gradient.
    """

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        self.model, self.names = model, names
        self.passed: list[Boundary] = []
        self._stack: list[tuple[str, bool]] = []  # modules whose code runs, and whether autocast was on where they were called
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
        for part in self.model.modules():
            if id(part) in self.names:
                self._hooks.append(part.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._hooks.append(part.register_forward_hook(self._leave, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def module(self) -> str:
        """The module whose code runs, OUTSIDE for none."""
        return self._stack[-1][0] if self._stack else OUTSIDE

    @property
    def opener(self) -> str:
        """Where autocast is on: the module whose code has switched it on."""
        return next((name for name, on in reversed(self._stack) if not on), OUTSIDE)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if computed_again():
            return None
        name = self.names[id(module)]
        result = self._pass("in", name, (args, kwargs))
        self._stack.append((name, any(map(torch.is_autocast_enabled, ("cpu", "cuda")))))
        return result

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if computed_again():
            return None
        name, _ = self._stack.pop()
        return self._pass("out", name, output)

    def _pass(self, side: Side, name: str, value: Any) -> Any:
        """Note what passes; what goes on from there, or None when it is that itself."""
        leaves, spec = tree_flatten(value)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        boundary = Boundary(name, side, self.module, [], [None] * len(places))
        going = list(leaves)
        for number, i in enumerate(places):
            going[i] = self.meet(boundary, number, leaves[i])
        self.passed.append(boundary)
        return tree_unflatten(going, spec) if any(a is not b for a, b in zip(going, leaves, strict=True)) else None

    def meet(self, boundary: Boundary, number: int, t: Tensor) -> Tensor:
        """Note a tensor at a boundary, and give what goes on from there: a view of it, whose gradient is that of the uses after the boundary."""
        boundary.values.append(t.detach().clone())
        if not t.requires_grad:
            return t
        going = t.view_as(t)
        going.register_hook(lambda gradient: _put(boundary, number, gradient))  # type: ignore[no-untyped-call]
        return going


class Replay(Recorder):
    """A pass in which each recorded value and gradient takes the place of the one that the model has made, which is noted.

    recorded: boundaries of the other run; scale: what its gradients were multiplied by. noise: by how much, relatively, each number that is put in
    its place is moved at random (uniform in plus and minus); modules of no interest (`names`) have their own outputs moved.
    lost: where the model went another way than the recorded run; nothing is put in place from there on.
    """

    def __init__(self, model: nn.Module, names: dict[int, str], recorded: list[Boundary], scale: float, noise: float = 0.0) -> None:
        super().__init__(model, names)
        self.recorded, self.scale, self.noise = recorded, scale, noise
        self.lost: Boundary | None = None
        self.behind = OUTSIDE  # the module whose code runs in the backward pass
        self._generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Replay:
        super().__enter__()
        if self.noise:
            others = [part for part in self.model.modules() if id(part) not in self.names]
            self._hooks += [part.register_forward_hook(self._moved_output) for part in others]
        return self

    def meet(self, boundary: Boundary, number: int, t: Tensor) -> Tensor:
        """See Recorder: gives the recorded tensor in the place of `t`."""
        boundary.values.append(t.detach())
        other = self._other(boundary, number, t)
        if other is None:
            return t
        given = self.moved(other.values[number].to(t.device, t.dtype, copy=True))
        if not t.requires_grad:
            return given
        return _Instead.apply(t, [given], self, boundary, other, number)  # type: ignore[no-any-return, no-untyped-call]

    def _other(self, boundary: Boundary, number: int, t: Tensor) -> Boundary | None:
        """The recorded boundary that this one is the twin of."""
        place = len(self.passed)
        other = self.recorded[place] if place < len(self.recorded) else None
        if self.lost is None and (
            other is None
            or (other.module, other.side) != (boundary.module, boundary.side)
            or len(other.values) <= number
            or other.values[number].shape != t.shape
        ):
            self.lost = boundary
        return None if self.lost is not None else other

    def moved(self, t: Tensor) -> Tensor:
        """`t` with noise, but for numbers of two bits (0, 1, 1.5, 2): they are exact in every format, and often stand for a choice or a count."""
        if self.noise and t.is_complex():
            return torch.view_as_complex(self.moved(torch.view_as_real(t.resolve_conj())))
        if not self.noise or not t.is_floating_point():
            return t
        source = self._generators.get(t.device)
        if source is None:
            source = self._generators[t.device] = torch.Generator(t.device).manual_seed(7)
        wide = t.detach().float()
        by = torch.rand(t.shape, generator=source, device=t.device).mul_(2 * self.noise).sub_(self.noise)
        by.masked_fill_(wide.view(torch.int32) & 0x3FFFFF == 0, 0.0)
        return torch.addcmul(wide, wide, by).to(t.dtype)

    def _moved_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        if computed_again():
            return None
        leaves, spec = tree_flatten(output)
        return tree_unflatten([t + (self.moved(t.detach()) - t.detach()) if _floating(t) else t for t in leaves], spec)


class _Instead(torch.autograd.Function):
    """Gives a recorded tensor for one of its own; on the way back the recorded gradient for its own, which is noted."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, given: list[Tensor], replay: Replay, boundary: Boundary, other: Boundary, number: int) -> Tensor:
        ctx.known = (replay, boundary, other, number)
        return given[0]  # out of a list: an input that is given back would be a view, which nothing may write to

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        replay, boundary, other, number = ctx.known
        _put(boundary, number, gradient)
        replay.behind = boundary.module if boundary.side == "out" else boundary.caller
        known = other.gradients[number]
        if known is not None:
            gradient = replay.moved(at_least_fp32(known.to(gradient.device)) / replay.scale).to(gradient.dtype)
        return gradient, None, None, None, None, None


def _put(boundary: Boundary, number: int, gradient: Tensor) -> None:
    boundary.gradients[number] = gradient.detach().clone()


def at_least_fp32(t: Tensor) -> Tensor:
    """A floating or complex tensor in fp32 or its complex twin, or wider where it is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def computed_again() -> bool:
    """Whether a backward pass runs: a forward pass then is one computed again (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1
