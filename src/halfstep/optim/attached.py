"""What gradient release puts on an optimizer and its parameters: hooks, and a `step` and a `zero_grad` that know of the handle."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from halfstep.errors import ConfigError, StepOrderError

if TYPE_CHECKING:
    from halfstep.optim.releasing import Release

logger = logging.getLogger("halfstep")


class Heard:
    """A hook on a parameter that tells a handle of its gradient. Holds it weakly; a copy, by deepcopy or pickle, tells nobody."""

    def __init__(self, handle: Release | None = None) -> None:
        self._handle = ref(handle) if handle is not None else None

    @property
    def handle(self) -> Release | None:
        """The handle, while its optimizer is there."""
        return self._handle() if self._handle is not None else None

    def __call__(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is there."""
        handle = self.handle
        if handle is not None:
            handle.heard(parameter)

    def __reduce__(self) -> tuple[type[Heard], tuple[()]]:
        return Heard, ()


class Passes:
    """Backward passes that no step engine tells of, as the hooks of their parameters see them."""

    def __init__(self) -> None:
        self._task = -1  # autograd's number of the last one

    def begin(self, ended: Callable[[], None]) -> bool:
        """Called inside a backward pass: whether it is seen for the first time. `ended` runs at its end; not where it ends with an error."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return False
        self._task = task
        Variable._execution_engine.queue_callback(ended)
        return True


def handle_of(p: Tensor) -> Release | None:
    """The handle that releases the gradient of a parameter, or None."""
    hooks: Any = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    return next((hook.handle for hook in hooks.values() if isinstance(hook, Heard) and hook.handle is not None), None)


class Step:
    """`optimizer.step` while gradients are released: it closes the books. Afterwards it is what stood there before.

    It takes the part of what schedulers put there, whether they were made before it or after. Holds the optimizer weakly: one that nobody has any
    more must not go on updating.
    """

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: Optimizer, before: Any) -> None:
        self._optimizer, self._before = ref(optimizer), before

    def __call__(self, closure: Any = None, **named: Any) -> Any:
        """Close the books of the step; once the handle is gone, take one."""
        optimizer: Any = self._optimizer()
        optimizer._opt_called = True
        handle: Release | None = vars(optimizer).get("halfstep_release")
        if handle is None:
            given = () if closure is None else (closure,)
            return self._before(*given, **named) if self._before is not None else type(optimizer).step(optimizer, *given, **named)
        source = handle.source() if handle.source is not None else None
        if closure is not None or named:
            what = "a closure" if closure is not None else f"{next(iter(named))}="
            raise ConfigError(f"step() was given {what} with released gradients, which the backward pass has used up", CLOSES)
        if source is not None and source.scaling.active:
            raise StepOrderError("optimizer.step() was called with gradients of a scaled loss", "Call scaler.step(optimizer): the scale follows it.")
        told = handle.close(1.0)
        if told.bad:
            logger.warning("gradients of %s are not finite or above 2^60: %s", handle.called(told.bad), "these parameters stay as they were")
        return told


CLOSES = "Leave it out: step() closes the books of what the backward pass has done."


class Clear:
    """`optimizer.zero_grad` while gradients are released: what was noted of a step that has moved nothing goes with its gradients."""

    def __init__(self, optimizer: Optimizer, before: Any) -> None:
        self._optimizer, self._before = ref(optimizer), before

    def __call__(self, *given: Any, **named: Any) -> None:
        """Clear the gradients."""
        optimizer: Any = self._optimizer()
        handle: Release | None = vars(optimizer).get("halfstep_release")
        if handle is not None:
            handle.drop()
        if self._before is not None:
            self._before(*given, **named)
        else:
            type(optimizer).zero_grad(optimizer, *given, **named)

    def leave(self) -> None:
        """Put back what stood there before, unless somebody has put something else there since."""
        optimizer = self._optimizer()
        if optimizer is not None and vars(optimizer).get("zero_grad") is self:
            del vars(optimizer)["zero_grad"]
            if self._before is not None:
                vars(optimizer)["zero_grad"] = self._before
