"""One forward and backward pass that can be run again and again, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import backward_context, products_of
from halfstep.amp.as_written import as_written
from halfstep.amp.mode import Within
from halfstep.amp.rehearsal import Rehearsal, Repetition
from halfstep.diagnostics.audit_times import PASSES, Stopwatch, timed_ops, turn
from halfstep.diagnostics.trace import answered
from halfstep.policy import Policy
from halfstep.step.graph import walk
from halfstep.tracing import Observation
from halfstep.tracing.findings import HALF
from halfstep.tracing.ledger import Calls, Ledger, Op


@dataclass
class Steps:
    """The steps of a model under one precision.

    block: opens it; called anew for each use. policy: the one that holds in it, None for none.
    """

    model: nn.Module
    batch: Any
    call: Callable[[], Any] | None
    loss: Callable[..., Tensor] | None
    device: torch.device
    block: Callable[[], AbstractContextManager[Policy | None]]
    warm: bool = False  # whether the first step after the block is opened does more than others (a *-lean model settles its weights)
    backward: bool = field(default=False, init=False)
    names: dict[int, str] = field(default_factory=dict, init=False)  # of weights and buffers, by their numbers in the ledger
    _seen: Rehearsal | None = field(default=None, init=False)
    _beside: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict, init=False)  # leaves that are no weights, with their gradients

    def _once(self, policy: Policy | None, look: bool = False) -> None:
        """Forward and backward. Gradients are left on the leaves. look: note the leaves that are no weights of the model."""
        _, result = answered(self.model, self.batch, self.loss, self.call)
        went_back = self.call is not None and any(p.grad is not None for p in self.model.parameters())
        self.backward = went_back or (result is not None and result.requires_grad)
        if result is None or went_back or not result.requires_grad:
            return
        if look:
            own = {id(p) for p in self.model.parameters()}
            self._beside |= {id(t): (t, t.grad) for t in walk(result).leaves if id(t) not in own}
        where: AbstractContextManager[Any] = backward_context(policy, self.device, products_of(self.model)) if policy is not None else nullcontext()
        with where:
            (result.float() if result.dtype in HALF else result).backward()  # type: ignore[no-untyped-call]

    def _clear(self) -> None:
        for t in (*self.model.parameters(), *(t for t, _ in self._beside.values())):
            t.grad = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Gradients that stand on the model, and on other leaves of its loss, are put back at the end."""
        before = [(p, p.grad) for p in self.model.parameters()]
        self._clear()
        try:
            yield
        finally:
            for p, gradient in (*before, *self._beside.values()):
                takes = p.grad_dtype if p.is_leaf and p.requires_grad else None
                p.grad = gradient if gradient is None or takes in (None, gradient.dtype) else gradient.to(takes)

    def observed(self) -> tuple[Op, ...]:
        """Every op of a step, with its seconds as a share of the step's."""
        given = (self.batch, self.call, self.loss)
        calls = Calls(self.device.type)
        ledger = Ledger(calls)
        with self._aside(), self.block() as policy, as_written, torch.inference_mode(False), torch.enable_grad():
            seen = Rehearsal([self.model], given)
            with seen:
                self._once(policy, look=True)
                self._clear()
                with Observation(self.model, [ledger]), calls:
                    self._once(policy)
                self._clear()
            self._seen = seen
            self.names = ledger.owners
            watches, wholes = [], []
            with Repetition([self.model], given, seen):
                self._once(policy)
                for _ in range(PASSES):
                    self._clear()
                    wholes.append(turn(lambda: self._once(policy), self.device, self._clear, shortest=0.0))
                    watch = Stopwatch(self.device)
                    with watch, Calls(self.device.type):
                        self._once(policy)
                    watches.append(watch)
        return timed_ops(ledger, watches, wholes)

    def timed(self) -> float:
        """Seconds of one step by the clock, nothing looking at it. After `observed`."""
        assert self._seen is not None
        given = (self.batch, self.call, self.loss)
        apart = Repetition([self.model], given, self._seen)
        with self._aside(), self.block() as policy, torch.inference_mode(False), torch.enable_grad(), apart:
            if self.warm:
                self._once(policy)
                self._clear()
            return turn(lambda: self._once(policy), self.device, clear=self._clear)


@contextmanager
def without_policy(model: nn.Module, policy: Policy) -> Iterator[None]:
    """The block in which a module that is bound to a `*-mixed` policy runs as it was written, and stays bound."""
    bound = model.__dict__["forward"]
    under = bound.__func__.halfstep_under

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Within(policy):  # its parts then add nothing of their own
            return under(self, *args, **kwargs)

    model.forward = MethodType(run, model)
    try:
        yield
    finally:
        model.forward = bound
