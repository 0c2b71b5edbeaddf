"""torch.compile for a model in place: its names, its class and its checkpoints stay what they are."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

from torch import nn

from halfstep.amp.compiling import CompiledCall
from halfstep.errors import ConfigError, suggest

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Compiled:
    """The block in which calls of `model` run as torch.compile has compiled them (`CompiledCall`); outside it the model is as it was.

    May be entered inside itself. Loss scaling, clipping and the optimizer's step are not compiled.
    """

    def __init__(self, model: nn.Module, backend: str | None = None, mode: str | None = None) -> None:
        self.model = model
        self._call = CompiledCall(model, backend=backend or "inductor", mode=mode)
        self._before: list[Any] = []

    def __enter__(self) -> Compiled:
        self._before.append(self.model._compiled_call_impl)
        self.model._compiled_call_impl = self._call
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.model._compiled_call_impl = self._before.pop()


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
