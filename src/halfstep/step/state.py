"""What a step engine knows: the optimizers it has met, the scale and the losses of the gradients at hand, and what it watches."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import torch
from torch import Tensor

from halfstep.optim import RELEASES
from halfstep.step import checks
from halfstep.step.backward import BackwardWatch
from halfstep.step.buffers import BufferGuard
from halfstep.step.marks import Ledger, Sign, parameters
from halfstep.step.owners import ByOwner
from halfstep.step.record import Record
from halfstep.step.refusal import Explain, Heal
from halfstep.step.replay import Replay
from halfstep.step.scaling import Scaling
from halfstep.step.verdict import Agree, Verdict
from halfstep.step.watching import Watching

if TYPE_CHECKING:
    from halfstep.optim import Release

OnOverflow = Literal["skip", "replay", "raise"]


def _nothing() -> int:
    return 0


def _joined(only: Iterable[Tensor] | None = None) -> bool:
    return False


class Loose:
    """Parameters whose gradients were unscaled for a clip before their optimizer was seen. Stands in for that optimizer until it steps."""

    def __init__(self, held: list[Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": held}]
        self.clip: tuple[float, float] | None = None  # norm and kind of norm, where a bad gradient among them kept it from being done


@dataclass(eq=False)
class StepState:
    """The state that the parts of a step engine share. Each part is a module of functions of it."""

    scaling: Scaling
    patience: int
    on_overflow: OnOverflow
    agree: Agree | None
    deferred: bool | None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # opened around backward passes that the engine runs itself
    together: Callable[[Iterable[Tensor] | None], bool] = _joined  # makes gradients the mean over ranks where they are not; whether it changed some

    made_under: float | None = None  # the scale of the gradients at hand; None before the first loss
    losses: int = 0  # scaled so far
    loss: Tensor | None = None  # sum of the losses since a step was taken, for optimizers that were not known by then
    loss_spent: bool = False  # that sum belongs to a step that was taken
    passes: int = 1  # backward passes so far
    hopeless: bool = False  # probes have found the gradients at hand bad at every scale
    unseen: bool = False  # nobody has looked at what the last loss reaches: parameters may have gradients of it that the ledger knows nothing of
    noticed: int = 0  # backward passes since a step was taken
    scale_was_read: bool = False  # the user has asked for the scale at hand
    penalty: Tensor | None = None  # the sign on gradients of a scaled loss that were made with create_graph=True
    unheard: list[Verdict] = field(default_factory=list)  # verdicts that have not moved the scale yet
    bad_before: int = 0  # bad steps in a row of a run that this one goes on from
    stepping: bool = False  # a step is being taken
    trying: frozenset[str] = frozenset()  # "overflow": steps that overflow will be computed again; "pin": those whose culprits were pinned
    remembered: Callable[[], int] = _nothing  # which window the forward passes belong to that `explain` can look at
    explain: Explain | None = None  # a second look at the forward passes of a bad step
    heal: Heal = "skip"  # what becomes of a module whose values 16 bits do not hold
    checkpoint: str = ""  # the last one of this run, for who must go back to it
    editing: bool = False  # edits of scaled gradients are allowed
    window: list[bool | Tensor] = field(default_factory=list)  # verdicts since the last loss was scaled; tensors are 1 for bad

    ledger: Ledger = field(default_factory=Ledger)
    buffers: BufferGuard = field(default_factory=BufferGuard)
    watch: BackwardWatch = field(default_factory=BackwardWatch)
    watching: Watching = field(default_factory=Watching)  # what is near its limit
    replay: Replay = field(default_factory=Replay)
    records: ByOwner[Record] = field(default_factory=ByOwner)
    loose: list[Loose] = field(default_factory=list)
    widened: dict[int, ref[Tensor]] = field(default_factory=dict)  # 16-bit parameters whose gradients were made fp32
    names: dict[int, tuple[ref[Tensor], str]] = field(default_factory=dict)
    releases: list[ref[Release]] = field(default_factory=list)  # of optimizers that step inside the backward pass
    unfit: list[tuple[ref[Any], Tensor, set[int]]] = field(default_factory=list)  # losses to come that are not finite, and ids of what they reach

    def __post_init__(self) -> None:
        self.sign = Sign(self)

    def record(self, owner: Any) -> Record:
        """Where an optimizer stands."""
        known = self.records.get(owner)
        if known is None:
            checks.draw_apart(owner, self.records.owners())
            known = self.records.put(owner, Record(bad_steps=self.bad_before, met_at=self.losses))
            checks.look_for_masters(owner, parameters(owner), self.scaling.active, self.called)
        return known

    @property
    def release(self) -> ModuleType:
        """What becomes of optimizers that update inside the backward pass; imported when there is one."""
        return importlib.import_module("halfstep.step.releases")

    def handle_for(self, optimizer: Any) -> Release | None:
        """The handle that releases the gradients of an optimizer, or None."""
        return vars(optimizer).get("halfstep_release") if RELEASES else None

    def dissolve(self, loose: Loose) -> None:
        """A stand-in has done its work, or was never used."""
        self.loose.remove(loose)
        self.records.drop(loose)

    def owners(self, chosen: dict[int, Tensor]) -> list[Any]:
        """The known optimizers that hold some of these parameters."""
        return [o for o in self.records.owners() if any(id(p) in chosen for p in parameters(o))]

    def everybody(self) -> list[Tensor]:
        """All parameters that are known, by an optimizer or from the graph of a loss."""
        return self.watch.everybody(self.owned())

    def owned(self) -> list[Tensor]:
        """The parameters of the optimizers that are known."""
        return [p for owner in self.records.owners() for p in parameters(owner)]

    @property
    def scale_at_hand(self) -> float:
        """What the gradients at hand are multiplied by until they are unscaled."""
        return self.made_under if self.scaling.active and self.made_under is not None else 1.0

    def loss_of(self, owner: Any) -> Tensor | None:
        """The sum of the losses that gave an optimizer its gradients; of all losses when no backward pass was noticed."""
        if not self.noticed:
            return self.loss
        record = self.record(owner)
        at = (self.ledger.turn, record.spent_to)
        if record.loss_at != at:
            found = self.ledger.loss(parameters(owner), record.spent_to)
            record.loss_at, record.loss_then = at, self.loss if found is None and self.unseen and record.met_at == self.losses else found
        return record.loss_then

    def in_flight(self) -> bool:
        """Whether there are gradients that no optimizer has stepped with: they keep their scale."""
        return any(self.ledger.waits(p) for p in self.everybody())

    def waits(self, owner: Any) -> bool:
        """Whether an optimizer holds gradients that no step was taken with."""
        return any(self.ledger.waits(p) for p in parameters(owner))

    def join_ranks(self, only: Callable[[], Iterable[Tensor]] | None = None) -> None:
        """Before gradients are used: those of one rank become the mean over all. only: gives parameters, of whose models it is to be done."""
        if self.together is not _joined and self.together(None if only is None else only()):
            self.ledger.again()

    def sign_penalty(self) -> Tensor:
        """What is put on gradients of a scaled loss that have a graph themselves."""
        if self.penalty is None:
            self.penalty = torch.ones((), requires_grad=True)
        return self.penalty

    def take_a_step(self, step: Callable[..., Any], *given: Any, **settings: Any) -> Any:
        """Call `step`, which may use gradients."""
        self.stepping = True
        try:
            return step(*given, **settings)
        finally:
            self.stepping = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, verdicts are read at once: what follows depends on them."""
        before, self.deferred = self.deferred, False
        try:
            yield
        finally:
            self.deferred = before

    def still_scales(self, parameter: Tensor) -> bool:
        """Whether the gradient of this parameter is multiplied by the loss scale, and no step is being taken."""
        return not self.stepping and self.scale_at_hand != 1.0 and self.ledger.bears_scale(parameter)

    def called(self, parameter: Tensor) -> str:
        """The name of a parameter, or where it stands in its optimizer."""
        named = self.names.get(id(parameter))
        if named is not None and named[0]() is parameter:
            return named[1]
        for owner in self.records.owners():
            for g, group in enumerate(owner.param_groups):
                for i, p in enumerate(group["params"]):
                    if p is parameter:
                        given = group.get("param_names")
                        return str(given[i]) if given else f"param_groups[{g}]['params'][{i}] of shape {tuple(p.shape)}"
        return f"a parameter of shape {tuple(parameter.shape)}"

    def namer(self, owner: Any) -> Callable[[int], str]:
        """A function that gives the name of the i-th parameter among those that have a gradient now."""
        held = [p for p in parameters(owner) if p.grad is not None]
        return lambda i: self.called(held[i])
