"""Marks on gradients: which tensor, in which version, so that a change that nobody announced is seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from halfstep.numerics import stored

Marks = tuple[tuple["ref[Tensor]", int], ...]


class Owner(Protocol):
    """An optimizer, or what stands in for one."""

    param_groups: list[dict[str, Any]]


def parameters(optimizer: Owner) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(optimizer: Owner) -> list[Tensor]:
    """All gradients of an optimizer's parameters."""
    return [p.grad for p in parameters(optimizer) if p.grad is not None]


def marks(tensors: Sequence[Tensor]) -> Marks:
    """What tells these tensors, in this state, from others: weak references and versions."""
    return tuple((ref(t), t._version) for t in tensors)


def unchanged(known: Marks, tensors: Sequence[Tensor]) -> bool:
    """Whether these are the tensors that were marked, in the same state."""
    return len(known) == len(tensors) and all(m() is t and version == t._version for (m, version), t in zip(known, tensors, strict=True))


class Sign:
    """Put on gradients: which object made them, as a weak reference, so that a gradient can be asked whom to turn to."""

    def __init__(self, maker: object) -> None:
        self.maker = ref(maker)

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        return OrderedDict, ()  # a copy of a gradient was made by nobody; of the few classes that torch.load takes


def maker_of(gradient: Tensor) -> Any:
    """The object that signed a gradient, or None."""
    sign = getattr(gradient, "made_by", None)
    return sign.maker() if isinstance(sign, Sign) else None


@dataclass
class _Left:
    """How a backward pass, or unscaling, left the gradient of one parameter."""

    parameter: ref[Tensor]
    gradient: ref[Tensor]
    version: int
    used: bool = False  # unscaled or stepped with since
    mixed: bool = False  # a backward pass has added scaled gradients to used ones


class Ledger:
    """How the last backward pass left each gradient, by parameter, and which were unscaled or used since."""

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}

    def note(self, owners: Iterable[Tensor], sign: Sign | None) -> tuple[set[int], set[int]]:
        """Take down how the gradients of these parameters are now, and put `sign` on each.

        Returns the ids of parameters whose gradient has changed since the last note, and of those among them that one backward
        pass has added to (a gradient that was cleared in between is another tensor, or has changed more than once).
        """
        moved, added = set(), set()
        for p in owners:
            g = p.grad
            if g is None:
                self._left.pop(id(p), None)
                continue
            before = self._left.get(id(p))
            same = before is not None and before.gradient() is g
            if before is not None and same and before.version == g._version:
                continue
            moved.add(id(p))
            grown = before is not None and same and before.version + 1 == g._version
            if grown:
                added.add(id(p))
            mixed = before is not None and grown and (before.used or before.mixed)
            self._left[id(p)] = _Left(ref(p), ref(g), g._version, mixed=mixed)
            g.made_by = sign  # type: ignore[attr-defined]  # read by the guard of plain optimizer steps and by amp.clip_grad_norm_
        return moved, added

    def again(self) -> None:
        """Accept all gradients as they are now."""
        for left in self._left.values():
            p = left.parameter()
            if p is not None and p.grad is not None:
                left.gradient, left.version = ref(p.grad), p.grad._version

    def holds(self, p: Tensor) -> bool:
        """Whether a backward pass left a gradient with this parameter that was not unscaled or used since."""
        left = self._left.get(id(p))
        return left is not None and not left.used and left.parameter() is p and p.grad is not None

    def bears_scale(self, p: Tensor) -> bool:
        """The same, and at most one edit (a clip) has changed it since: one that was zeroed and made anew by others has changed twice."""
        left = self._left.get(id(p))
        return left is not None and self.holds(p) and p.grad is not None and left.gradient() is p.grad and p.grad._version <= left.version + 1

    def is_unscaled(self, p: Tensor) -> bool:
        """Whether the gradient of this parameter was unscaled since the last backward pass."""
        left = self._left.get(id(p))
        return left is not None and left.used and p.grad is not None and left.gradient() is p.grad

    def mixed(self, owners: Iterable[Tensor]) -> list[Tensor]:
        """Parameters whose used gradient was not cleared before a backward pass added to it."""
        return [p for p in owners if (left := self._left.get(id(p))) is not None and left.mixed and self.holds(p)]

    def edited(self, owners: Iterable[Tensor]) -> list[Tensor]:
        """Parameters whose gradient is not as a backward pass left it, all-zero ones excepted (they were cleared)."""
        found = []
        for p in owners:
            left = self._left.get(id(p))
            if left is None or left.used or left.parameter() is not p or p.grad is None:
                continue
            if (left.gradient() is not p.grad or left.version != p.grad._version) and bool(stored(p.grad).any()):
                found.append(p)
        return found

    def use(self, owners: Iterable[Tensor]) -> None:
        """The gradients of these parameters were unscaled or stepped with, and are as they should be now."""
        for p in owners:
            if p.grad is not None:
                self._left[id(p)] = _Left(ref(p), ref(p.grad), p.grad._version, used=True)
