"""What `Accelerator.prepare` returns for an optimizer and a data loader; for a scheduler it is a `halfstep.step.Follower`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, IterableDataset

from halfstep.accelerator.position import EpochStart
from halfstep.distributed import samples_of_last_round
from halfstep.errors import ConfigError, DataError
from halfstep.optim.quiet import clear
from halfstep.step import StepResult

logger = logging.getLogger("halfstep")


class Stepper(Protocol):
    """What a prepared optimizer needs of its accelerator."""

    sync_gradients: bool

    def applied_steps(self, optimizer: Optimizer) -> int:
        """How many steps of an optimizer were applied."""

    def may_clear(self, optimizer: Optimizer) -> bool:
        """Whether gradients of an optimizer may be cleared now: not those of a window that is going on."""

    def take_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, stalled: bool = False
    ) -> StepResult:
        """Carry out one optimizer step or refuse it, and say which."""


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` tells the truth; everything else is that of the optimizer it was made from.

    `step()` returns a `StepResult`. Inside an accumulation window it does nothing (reason "accumulating"), and
    `zero_grad` then keeps the gradients. `applied` is the number of steps that moved the weights.
    """

    takes_steps_itself = True  # GradScaler.step refuses it

    def __init__(self, optimizer: Optimizer, stepper: Stepper) -> None:
        # Optimizer.__init__ is not called on purpose: groups and state are those of `optimizer`
        self.optimizer = optimizer
        self.stepper = stepper
        self.last_step: StepResult | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the optimizer inside."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def step(  # type: ignore[override]  # torch returns the closure's loss
        self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, stalled: bool = False
    ) -> StepResult:
        """Update the weights if this is the end of a window and the gradients are fit; says which.

        max_norm: clip to this norm on the way; with a wrapped or a halfstep optimizer that is no pass of its own. stalled: measure the share of
        updates that rounded away. closure: for optimizers that evaluate the loss themselves; it calls `accelerator.backward(loss)`.
        """
        self.last_step = self.stepper.take_step(self.optimizer, closure, max_norm=max_norm, stalled=stalled)
        return self.last_step

    @property
    def applied(self) -> int:
        """Steps that moved the weights."""
        return self.stepper.applied_steps(self.optimizer)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was refused (a micro-batch inside a window is not)."""
        return self.last_step is not None and not self.last_step and self.last_step.reason not in ("accumulating", "no-gradients")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; nothing while a window is going on, also at the start of its last micro-batch."""
        if self.stepper.may_clear(self.optimizer):
            clear(self.optimizer, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As on the optimizer inside."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As on the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As on the optimizer inside."""
        self.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class PreparedLoader:
    """A data loader whose batches arrive on the device, and which knows whether the batch at hand is the last of its pass.

    It reads one batch ahead for that where torch's own batch sampler does not tell the number. Its place in a pass goes into checkpoints.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | None, source: Any = None) -> None:
        self.loader = loader
        self.source = source  # what it was prepared from: that of all processes
        self.device = device  # None leaves batches where they are
        self.at_end = False  # the batch at hand is the last of this pass
        self.remainder = 0  # rows of the last batches of all processes together that are not there to fill them up; 0 for all
        self._start, self._used = EpochStart(), 0  # how this pass began, and how many of its batches were handed out
        self._resumed = 0  # batches handed out when the checkpoint was saved that was loaded since the last pass

    def __iter__(self) -> Iterator[Any]:
        return self.from_batch(0)

    def from_batch(self, skipped: int) -> Iterator[Any]:
        """The batches of a pass from number `skipped` on. After `load_state` they are those of the pass that the checkpoint was saved in."""
        self.at_end, resumed, self._resumed = False, self._resumed, 0
        known = _tells_length(self.loader)
        length = len(self) if known else -1
        if skipped and resumed:
            if skipped != resumed:
                logger.warning("the checkpoint was saved after %d batches of this pass, and the run goes on after %d", resumed, skipped)
            batches = self._start.again(self.loader, skipped, 0 if known else 1)
        else:
            self._start.begin(self.loader)
            batches = iter(self.loader)
            for _ in range(skipped):
                next(batches, None)
        self._used = skipped
        try:
            for batch, last in counted(batches, length - skipped) if known else looked_ahead(batches):
                self.at_end, self.remainder = last, (samples_of_last_round(self.loader) or 0) if last else 0
                self._used += 1
                yield self._placed(batch)
            if not self._used:
                raise DataError("the data loader yields nothing", _why_empty(self.loader))
            self._used = 0
        finally:
            self.at_end, self.remainder = False, 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the pass that is going on."""
        return {"start": self._start.state_dict(), "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved place, for the pass that begins next."""
        self._start.load_state_dict(state["start"])
        self._resumed = int(state["used"])

    def _placed(self, batch: Any) -> Any:
        return batch if self.device is None else to_device(batch, self.device)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # as the loader inside: an iterable one raises TypeError

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "source"):
            raise AttributeError(name)
        return getattr(self.loader, name)


class SkippingLoader:
    """A loader without its first batches. The accelerator knows the loader that it reads from."""

    def __init__(self, loader: Any, skipped: int) -> None:
        self.loader, self.skipped = loader, skipped

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            return self.loader.from_batch(self.skipped)
        return itertools.islice(iter(self.loader), self.skipped, None)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skipped)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkippingLoader:
    """`dataloader` without its first `num_batches`, for the pass in which a run goes on from a checkpoint.

    A prepared loader after `load_state` goes on in the pass that the checkpoint was saved in, in its order. Raises ConfigError for a number
    that is not whole or below 0.
    """
    if not isinstance(num_batches, int) or isinstance(num_batches, bool) or num_batches < 0:
        raise ConfigError(f"num_batches={num_batches!r}", "Use a whole number of batches, 0 or more.")
    return SkippingLoader(dataloader, num_batches)


def take_places(loaders: list[PreparedLoader], saved: list[dict[str, Any]]) -> None:
    """Give prepared loaders the places that a checkpoint holds, in the order in which they were prepared."""
    if len(saved) != len(loaders):
        logger.warning(
            "the checkpoint has the places of %d prepared loaders and this run has %d: passes begin anew, in another order", len(saved), len(loaders)
        )
        return
    for loader, state in zip(loaders, saved, strict=True):
        loader.load_state_dict(state)


def counted(batches: Iterator[Any], length: int) -> Iterator[tuple[Any, bool]]:
    """Batches, and whether each is the last of `length`."""
    return ((batch, number >= length) for number, batch in enumerate(batches, 1))


def looked_ahead(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Batches, and whether each is the last: the next one is read before."""
    for batch in batches:
        held = batch
        break
    else:
        return
    for following in batches:
        yield held, False
        held = following
    yield held, True


def _tells_length(loader: Any) -> bool:
    """Whether the number of batches is known for sure: torch counts those of a map-style dataset."""
    return isinstance(getattr(loader, "batch_sampler", None), BatchSampler) and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def _why_empty(loader: Any) -> str:
    size, batch = getattr(loader, "batch_size", None), None
    try:
        batch = len(loader.dataset)
    except (AttributeError, TypeError):
        return "Check the iterable it reads from: a generator is spent after one pass."
    if batch and getattr(loader, "drop_last", False):
        return f"Its dataset has {batch} samples, fewer than one batch of {size}, and drop_last=True: use a smaller batch."
    return f"Its dataset has {batch} samples: check the path and the filters."


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`. Containers keep their type; objects with a `.to` of their own are asked."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if type(value) is dict:
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(v, device) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(v, device) for v in value)
    if hasattr(value, "to") and callable(value.to):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: to_device(v, device) for k, v in value.items()}
    return value
