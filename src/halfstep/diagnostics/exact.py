"""A reference in fp32 that is fp32: casts to 16 or 8 bits that stand in a model's own code are noted, and not done."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep.amp.mode import OPENED, opened, without_autocast
from halfstep.amp.ops import HALF, LOW, every_form
from halfstep.numerics import error
from halfstep.tracing.findings import short
from halfstep.tracing.observe import quiet
from halfstep.tracing.places import user_line

_LOW = frozenset(every_form(LOW))
_NAMED = {"torch.HalfTensor": torch.float16, "torch.BFloat16Tensor": torch.bfloat16}  # as x.type("torch.HalfTensor") spells them
_NARROW = frozenset((*HALF, *(d for name in vars(torch) if name.startswith("float8_") and isinstance(d := getattr(torch, name), torch.dtype))))
_METHODS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


@dataclass(frozen=True)
class Cast:
    """A cast to 16 or 8 bits in a model's code that changed numbers: module and type, source line, format, and the largest relative change.

    direction: of the pass it was met in. at: how many boundaries of modules had been passed before it.
    """

    module: str
    kind: str
    source: str
    made_in: str
    error: float
    direction: str
    at: int


class Exact(TorchFunctionMode):
    """Inside this block functions of torch that are asked for 16 or 8 bits give fp32, and blocks of autocast in the model's code have no effect.

    where: gives path and type of the module whose code runs (given True: that has opened the block of autocast), the direction, and the number of
    boundaries passed. Casts that lose nothing (masks of 0
    and 1) are not noted. Ops below Python (a module written in C++) are not seen.
    """

    def __init__(self, where: Callable[[bool], tuple[str, str, str, int]]) -> None:
        super().__init__()
        self.where = where
        self.casts: dict[tuple[str, str, str], Cast] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return opened(func)(*args, **kwargs)
        asked = _METHODS.get(func) or next((d for a in (*args, *kwargs.values()) if (d := _half(a)) is not None), None)
        if asked is not None and func is not Tensor.view:
            made = args[0].float() if func in _METHODS else func(*map(_wide, args), **{k: _wide(a) for k, a in kwargs.items()})
            self._note(made, asked, False)
            return made
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if first is not None and torch.is_autocast_enabled(first.device.type):
            made = without_autocast(first.device.type, func, *args, **kwargs)
            if func in _LOW:
                self._note(made, torch.get_autocast_dtype(first.device.type), True)
            return made
        return func(*args, **kwargs)

    def _note(self, made: Any, asked: torch.dtype, autocast: bool) -> None:
        if not isinstance(made, Tensor) or not made.is_floating_point() or made.is_meta or not made.numel():
            return
        code, line = user_line(2)
        source = f"{os.path.basename(code.co_filename)}:{line}" if code is not None else ""
        module, kind, direction, at = self.where(autocast)
        with quiet():
            off = error(made.detach().to(asked), made.detach().float()).largest_relative
        key, known = (module, source, short(asked)), self.casts.get((module, source, short(asked)))
        if off > 0 and (known is None or known.error < off):
            self.casts[key] = Cast(module, kind, source, short(asked), off, direction, at if known is None else known.at)


def _half(value: Any) -> torch.dtype | None:
    """The format of 16 or 8 bits that an argument asks for."""
    if isinstance(value, torch.dtype):
        return value if value in _NARROW else None
    return _NAMED.get(value) if isinstance(value, str) else None


def _wide(value: Any) -> Any:
    return torch.float32 if _half(value) is not None else value
