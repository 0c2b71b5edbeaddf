"""Buffers that a forward pass updates (BatchNorm's running statistics) as part of the step's transaction."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep import numerics

TRIALS = 2  # steps after which large buffers that were never seen to change are no longer copied
SMALL = 65536  # elements up to which a buffer stays copied all the same


class _Place(Protocol):
    """Where a buffer is found."""

    def get(self) -> Tensor | None:
        """The buffer as it is now; None when there is none."""

    def gone(self) -> bool:
        """Whether it will never come back."""


@dataclass(frozen=True)
class _OfModule:
    module: ref[nn.Module]
    name: str

    def gone(self) -> bool:
        return self.module() is None

    def get(self) -> Tensor | None:
        owner = self.module()
        return owner._buffers.get(self.name) if owner is not None else None


@dataclass(frozen=True)
class _Alone:
    tensor: ref[Tensor]

    def gone(self) -> bool:
        return self.tensor() is None

    def get(self) -> Tensor | None:
        return self.tensor()


@dataclass
class _Guarded:
    place: _Place
    copy: Tensor | None  # None for a buffer that was never seen to change
    moves: bool = False  # was seen to change
    version: int = -1  # of a buffer that was not seen to change in the first steps
    after: Tensor | None = None  # what was undone, in case another optimizer of the same forward passes is applied

    def now(self) -> Tensor | None:
        """The buffer. A copy that no longer fits it (the module was moved or cast) is made anew."""
        tensor, copy = self.place.get(), self.copy
        if tensor is None:
            return None
        if not self.moves and self.version >= 0 and tensor._version != self.version:
            self.moves = True
        if copy is None and not self.moves:
            return None
        if copy is None or tensor.shape != copy.shape:
            self.copy = tensor.detach().clone()  # what it was before is not known
        elif (tensor.dtype, tensor.device) != (copy.dtype, copy.device):
            self.copy = copy.to(tensor.device, tensor.dtype)
        return tensor


class _Renew:
    """A hook that tells a guard of a loaded state. Holds it weakly; a copy of the module, by deepcopy or pickle, tells nobody."""

    def __init__(self, guard: BufferGuard | None = None) -> None:
        self._guard = ref(guard) if guard is not None else None

    def __call__(self, *_: Any) -> None:
        guard = self._guard() if self._guard is not None else None
        if guard is not None:
            guard.renew()

    def __reduce__(self) -> tuple[type[_Renew], tuple[()]]:
        return _Renew, ()


class BufferGuard:
    """Copies of the buffers of watched modules, taken after each step that counted and put back after one that did not.

    All buffers are copied at first, by value (eager BatchNorm does not bump versions); from the third step on only those of batch
    norms, those that were seen to change, and small ones. A large one that begins to change later is copied from then on.
    Memory: one copy of these; for BatchNorm 8 bytes per channel. Loading a state into a watched module renews the copies. They are
    written back through `.data`: a graph that is still to be differentiated has saved the running statistics, and in training mode
    does not use them.
    """

    def __init__(self) -> None:
        self._guarded: list[_Guarded] = []
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._steps = 0
        self._met: dict[int, ref[Tensor]] = {}  # statistics that were met in a graph since the last step

    def watch(self, module: nn.Module) -> None:
        """Guard the buffers of `module` and of all modules in it. Watching twice does no harm."""
        for part in module.modules():
            if part in self._modules:
                continue
            self._modules.add(part)
            part.register_load_state_dict_post_hook(_Renew(self))  # type: ignore[no-untyped-call]
            self._steps = 0
            self._add_all(part)

    def _add_all(self, part: nn.Module) -> None:
        """Guard the buffers of one module that are not guarded yet; some are made in the first forward pass."""
        known = {id(item.place.get()) for item in self._guarded}
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in known:
                self._guarded.append(_Guarded(_OfModule(ref(part), name), buffer.detach().clone(), isinstance(part, _NormBase)))

    @property
    def has_modules(self) -> bool:
        """Whether modules were shown."""
        return bool(self._modules)

    def found(self, statistics: tuple[Tensor, ...]) -> None:
        """Note running statistics that were met in the graph of a loss; those of modules that nobody has shown are guarded from the next step on.

        Some are not a module's own (instance norms repeat theirs): what does not outlive its graph is forgotten.
        """
        if statistics:
            known = {id(item.place.get()) for item in self._guarded}
            self._met.update((id(t), ref(t)) for t in statistics if id(t) not in known)

    def _take_in(self) -> None:
        met, self._met = self._met, {}
        self._guarded = [item for item in self._guarded if not item.place.gone()]
        for tensor in [t for r in met.values() if (t := r()) is not None]:
            if not bool(torch.isfinite(tensor).all()):
                warnings.warn(
                    "the running statistics of a batch norm are not finite after the first loss, and what they were before is not known. "
                    "Reset them (reset_running_stats), and call scaler.watch(model) before the first forward pass.",
                    stacklevel=5,
                )
            self._guarded.append(_Guarded(_Alone(ref(tensor)), tensor.detach().clone(), True))

    def renew(self) -> None:
        """Take the buffers as they are now for good."""
        for item in self._guarded:
            tensor = item.place.get()
            if tensor is not None and item.copy is not None:
                item.copy = tensor.detach().clone()
            elif tensor is not None:
                item.version = tensor._version

    @torch.no_grad()
    def keep(self, bad: Tensor | None = None) -> None:
        """A step counted: its buffers are the new copies, except that one which is not finite is put back.

        bad: an fp32 scalar on the device, 1 when the step turns out not to have counted; nothing is read to the host then.
        """
        moved = self._moved()
        if not moved:
            return
        floats = [t for _, t in moved if t.is_floating_point()]
        finite = torch.isfinite(numerics.norm(floats, floats[0].device)) if floats else torch.ones((), dtype=torch.bool)
        if bad is not None:
            good = finite & (bad.to(finite.device) == 0)
            for copy, tensor in moved:
                tensor.data.copy_(torch.where(good.to(tensor.device), tensor, copy))
                copy.copy_(tensor)
            return
        if not bool(finite):
            self.repair()
        torch._foreach_copy_([copy for copy, _ in moved], [tensor for _, tensor in moved])

    @torch.no_grad()
    def undo(self) -> None:
        """A step did not count: put all buffers back that have changed."""
        for item in self._movers():
            tensor = item.now()
            if tensor is not None and item.copy is not None:
                item.after = tensor.detach().clone()
                tensor.data.copy_(item.copy)

    @torch.no_grad()
    def redo(self) -> None:
        """Another optimizer of the same forward passes was applied: take back what `undo` did, but for buffers that are not finite."""
        for item in self._guarded:
            tensor, after = item.place.get(), item.after
            if tensor is not None and after is not None and tensor.shape == after.shape and bool(torch.isfinite(after).all()):
                tensor.data.copy_(after)
        self.forget()

    def forget(self) -> None:
        """The forward passes of a step are the past."""
        for item in self._guarded:
            item.after = None

    @torch.no_grad()
    def repair(self) -> None:
        """Put back the buffers that are not finite, and no others."""
        for item in self._guarded:
            tensor = item.now()
            if tensor is None or item.copy is None or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
                continue
            if bool(torch.isfinite(item.copy).all()):
                tensor.data.copy_(item.copy)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever happens to the buffers inside is undone: for a pass that is run to look at it."""
        before = [(item, tensor.detach().clone()) for item in self._guarded if item.copy is not None and (tensor := item.now()) is not None]
        try:
            yield
        finally:
            with torch.no_grad():
                for item, copy in before:
                    tensor = item.now()
                    if tensor is not None:
                        tensor.data.copy_(copy)

    def _movers(self) -> list[_Guarded]:
        """The buffers that forward passes change. The first steps find out which."""
        if self._met:
            self._take_in()
        if self._steps <= TRIALS:
            self._notice()
        return [item for item in self._guarded if item.now() is not None and item.moves]

    def _moved(self) -> list[tuple[Tensor, Tensor]]:
        """The same, each behind its copy."""
        return [(item.copy, tensor) for item in self._movers() if item.copy is not None and (tensor := item.now()) is not None]

    def _notice(self) -> None:
        for part in self._modules:
            self._add_all(part)
        for item in self._guarded:
            tensor = item.now()
            if tensor is not None and item.copy is not None and not item.moves:
                item.moves = not torch.equal(tensor, item.copy)
        self._steps += 1
        if self._steps > TRIALS:
            for item in self._guarded:
                if not item.moves and (tensor := item.place.get()) is not None:
                    item.version = tensor._version
                    item.copy = item.copy if tensor.numel() <= SMALL else None
