"""torch.compile for a model in place: its names, its class and its checkpoints stay what they are."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch
from torch import nn

from halfstep.amp import settle_now
from halfstep.errors import ConfigError, suggest

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Compiled:
    """The block in which calls of `model` run as torch.compile has compiled them; outside it the model is as it was. May be entered inside itself.

    What is compiled is the call of the model, hooks and precision included; loss scaling, clipping and the optimizer's step are not. Before the first
    compiled call a `*-lean` policy decides on its weights, so that they do not change under a compiled graph.
    """

    def __init__(self, model: nn.Module, backend: str | None = None, mode: str | None = None) -> None:
        self.model = model
        self._call = torch.compile(model._call_impl, backend=backend or "inductor", mode=mode)
        self._before: list[Any] = []

    def __enter__(self) -> Compiled:
        self._before.append(self.model._compiled_call_impl)
        if len(self._before) == 1:
            self.model._compiled_call_impl = self._first
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.model._compiled_call_impl = self._before.pop()

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        settle_now(self.model, args, kwargs)
        self.model._compiled_call_impl = self._call
        return self._call(*args, **kwargs)


class AsItIs:
    """The block in which a model is called as it is written."""

    def __enter__(self) -> AsItIs:
        return self

    def __exit__(self, *_: object) -> None: ...


def compiled(model: nn.Module, backend: str | None, mode: str | None) -> Compiled:
    """`Compiled`, after a look at the names. Raises ConfigError for a backend or a mode that torch does not know."""
    known = _backends()
    if backend is not None and backend not in known:
        raise ConfigError(f"torch_compile_backend={backend!r} is not known", suggest(backend, known))
    if mode is not None and mode not in MODES:
        raise ConfigError(f"torch_compile_mode={mode!r} is not known", suggest(mode, MODES))
    if mode not in (None, "default") and backend not in (None, "inductor"):
        raise ConfigError(f"torch_compile_mode={mode!r} has no effect with torch_compile_backend={backend!r}", "Modes are those of inductor.")
    return Compiled(model, backend, mode)


@functools.cache
def _backends() -> tuple[str, ...]:
    import torch._dynamo

    return tuple(torch._dynamo.list_backends(exclude_tags=()))
