"""`autocast`: torch's interface, without its stale cache and without its silent fallbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from halfstep.amp.emulation import Emulation, is_active
from halfstep.errors import ConfigError
from halfstep.hardware import default_device, parse_device, probe
from halfstep.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class autocast:  # noqa: N801  the name of torch's
    """Run matrix products, convolutions and attention in 16 bits inside a `with` block or a decorated function.

    device_type: "cpu" or "cuda"; default: the device that would be trained on.
    dtype: torch.bfloat16 or torch.float16; default: bf16 on a CPU, fp16 on a GPU, as torch.
    enabled: False makes the block run in the dtypes of its inputs.
    cache_enabled: torch's cache of cast weights. Off unless asked for: it is keyed by the tensor and not by its version,
        so weights changed inside the block would be used stale.

    On a CPU without instructions for the dtype the products are emulated: the same numbers at fp32's speed.
    Raises ConfigError for a device that is not there and for a dtype that autocast would ignore, where torch only warns and
    runs fp32.
    """

    def __init__(
        self, device_type: str | None = None, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        self.device_type = parse_device(device_type).type if device_type is not None else default_device().type
        self.dtype = dtype if dtype is not None else torch.get_autocast_dtype(self.device_type)
        self.enabled = enabled
        self.cache_enabled = bool(cache_enabled)
        if enabled and self.dtype not in NAMES:
            raise ConfigError(
                f"autocast to {self.dtype} was asked for, and only torch.bfloat16 and torch.float16 have an effect",
                "Use one of them, or enabled=False.",
            )
        self._emulated = enabled and self.device_type == "cpu" and not probe("cpu").is_native(NAMES[self.dtype])
        if enabled and self.device_type != "cpu":
            probe(self.device_type)  # refuses a device that is not there
        self._open: list[ExitStack] = []

    def __enter__(self) -> autocast:
        stack = ExitStack()
        stack.enter_context(torch.autocast(self.device_type, self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled))
        if self._emulated and not is_active():
            stack.enter_context(Emulation())
        self._open.append(stack)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`: each of its calls runs inside a block of its own."""

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled):
                return function(*args, **kwargs)

        return inside


class Fp32Products:
    """Sets torch's switches for fp32 products on the GPU (tf32 or exact) inside a block, and puts them back.

    The switches are global to the process: a block holds them only while it runs, forward and backward each. They are set
    by torch's older names, which keep the newer ones in agreement (torch raises errors where the two disagree).
    """

    def __init__(self, tf32: bool) -> None:
        self.tf32 = tf32
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Fp32Products:
        self._undo.append(_switches())
        _set("high" if self.tf32 else "highest", self.tf32)
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.pop()()


def _set(matmul: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


def _switches() -> Callable[[], None]:
    """What puts the switches back to where they are now: by the older names where they can be read, then each newer one that still differs."""
    backends: Any = torch.backends
    parts = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    before = [part.fp32_precision for part in parts]
    try:
        older = functools.partial(_set, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the user has set the newer names to what the older ones cannot say
        older = None

    def restore() -> None:
        if older is not None:
            older()
        for part, value in zip(parts, before, strict=True):
            if part.fp32_precision != value and {part.fp32_precision, value} != {"none", "ieee"}:  # two words for the same
                part.fp32_precision = value

    return restore


class Region:
    """A block made of other blocks, which are made anew at each entry: it may be kept, entered again, and nested."""

    def __init__(self, *parts: Callable[[], AbstractContextManager[Any]]) -> None:
        self._parts = parts
        self._open: list[ExitStack] = []

    def __enter__(self) -> Region:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part())
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.pop().__exit__(kind, error, trace)


def forward_context(policy: Policy, device: torch.device) -> Region:
    """The block in which a forward pass under `policy` runs. Nothing is switched before it is entered."""
    parts: list[Callable[[], AbstractContextManager[Any]]] = []
    if device.type == "cuda":
        parts.append(functools.partial(Fp32Products, policy.tf32))
    if policy.is_mixed:
        parts.append(functools.partial(autocast, device.type, policy.dtype))
    return Region(*parts)


def backward_context(policy: Policy, device: torch.device) -> Region:
    """The block in which a backward pass under `policy` runs.

    On a CPU that emulates, a forward pass that is computed again inside it (activation checkpointing) is emulated as the first one was.
    """
    if device.type == "cuda":
        return Region(functools.partial(Fp32Products, policy.tf32))
    if policy.is_mixed and not probe(device).is_native(policy.autocast):
        return Region(lambda: ExitStack() if is_active() else Emulation())
    return Region()
