"""How large the outputs of modules are, looked at in every N-th forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.amp.locate import tensors
from halfstep.errors import ConfigError
from halfstep.numerics import FORMATS
from halfstep.step.watching import EVERY, LISTED, Magnitudes, worst_first

_LIMITS = {FORMATS[name].dtype: FORMATS[name].largest for name in ("fp16", "bf16", "fp32")}


class Sampler:
    """Measures the largest output of every submodule in the first forward pass of training and in every N-th.

    every: that N. For the one call hooks stand on the submodules; the others find a single hook on the model, which counts. What is measured
    stays on the device. Memory: one fp32 number per module. A model that is deleted, and a deleted sampler's models, are left alone.
    A subclass may measure something else: `take` and `gathered`.
    """

    def __init__(self, every: int = EVERY) -> None:
        if every < 1:
            raise ConfigError(f"outputs sampled every {every} forward passes", "Use 1 or more.")
        self.every = every
        self.number: Callable[[], int] | None = None  # gives the number of the step at hand, which then counts instead of the calls
        self._models: list[_Watched] = []

    def __reduce__(self) -> tuple[type[Sampler], tuple[int]]:
        return type(self), (self.every,)  # a copy watches nothing

    def watch(self, model: nn.Module) -> None:
        """Watch `model`, which must be called itself (`model(x)`); once is enough, and binding it to a policy may come before or after.

        Nothing is measured of forward passes that torch compiles, traces or runs again in a backward pass, of those without gradients or not in
        training mode, and of parts that are compiled.
        """
        self._models = [m for m in self._models if m.model() is not None]
        if isinstance(model, torch.jit.ScriptModule) or any(m.model() is model for m in self._models):
            return
        watched = _Watched(model, self)
        self._models.append(watched)
        watched.handle = model.register_forward_pre_hook(_Begins(watched))
        finalize(self, watched.handle.remove).atexit = False

    def leave(self) -> None:
        """Take all hooks off the models, which are watched no longer."""
        models, self._models = self._models, []
        for watched in models:
            watched.leave()
            watched.handle.remove()

    def again(self) -> None:
        """Measure the next forward pass too: the last ones were of a step that was refused."""
        for watched in self._models:
            watched.calls, watched.again = 0, True

    def take(self, found: dict[Any, Any], name: str, t: Tensor) -> None:
        """Measure an output of a module and put it beside what was found in the same forward pass."""
        value, key = _largest(t), (name, _LIMITS[t.dtype])
        found[key] = torch.maximum(found[key], value.to(found[key].device)) if key in found else value

    def gathered(self, found: dict[Any, Any]) -> Any:
        """What `take` has found in a whole forward pass, as one record."""
        with apart():
            device = next(iter(found.values())).device
            values = torch.stack([v.to(device) for v in found.values()])
        return Magnitudes(tuple(name for name, _ in found), values, tuple(limit for _, limit in found))

    def sampled(self) -> tuple[Any, ...]:
        """The last measurements of each model, still on the device."""
        return tuple([m.last for m in self._models if m.last is not None])

    def outputs(self) -> tuple[tuple[str, float], ...]:
        """(module, largest |output| / largest finite number of its format) in the last sampled forward pass: the 8 worst, worst first.

        inf or NaN where an output was. "" is the model itself. A module that only hands on what a part of it gave is left out. Waits for the device.
        """
        return tuple(worst_first(pair for m in self.sampled() for pair in m.shares)[:LISTED])


class _Begins:
    """The hook that stays on a model. Holds what it tells weakly; a copy, by deepcopy or pickle, tells nobody."""

    def __init__(self, watched: _Watched | None = None) -> None:
        self._watched = ref(watched) if watched is not None else None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watched = self._watched() if self._watched is not None else None
        if watched is not None:
            watched.begin(module)

    def __reduce__(self) -> tuple[type[_Begins], tuple[()]]:
        return _Begins, ()


class _Watched:
    """One model: how often it was called, and what was measured last."""

    def __init__(self, model: nn.Module, sampler: Sampler) -> None:
        self.model, self.sampler = ref(model), ref(sampler)
        self.calls = 0
        self.sampled_at, self.again = 0, False  # the number of the step; whether the next call is to be sampled in any case
        self.last: Any = None
        self.handle: Any = None  # of the hook that stays
        self._handles: list[Any] = []
        self._found: dict[Any, Any] = {}
        self._seen: dict[int, tuple[ref[Tensor], int]] = {}  # outputs measured in this call, with their versions

    def begin(self, model: nn.Module) -> None:
        """A forward pass begins: put hooks on all parts if it is one to be looked at."""
        sampler = self.sampler()
        if self._handles and model is self.model():
            self.leave()  # of a call that was broken off
        if sampler is None or (sampler.number is not None and not self._is_due_at(sampler, sampler.number())):
            return
        if model is not self.model() or not model.training or not torch.is_grad_enabled() or torch._C._get_tracing_state() is not None:
            return
        if torch._C._current_graph_task_id() != -1:  # computed again in a backward pass
            return
        if not self._is_due(sampler):
            return
        self._handles = [part.register_forward_hook(partial(self._measure, name)) for name, part in _eager_parts(model)]
        self._handles.append(model.register_forward_hook(self._end))

    def _is_due(self, sampler: Sampler) -> bool:
        """Whether this call is to be sampled, which is then taken for done."""
        self.calls += 1
        if sampler.number is None:
            return self.calls == 1 or self.calls % sampler.every == 0
        self.sampled_at, self.again = sampler.number(), False
        return True

    def _is_due_at(self, sampler: Sampler, step: int) -> bool:
        """Whether a call in the step of that number is to be sampled."""
        return self.again or (step != self.sampled_at and (step == 1 or step % sampler.every == 0))

    def _measure(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """A part has given its output."""
        sampler = self.sampler()
        if torch.compiler.is_compiling() or sampler is None:
            return
        for t in tensors(output):
            if t.dtype not in _LIMITS or not _is_plain(t):
                continue
            known = self._seen.get(id(t))
            if known is not None and known[0]() is t and known[1] == t._version:
                continue  # that of a part of this module, handed on
            self._seen[id(t)] = ref(t), t._version
            sampler.take(self._found, name, t)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward pass is over. After one that an error has ended, the next call takes the hooks off."""
        sampler = self.sampler()
        if self._found and sampler is not None:
            self.last = sampler.gathered(self._found)
        self.leave()

    def leave(self) -> None:
        """Take the hooks of one call off."""
        handles, self._handles, self._found, self._seen = self._handles, [], {}, {}
        for handle in handles:
            handle.remove()


def _eager_parts(module: nn.Module, name: str = "", known: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """The module and its submodules, each once, innermost first. Not what torch has compiled, nor its parts: hooks would change the graphs."""
    known = set() if known is None else known
    compiled = isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules or module._compiled_call_impl is not None
    if compiled or id(module) in known:
        return
    known.add(id(module))
    for child, part in module._modules.items():
        if part is not None:
            yield from _eager_parts(part, f"{name}.{child}" if name else child, known)
    yield name, module


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor has numbers that can be looked at here: not a subclass, meta, sparse, or inside vmap and its like."""
    own = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_meta and t.numel() > 0
    return own and not t.is_inference() and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _largest(t: Tensor) -> Tensor:
    """The largest magnitude in a tensor, a scalar in fp32."""
    with apart():
        low, high = torch.aminmax(t.detach())
        return torch.maximum(-low, high).float()


class apart:  # noqa: N801  used like a function
    """Measuring is no part of the forward pass: unseen by autograd and by modes (autocast, selective checkpointing, tracers)."""

    def __enter__(self) -> None:
        self._open = (torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction())
        for block in self._open:
            block.__enter__()

    def __exit__(self, *error: Any) -> None:
        for block in reversed(self._open):
            block.__exit__(*error)
