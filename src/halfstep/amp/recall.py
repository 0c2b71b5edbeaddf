"""The forward passes of the step at hand, remembered so that a bad one can be run again and the module to blame be named."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet, finalize, ref

import torch
from torch import nn

from halfstep.amp.locate import Blamed, Locating, tensors
from halfstep.amp.mode import Applied, Switched, Tables, current
from halfstep.amp.rehearsal import Rehearsal

AT_MOST = 64  # forward passes that are remembered; a window of more is looked at from its newest


class Call(NamedTuple):
    """One forward pass: what the model was given, the random states it began with, and the autocast block it stood in."""

    model: ref[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: torch.Tensor
    cuda: torch.Tensor | None
    device: str
    autocast: tuple[bool, torch.dtype]
    tables: Tables | None
    versions: tuple[int, ...]  # of the tensors among the inputs

    def again(self) -> tuple[nn.Module | None, list[Blamed]]:
        """Run it again without a graph; whom it blames. What it changes (buffers, attributes, random states) is put back.

        Raises InputsChanged when the inputs were written to since.
        """
        model = self.model()
        if model is None:
            return None, []
        if self.versions != versions(self.args, self.kwargs):
            raise InputsChanged("its inputs were changed in place since")
        with ExitStack() as stack:
            stack.enter_context(Rehearsal([model], (self.args, self.kwargs)))
            torch.set_rng_state(self.random)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, next(model.parameters()).device)
            stack.enter_context(torch.no_grad())
            stack.enter_context(Switched(self.device, *self.autocast, False))
            if self.tables is not None:
                stack.enter_context(Applied(self.device, self.tables))
            stack.enter_context(_without_caches(model))
            stack.enter_context(_as_written(model))
            seen = stack.enter_context(Locating(model))
            try:
                model(*self.args, **(self.kwargs | ({"use_cache": False} if "use_cache" in self.kwargs else {})))
            except RuntimeError:
                if not seen.found:
                    raise
                # the fp32 output of a module did not suit the code after it (a model that its user cast to 16 bits): named, and not to be pinned
                return model, [*seen.found[:-1], replace(seen.found[-1], heals=False)]
        return model, seen.found


class InputsChanged(Exception):  # noqa: N818  an answer of `again`, not a fault
    """A forward pass cannot be run again as it was."""


def versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """How often each of the tensors in some arguments was written to."""
    if not args and kwargs and {*map(type, kwargs.values())} == {torch.Tensor}:  # what most models are given
        return tuple([t._version for t in kwargs.values() if not t.is_inference()])
    return tuple(t._version for t in tensors((args, kwargs)) if not t.is_inference())


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Inside, models of transformers keep no keys and values: a layer that is run again would append its own a second time. No output changes."""
    found: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", None) is True}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Inside, what was compiled in place runs as it is written, where every module can be looked at."""
    compiled = [(part, part._compiled_call_impl) for part in model.modules() if part._compiled_call_impl is not None]
    try:
        for part, _ in compiled:
            part._compiled_call_impl = None
        yield
    finally:
        for part, call in compiled:
            part._compiled_call_impl = call


def _first_parameter(module: nn.Module) -> torch.Tensor | None:
    for p in module._parameters.values():
        if p is not None:
            return p
    for part in module._modules.values():
        found = _first_parameter(part) if part is not None else None
        if found is not None:
            return found
    return None


class _Listener:
    """A hook that remembers calls. It holds its maker weakly; a copy of the module, by deepcopy or pickle, tells nobody."""

    def __init__(self, recall: Recall | None = None) -> None:
        self._recall = ref(recall) if recall is not None else None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # a hook whose maker was collected while a rehearsal was open may come back with it, and without its keyword arguments; it tells nobody
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        recall = self._recall() if self._recall is not None else None
        if recall is not None:
            recall.hear(module, args, kwargs)

    def __reduce__(self) -> tuple[type[_Listener], tuple[()]]:
        return _Listener, ()


class Recall:
    """Remembers the forward passes of watched models since the last step: their inputs by reference, no copy of anything but random states."""

    def __init__(self) -> None:
        self._models: WeakSet[nn.Module] = WeakSet()
        self._calls: deque[Call] = deque(maxlen=AT_MOST)
        self._spent: set[int] = set()  # ids of the optimizers that have stepped since the last forward pass
        self._silent = False
        self.window = 0  # number of the step that the calls belong to

    def watch(self, model: nn.Module) -> None:
        """Remember the calls of `model` from now on. Watching twice does no harm."""
        if model in self._models:
            return
        self._models.add(model)
        handle = model.register_forward_pre_hook(_Listener(self), with_kwargs=True)
        finalize(self, handle.remove).atexit = False

    def hear(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A watched model is called."""
        if self._silent or torch._C._current_graph_task_id() != -1:  # a block that a backward pass computes again
            return
        self.begin()
        first = _first_parameter(model)
        device = "cpu" if first is None else first.device.type
        if device not in ("cpu", "cuda"):
            return
        mode = current(device)
        cuda = torch.cuda.get_rng_state(first.device) if first is not None and device == "cuda" else None
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        tables = mode.tables if mode is not None else None
        self._calls.append(Call(ref(model), args, kwargs, torch.get_rng_state(), cuda, device, autocast, tables, versions(args, kwargs)))

    def begin(self) -> None:
        """A forward pass or a loss begins another step, if one was taken since the last: what is remembered has nothing to do with it."""
        if self._spent:
            self._calls.clear()
            self._spent.clear()
            self.window += 1

    def spend(self, optimizer: object) -> None:
        """A step of `optimizer` begins. Several optimizers may step after one forward pass; the same one twice has come from another."""
        if id(optimizer) in self._spent:
            self.begin()
        self._spent.add(id(optimizer))

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Inside, calls are not remembered."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    @property
    def watches(self) -> bool:
        """Whether there are models whose calls are remembered."""
        return bool(self._models)

    def __len__(self) -> int:
        """How many forward passes can be run again."""
        return len(self._calls)

    def blame(self) -> list[tuple[nn.Module, Blamed]]:
        """Run the forward passes of this step again and tell whom they blame, each module once; to the first pass that fp32 does not help."""
        found: dict[tuple[int, str], tuple[nn.Module, Blamed]] = {}
        with self.silence():
            for call in list(self._calls):
                model, blamed = call.again()
                for one in blamed if model is not None else ():
                    assert model is not None
                    found.setdefault((id(model), one.module), (model, one))
                if any(not one.heals for one in blamed):
                    break
        return list(found.values())
