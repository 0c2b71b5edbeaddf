"""Watch every op of a run, forward and backward: what it got, what it gave, in which module and on which line.

A dispatch mode sees the ops below autograd and autocast, so what detectors compute in `see` is neither recorded nor cast. A backward op is placed
where its forward op ran: autograd numbers its nodes as they are made, and the number is noted with each forward op. A forward pass that is
computed again inside a backward pass (activation checkpointing) counts as forward.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import ConfigError
from halfstep.tracing.findings import Finding, Place
from halfstep.tracing.places import NOWHERE, Site, raised_at, user_line

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_OPS = {"_to_copy": "to", "_unsafe_view": "view", "convolution": "conv", "addmm": "linear"}


class Event:
    """One op that has run. Tensors are what it got and gave (an argument that it wrote to holds the new values); do not keep them alive.

    func: the overload. name: "aten.add.Tensor". index: counts the ops of a run. error: what the op raised; there are no outputs then.
    backward: the op is part of a backward pass. mutable: it may have written to an argument. is_view: its output shares memory with an input.
    """

    __slots__ = ("_place", "_site", "args", "backward", "error", "func", "index", "kwargs", "name", "outputs")

    def __init__(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> None:
        self.func, self.name, self.args, self.kwargs, self.index = func, name, args, kwargs, index
        self.outputs: tuple[Tensor, ...] = ()
        self.error: BaseException | None = None
        self.backward = False
        self._site: Site = NOWHERE
        self._place: Place | None = None

    @property
    def base(self) -> str:
        """The name without namespace and overload: "add", "_to_copy"."""
        return self.name.split(".", 2)[1] if "." in self.name else self.name

    @property
    def op(self) -> str:
        """The name as a person knows it: "softmax" for aten._softmax, "to" for a cast, "linear" for addmm."""
        base = self.base
        return _OPS.get(base) or ("scaled_dot_product_attention" if base.startswith("_scaled_dot_product") else base.lstrip("_").rstrip("_"))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, those in lists too, in their order."""
        return tensors_in((self.args, self.kwargs))

    @property
    def mutable(self) -> bool:
        """Whether the op writes to one of its arguments."""
        schema = getattr(self.func, "_schema", None)
        return bool(schema is not None and schema.is_mutable)

    @property
    def is_view(self) -> bool:
        """Whether its output is the memory of an input."""
        return bool(getattr(self.func, "is_view", False))

    @property
    def forward_op(self) -> str:
        """Of a backward op: the op whose gradient it computes ("sqrt"), "" where that is not known. Of a forward op: its own name."""
        return self._site.op

    @property
    def place(self) -> Place:
        """Module, op, direction and source line."""
        if self._place is None:
            self._place = self._site.place(self.op, "backward" if self.backward else "forward")
        return self._place


class Detector(Protocol):
    """Looks for one kind of fault: at the model before the run, at each op during it."""

    def begin(self, model: nn.Module) -> None:
        """Look at the model as it stands. Not under the modes of a run."""

    def see(self, event: Event) -> None:
        """Look at one op. Torch functions called here are not observed, recorded by autograd or cast."""

    def findings(self) -> list[Finding]:
        """What was found so far."""


class Observation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The block in which the ops of a run are shown to detectors: `with Observation(model, detectors): loss = call(); loss.backward()`.

    Costs 10 to 20 us an op without detectors. Only ops of this thread, and of autograd's threads for a backward pass begun in it, are seen.
    Raises ConfigError when another observation is open.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: torch would import its compiler for it, which takes seconds, and a traced run is not compiled."""
        return False

    _open = threading.Lock()

    def __init__(self, model: nn.Module, detectors: Iterable[Detector]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.detectors = tuple(detectors)
        self.events = 0
        self.names = {id(part): (name, type(part).__name__) for name, part in model.named_modules()}
        self.owners = {
            id(p): f"{name}.{own}" if name else own for name, part in model.named_modules() for own, p in part._parameters.items() if p is not None
        }
        self._threads = threading.local()
        self._numbers: list[int] = []  # autograd's counter as each op ran that made a node, rising
        self._sites: list[Site] = []
        self._task, self._create_graph, self._depth = -1, False, 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Observation:
        if not Observation._open.acquire(blocking=False):
            raise ConfigError("an observation was started inside another one", "Let the first trace end before the next one begins.")
        try:
            with torch.no_grad():
                for detector in self.detectors:
                    detector.begin(self.model)
            self._hooks = [
                hooks.register_module_forward_pre_hook(self._enter_module),
                hooks.register_module_forward_hook(self._leave_module, always_call=True),
            ]
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._close()

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        Observation._open.release()

    @property
    def _stack(self) -> list[tuple[str, str]]:
        """Path and type of the modules whose forward passes this thread is in."""
        try:
            return self._threads.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._threads.stack = found = list[tuple[str, str]]()
            return found

    @property
    def module(self) -> tuple[str, str]:
        """Path and type of the module whose forward pass is running; ("", "") outside of any."""
        return self._stack[-1] if self._stack else ("", "")

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        outer = self.module
        self._stack.append(self.names.get(id(module)) or (outer[0], outer[1] or type(module).__name__))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        event = Event(func, str(func), args, kwargs, self.events)
        self.events += 1
        event.backward = self._in_backward()
        event._site = self._node_site() if event.backward else Site(*self.module, *user_line(1), event.op)
        number = torch._C._autograd._get_sequence_nr()
        if not self._numbers or number > self._numbers[-1]:  # a backward op makes a node too when its gradient is to be differentiated
            self._numbers.append(number)
            self._sites.append(event._site)
        try:
            outputs = func(*args, **kwargs)
        except BaseException as error:
            event.error = error
            self._show(event)
            raise
        event.outputs = tensors_in(outputs)
        self._show(event)
        return outputs

    def _show(self, event: Event) -> None:
        with quiet():
            for detector in self.detectors:
                detector.see(event)

    def _in_backward(self) -> bool:
        """Whether this op is a backward op: inside a backward pass, and of no forward pass that it computes again."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._task = -1
            return False
        if task != self._task:  # the first op of a backward pass: gradients are recorded there when they are to be differentiated
            self._task, self._create_graph, self._depth = task, torch.is_grad_enabled(), len(self._stack)
        return len(self._stack) <= self._depth and (self._create_graph or not torch.is_grad_enabled())

    def _node_site(self) -> Site:
        """Where the forward op of the running backward op ran; for the leaf that a gradient is added to, the parameter."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return NOWHERE
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            owner = self.owners.get(id(leaf), "").rpartition(".")[0]
            return Site(owner, type(self.model.get_submodule(owner)).__name__) if id(leaf) in self.owners else NOWHERE
        place = bisect.bisect_right(self._numbers, node._sequence_nr())
        return self._sites[place] if place < len(self._sites) else NOWHERE

    def error_place(self, error: BaseException) -> Place:
        """The innermost module of the model whose forward pass `error` came through, and the user's line that raised it."""
        return raised_at(error, self.names).place("", "forward")


@contextmanager
def quiet() -> Iterator[None]:
    """The block in which what is computed is not observed, not recorded by autograd and not cast."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
        torch.no_grad(),
    ):
        yield


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """The tensors in the arguments or results of an op, in their order."""
    if isinstance(value, Tensor):
        return (value,)
    found: list[Tensor] = []
    _collect(value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (), found)
    return tuple(found)


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
