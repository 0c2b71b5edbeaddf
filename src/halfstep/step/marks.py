"""Marks on gradients: which tensor, in which version, so that a change that nobody announced is seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import finalize, ref

import torch
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
    return [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]


def marks(tensors: Sequence[Tensor]) -> Marks:
    """What tells these tensors, in this state, from others: weak references and versions."""
    return tuple([(ref(t), t._version) for t in tensors])


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


@dataclass(slots=True)
class _Left:
    """How a backward pass, or unscaling, left the gradient of one parameter."""

    parameter: ref[Tensor]
    gradient: ref[Tensor]
    version: int
    used: bool = False  # it was unscaled
    spent: bool = False  # a step was taken with it, or refused
    edited: bool = False  # somebody changed it while it was scaled
    mixed: bool = False  # a backward pass has added to it after it was used or spent
    losses: frozenset[int] = frozenset()  # the numbers of the losses it comes from

    def is_of(self, p: Tensor) -> bool:
        """Whether this is about the gradient that `p` has now."""
        return p.grad is not None and self.parameter() is p and self.gradient() is p.grad


class _Heard:
    """A hook on a parameter that tells a ledger of each accumulation. Holds it weakly; a copy, by deepcopy or pickle, tells nobody."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ref(ledger) if ledger is not None else None

    def __call__(self, parameter: Tensor) -> None:
        ledger = self._ledger() if self._ledger is not None else None
        if ledger is not None:
            ledger.heard(parameter)

    def __reduce__(self) -> tuple[type[_Heard], tuple[()]]:
        return _Heard, ()


def _take_away(armed: dict[int, tuple[ref[Tensor], Any]]) -> None:
    for _, hook in armed.values():
        hook.remove()


class Ledger:
    """How the last backward pass left each gradient, by parameter, from which losses, and what was done with it since.

    turn: grows whenever an answer may change but by gradients being cleared.
    """

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}
        self._armed: dict[int, tuple[ref[Tensor], Any]] = {}  # with the handles of their hooks, which are taken away with the ledger
        finalize(self, _take_away, self._armed)
        self._sums: dict[int, tuple[ref[Tensor], int]] = {}  # accumulations since the last loss was scaled
        self._compared: list[ref[Tensor]] | None = None  # parameters that nobody listens to: their gradients are compared with how they were
        self._strange: dict[int, tuple[ref[Tensor], int]] = {}  # gradients of these, with their versions, that no backward pass has left
        self._losses: dict[int, Tensor] = {}
        self.turn = 0

    def heard(self, p: Tensor) -> None:
        """A backward pass has added to the gradient of `p`."""
        known = self._sums.get(id(p))
        self._sums[id(p)] = (ref(p), 1 if known is None or known[0]() is not p else known[1] + 1)

    def look(self, owners: Sequence[Tensor], listen: bool = True) -> None:
        """Before a backward pass: listen to all parameters, and take down what was done to gradients since the last one.

        Gradients that were changed in place are read (once for all): all zeros were cleared, others were edited. listen: False where gradients
        bear no scale, so that an edit of the user's need not be told from what a backward pass adds: a call for each of them is spared.
        """
        self.turn += 1
        self._sums.clear()
        self._strange.clear()
        self._compared = None if listen else [ref(p) for p in owners]
        changed = []
        known = self._left
        for p in owners:
            i, g = id(p), p.grad
            if listen and ((armed := self._armed.get(i)) is None or armed[0]() is not p) and p.requires_grad and p.is_leaf:
                self._armed[i] = ref(p), p.register_post_accumulate_grad_hook(_Heard(self))  # type: ignore[no-untyped-call]
            left = known.get(i)
            if left is None:
                if g is not None and not listen:
                    self._strange[i] = ref(g), g._version
            elif g is None or left.parameter() is not p:
                del known[i]
            elif left.version != g._version or left.gradient() is not g:
                changed.append((p, left, g))
        present = torch.stack([stored(g).any().to(changed[0][2].device) for _, _, g in changed]).tolist() if changed else []
        for (p, left, g), some in zip(changed, present, strict=True):
            if some:
                left.edited = not left.used
                left.gradient, left.version = ref(g), g._version
            else:
                del known[id(p)]
                if not listen:
                    self._strange[id(p)] = ref(g), g._version
        for i in [i for i, (r, _) in self._armed.items() if r() is None]:
            del self._armed[i]
            known.pop(i, None)
        alive = {id(left.losses): left.losses for left in known.values()}
        numbers = frozenset[int]().union(*alive.values())
        self._losses = {n: loss for n, loss in self._losses.items() if n in numbers}

    def begin(self) -> None:
        """What was heard so far was no backward pass of a step (probes, others' losses)."""
        self._sums.clear()

    def note(self, sign: Sign | None, number: int, loss: Tensor | None) -> tuple[set[int], set[int]]:
        """After the backward pass of loss `number`: take down how it left the gradients it has reached, and put `sign` on each.

        Returns the ids of these parameters, and of those among them whose gradient it has added to (others were cleared before).
        """
        self.turn += 1
        moved, added = set(), set()
        if loss is not None:
            self._losses[number] = loss
        fresh = frozenset((number,))
        joined: dict[int, frozenset[int]] = {}
        for p, g, grown in self._heard() if self._compared is None else self._moved(self._compared):
            i, before = id(p), self._left.get(id(p))
            moved.add(i)
            new = self._left[i] = _Left(ref(p), ref(g), g._version, False, False, False, False, fresh)
            if grown and before is not None:
                added.add(i)
                new.mixed, new.edited = before.used or before.spent or before.mixed, before.edited
                if id(before.losses) not in joined:
                    joined[id(before.losses)] = fresh | before.losses
                new.losses = joined[id(before.losses)]
            g.made_by = sign  # type: ignore[attr-defined]  # read by the guard of plain optimizer steps and by amp.clip_grad_norm_
        return moved, added

    def _heard(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Parameters whose hooks have told of this backward pass, with their gradients, and whether nothing else has changed these since the last."""
        sums, self._sums = self._sums, {}
        for i, (owner, times) in sums.items():
            p = owner()
            g = p.grad if p is not None else None
            if p is not None and g is not None:
                before = self._left.get(i)
                yield p, g, before is not None and before.is_of(p) and before.version + times == g._version

    def _moved(self, owners: Sequence[ref[Tensor]]) -> list[tuple[Tensor, Tensor, bool]]:
        """Parameters whose gradients are not as they were, with these, and whether they are the same tensors."""
        found = []
        for owner in owners:
            p = owner()
            g = p.grad if p is not None else None
            if p is None or g is None:
                continue
            before = self._left.get(id(p))
            if before is None:
                strange = self._strange.get(id(p))
                if strange is None or strange[0]() is not g or strange[1] != g._version:
                    found.append((p, g, False))
            elif before.gradient() is not g or before.parameter() is not p:
                found.append((p, g, False))
            elif before.version != g._version:
                found.append((p, g, True))
        return found

    def loss(self, owners: Iterable[Tensor], after: int) -> Tensor | None:
        """The sum of the losses, of those numbered above `after`, that gave these parameters their gradients; None when there were none."""
        found: dict[int, frozenset[int]] = {}
        for p in owners:
            left = self._left.get(id(p))
            if left is not None and id(left.losses) not in found and left.is_of(p):
                found[id(left.losses)] = left.losses
        numbers = frozenset[int]().union(*found.values())
        total: Tensor | None = None
        for number in sorted(n for n in numbers & self._losses.keys() if n > after):
            seen = self._losses[number]
            total = seen if total is None else total + seen.to(total.device)
        return total

    def replace(self, p: Tensor, old: Tensor, new: Tensor) -> None:
        """The gradient of `p` is another tensor of the same values from now on."""
        self.turn += 1
        left = self._left.get(id(p))
        if left is not None and left.gradient() is old and left.version == old._version:
            left.gradient, left.version = ref(new), new._version

    def rescale(self, factor: float) -> None:
        """Multiply all losses taken down by `factor`."""
        self.turn += 1
        self._losses = {number: loss * factor for number, loss in self._losses.items()}

    def is_unscaled(self, p: Tensor) -> bool:
        """Whether the gradient of this parameter was unscaled, and nothing has been added to it since."""
        left = self._left.get(id(p))
        return left is not None and left.used and left.is_of(p)

    def waits(self, p: Tensor) -> bool:
        """Whether this parameter has a gradient that no step was taken with."""
        left = self._left.get(id(p))
        return left is not None and not left.spent and left.is_of(p)

    def again(self) -> None:
        """Accept all gradients as they are now."""
        self.turn += 1
        for left in self._left.values():
            p = left.parameter()
            if p is not None and p.grad is not None:
                left.gradient, left.version = ref(p.grad), p.grad._version

    def holds(self, p: Tensor) -> bool:
        """Whether a backward pass left a gradient with this parameter that was not unscaled since."""
        left = self._left.get(id(p))
        return left is not None and not left.used and left.is_of(p)

    def bears_scale(self, p: Tensor) -> bool:
        """The same, and at most one edit (a clip) has changed it since: one that was zeroed and made anew by others has changed twice."""
        left = self._left.get(id(p))
        return left is not None and self.holds(p) and p.grad is not None and left.gradient() is p.grad and p.grad._version <= left.version + 1

    def mixed(self, owners: Iterable[Tensor]) -> list[Tensor]:
        """Parameters whose used gradient was not cleared before a backward pass added to it."""
        return [p for p in owners if (left := self._left.get(id(p))) is not None and left.mixed and self.holds(p)]

    def edited(self, owners: Iterable[Tensor]) -> list[Tensor]:
        """Parameters whose scaled gradient is not as a backward pass left it, all-zero ones excepted (they were cleared)."""
        found = []
        for p in owners:
            left = self._left.get(id(p))
            if left is None or left.used or left.parameter() is not p or p.grad is None:
                continue
            if left.edited or ((left.gradient() is not p.grad or left.version != p.grad._version) and bool(stored(p.grad).any())):
                found.append(p)
        return found

    def use(self, owners: Iterable[Tensor], unscaled: bool = True, spent: bool = False) -> None:
        """The gradients of these parameters are as they should be now. unscaled: no longer multiplied by the loss scale. spent: see `spend`."""
        for p in owners:
            g = p.grad
            if g is None:
                continue
            left = self._left.get(id(p))
            if left is None or left.gradient() is not g or left.parameter() is not p:
                left = self._left[id(p)] = _Left(ref(p), ref(g), g._version)
            left.version, left.used, left.spent = g._version, left.used or unscaled, left.spent or spent

    def spend(self, owners: Iterable[Tensor]) -> None:
        """A step was taken with these gradients, or refused; what comes next are new losses."""
        self.use(owners, unscaled=False, spent=True)
