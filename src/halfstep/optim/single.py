"""One parameter of an optimizer stepped by itself: what gradient release does inside the backward pass.

halfstep's own optimizers do it by a twin for each parameter, which shares the states and has a kernel's tables of its own. Any other optimizer does
it through the buckets of `halfstep.optim.wrap`, one for each parameter, once small tensors have shown that this gives the bits of a whole step.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol
from weakref import proxy, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.optim.base import MasteredOptimizer
from halfstep.optim.buckets import Buckets, signature
from halfstep.optim.copies import HOOKS, bare_step
from halfstep.optim.fused import FusedAdamW
from halfstep.optim.trial import AsTheyAre, tried_singly
from halfstep.optim.wrap import Wrapped

REMEDY = "Use halfstep.optim.AdamW, SGD or Lion, or leave out the release."


class Single(Protocol):
    """Steps parameters one by one. Together the steps of a window are one step of the optimizer."""

    def begin(self) -> None:
        """A window begins: take over the settings as they are now. Nothing of the optimizer is changed."""

    def step(self, number: int, factor: float) -> None:
        """Update parameter `number` (its place in the optimizer) with its gradient times `factor`."""

    def end(self) -> None:
        """The window is over, and some parameter was updated."""


def single(optimizer: Optimizer) -> Single:
    """The way for an optimizer. Raises ConfigError for one whose parameters cannot be stepped one by one."""
    if isinstance(optimizer, MasteredOptimizer) and not isinstance(optimizer, Wrapped):
        return Twins(optimizer)
    return OneByOne(optimizer)


class Twins:
    """For halfstep's own optimizers: the bits of a whole step, noise included, since a twin's parameter keeps its number.

    Memory: a kernel's tables and Python objects for each parameter, some KiB.
    """

    def __init__(self, optimizer: MasteredOptimizer) -> None:
        self._optimizer = ref(optimizer)
        self._built: tuple[Any, ...] = ()
        self._twins: dict[int, tuple[Any, dict[str, Any]]] = {}  # by number, with the group of the original
        self._settings: dict[int, dict[str, Any]] = {}  # of each group in this window
        self._steps = 0  # that the optimizer had taken before this window

    def begin(self) -> None:
        """See `Single`."""
        optimizer = _alive(self._optimizer)
        optimizer.settle_masters(ahead=True)
        built = (
            id(optimizer.state),
            optimizer.weights,
            optimizer.codec.name,
            optimizer.seed,
            *map(id, optimizer.param_groups),
            *signature(optimizer),
        )
        if built != self._built:
            self._built, self._twins = built, {}
        self._settings = {id(g): {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups}
        self._steps = optimizer.steps

    def step(self, number: int, factor: float) -> None:
        """See `Single`."""
        optimizer = _alive(self._optimizer)
        twin, group = self._twins.get(number) or self._made(optimizer, number)
        twin.param_groups[0].update(self._settings[id(group)])
        twin.steps = self._steps
        if optimizer._pending:
            optimizer.settle_one(number, twin.param_groups[0]["params"][0])
        bare_step(twin)(twin, factor=factor)
        optimizer.steps = self._steps + 1

    def end(self) -> None:
        """See `Single`."""

    def _made(self, optimizer: MasteredOptimizer, number: int) -> tuple[Any, dict[str, Any]]:
        before = 0
        for group in optimizer.param_groups:
            if number < before + len(group["params"]):
                break
            before += len(group["params"])
        twin = object.__new__(type(optimizer))
        own = {name: value for name, value in vars(optimizer).items() if name not in LEFT}
        vars(twin).update(own, **{name: OrderedDict() for name in HOOKS}, first_number=number, settle_masters=_settled, _pending={})
        vars(twin).update(param_groups=[{"params": [group["params"][number - before]]}], _compiled=type(vars(optimizer)["_compiled"])())
        self._twins[number] = twin, group
        return twin, group


LEFT = ("param_groups", "step", "zero_grad", "halfstep_release", "_compiled", *HOOKS)  # what a twin has of its own, or not at all


def _settled() -> None:
    """Masters were settled for all parameters when the window began."""


class OneByOne:
    """For any other optimizer, wrapped or not: a copy of it for each parameter, whose settings are those of the original.

    Memory: the attributes of the optimizer once more for each parameter. Time: some calls in Python for each parameter and state.
    Raises ConfigError where small tensors show that parameters act on each other, or that copies do not do what the optimizer does.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)
        inner, name = _inner(optimizer), type(_inner(optimizer)).__name__
        held = next((v for v in vars(inner).values() if v is not optimizer and isinstance(v, (nn.Module, Optimizer))), None)
        if held is not None:
            raise ConfigError(f"{name} holds a {type(held).__name__}, and gradient release steps copies of an optimizer", REMEDY)
        same, reason = tried_singly(inner)
        if not same:
            raise ConfigError(f"{name} cannot step its parameters one by one: on small tensors {reason}", REMEDY)
        self._buckets: Buckets | None = None
        self._left: set[int] = set()  # numbers whose copies have not stepped in this window
        self._counted = False  # this window counts as a step of the optimizer already

    def begin(self) -> None:
        """See `Single`."""
        optimizer = _alive(self._optimizer)
        inner = _inner(optimizer)
        if isinstance(optimizer, Wrapped):
            optimizer.settle_masters(ahead=True)
        if isinstance(inner, FusedAdamW):
            _part(inner)
        if self._buckets is None or self._buckets.signature != signature(inner):
            count = sum(len(g["params"]) for g in inner.param_groups)
            formats = proxy(optimizer) if isinstance(optimizer, Wrapped) else AsTheyAre()  # one that nobody has any more must go
            self._buckets = Buckets(inner, formats, {}, None, range(1, count + 1))
        self._buckets.push(inner)
        self._left, self._counted = set(range(len(self._buckets.buckets))), False

    def step(self, number: int, factor: float) -> None:
        """See `Single`."""
        optimizer = _alive(self._optimizer)
        if isinstance(optimizer, Wrapped):
            optimizer.steps += not self._counted
            if optimizer._pending:
                optimizer.settle_one(number, optimizer.everybody()[number])
        self._counted = True
        self._one(_inner(optimizer), number, factor)

    def end(self) -> None:
        """See `Single`."""
        inner = _inner(_alive(self._optimizer))
        assert self._buckets is not None
        for number in sorted(self._left):
            self._one(inner, number, 1.0)  # without a gradient: what it counts is counted
        at_odds = self._buckets.pull(inner)
        if at_odds:
            raise ConfigError(
                f"{type(inner).__name__} has set {', '.join(sorted(set(at_odds)))} otherwise for each parameter, which small tensors did not show",
                REMEDY,
            )

    def _one(self, inner: Optimizer, number: int, factor: float) -> None:
        assert self._buckets is not None
        self._left.discard(number)
        self._buckets.step_one(inner, number, _call, factor)


def _call(twin: Optimizer) -> None:
    bare_step(twin)(twin)


def _part(optimizer: FusedAdamW) -> None:
    """Each parameter counts its own steps: a tensor that several share would be counted up for each of them."""
    seen: set[int] = set()
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor) and id(step) in seen:
            state["step"] = step.clone()
        seen.add(id(state.get("step")))


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, Wrapped) else optimizer


def _alive(optimizer: ref[Any]) -> Any:
    found = optimizer()
    assert found is not None
    return found
