"""`autocast`: torch's interface, without its stale cache and without its silent fallbacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from halfstep.amp.mode import Applied, Switched, Tables, current
from halfstep.amp.ops import check_lists
from halfstep.amp.routes import bare_island, tables
from halfstep.amp.whole import low_products
from halfstep.errors import ConfigError, suggest
from halfstep.hardware import default_device, emulated_families, parse_device, probe
from halfstep.policy import Policy, chosen, families_of, products_text

P = ParamSpec("P")
R = TypeVar("R")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class autocast:  # noqa: N801  the name of torch's
    """Run matrix products, convolutions and attention in 16 bits inside a `with` block or a decorated function.

    device_type: "cpu" or "cuda"; default: the device that would be trained on.
    dtype: torch.bfloat16 or torch.float16; default: bf16 on a CPU, fp16 on a GPU, as torch.
    enabled: False makes the block run in the dtypes of its inputs. Inside a block where autocast is on it makes an fp32 island: every function that
        rounds or can overflow casts its 16-bit operands up (arithmetic, reductions, products, activations, norms, losses: `amp.ops.inexact()`);
        exact ones (views, comparisons, relu, max, where, cat), conversions, and in-place forms are left as they are.
    cache_enabled: torch's cache of cast weights. Off unless asked for: it is keyed by the tensor and not by its version,
        so weights changed inside the block would be used stale.
    ops: "cuda" (softmax, exp, pow, sum, norms, losses and the rest of torch's CUDA list in fp32, on a CPU too) or "device" (the device's own list).
    fp32_ops, half_ops: names of ops to run in fp32 and in 16 bits instead; "softmax" stands for torch.softmax, F.softmax and x.softmax.
    products: how products run on a CPU. "native": by torch's 16-bit kernels. "emulated": operands rounded to 16 bits, multiplied in fp32, the result
        rounded, which are the same numbers but for the order of fp32 sums. "emulated:convolution|attention": those emulated and matmul native.
        "auto": whichever was measured to be faster on this machine, for each of the three (`halfstep doctor` shows the rates).

    The first block with "auto" on a machine measures it, in about 0.2 s; later ones, and those of other processes, know.
    Raises ConfigError for a device that is not there, for a dtype that autocast would ignore, where torch only warns and runs fp32, for products= on
    a GPU, and for a name that is no op; F.binary_cross_entropy of 16-bit probabilities raises it inside the block, as torch does on CUDA.
    Source of the lists: torch's documentation, "Automatic Mixed Precision package", CUDA Op-Specific Behavior.
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        ops: str = "cuda",
        fp32_ops: Sequence[str] = (),
        half_ops: Sequence[str] = (),
        products: str = "auto",
    ) -> None:
        self.ops, self.fp32_ops, self.half_ops = ops, _op_names("fp32_ops", fp32_ops), _op_names("half_ops", half_ops)
        self.enabled, self.cache_enabled, self.products = enabled, bool(cache_enabled), products
        self.device_type, self.dtype, self._emulated = _settled(device_type, dtype, enabled, ops, self.fp32_ops, self.half_ops, products)
        self._open: list[tuple[Switched, Applied | None]] = []

    def __enter__(self) -> autocast:
        wanted = self._tables()
        switched = Switched(self.device_type, self.enabled, self.dtype, self.cache_enabled)
        applied = Applied(self.device_type, wanted) if wanted is not None else None
        switched.__enter__()
        if applied is not None:
            applied.__enter__()
        self._open.append((switched, applied))
        return self

    def _tables(self) -> Tables | None:
        """What a mode has to do inside this block, or None where torch's autocast alone does it."""
        mode = current(self.device_type)
        if self.enabled:
            find = _traced if torch.compiler.is_compiling() else _wanted
            wanted = find(self.device_type, self.ops, self.fp32_ops, self.half_ops, self._emulated)
            return wanted if wanted.acts_on or mode is not None else None
        if torch.is_autocast_enabled(self.device_type) or (mode is not None and mode.tables.acts_off):
            around = mode.tables.island or mode.tables if mode is not None else None
            return around if around is not None and around.acts_off else _island(self.device_type)
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        switched, applied = self._open.pop()
        if applied is not None:
            applied.__exit__(kind, error, trace)
        switched.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`: each of its calls runs inside a block of its own. Raises ConfigError for generators and async functions."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            kind = "generator" if inspect.isgeneratorfunction(function) else "async function"
            raise ConfigError(
                f"autocast decorates the {kind} {function.__qualname__}, whose body runs after the block has ended",
                "Open the block in its body: with halfstep.amp.autocast(...).",
            )

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            lists: dict[str, Any] = {"ops": self.ops, "fp32_ops": self.fp32_ops, "half_ops": self.half_ops, "products": self.products}
            with autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled, **lists):
                return function(*args, **kwargs)

        return inside


def _op_names(key: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{key}={given!r} is not a list of names", f"Write {key}=('softmax',).")
    return tuple(given)


def _settled(
    device_type: str | None,
    dtype: torch.dtype | None,
    enabled: bool,
    op_list: str,
    fp32_ops: tuple[str, ...],
    half_ops: tuple[str, ...],
    products: str,
) -> tuple[str, torch.dtype, tuple[str, ...]]:
    """Device, dtype and the families of products that are emulated, for what was asked; refused with ConfigError where it cannot be had."""
    device = parse_device(device_type).type if device_type is not None else default_device().type
    chosen = dtype if dtype is not None else torch.get_autocast_dtype(device)
    if enabled and chosen not in NAMES:
        raise ConfigError(
            f"autocast to {chosen} was asked for, and only torch.bfloat16 and torch.float16 have an effect", "Use one of them, or enabled=False."
        )
    if op_list not in ("cuda", "device"):
        raise ConfigError(f"ops={op_list!r} is not known", suggest(str(op_list), ("cuda", "device")))
    check_lists(fp32_ops, half_ops)
    asked = families_of(products)
    if not enabled:
        return device, chosen, ()
    probe(device)  # refuses a device that is not there
    if device != "cpu":
        if asked is not None:
            raise ConfigError(f"products={products} has no effect on a GPU, whose own kernels run", "Leave it out.")
        return device, chosen, ()
    return device, chosen, emulated_families(NAMES[chosen]) if asked is None else asked


def _wanted(device: str, op_list: str, fp32_ops: tuple[str, ...], half_ops: tuple[str, ...], emulated: tuple[str, ...]) -> Tables:
    return tables(device, op_list, fp32_ops, half_ops, emulated)


def _traced(device: str, op_list: str, fp32_ops: tuple[str, ...], half_ops: tuple[str, ...], emulated: tuple[str, ...]) -> Tables:
    """Those of a graph, made anew for each: never the very object of a block that is open around it, perhaps by another graph, which torch.compile
    cannot guard on being the same constant."""
    found = _wanted(device, op_list, fp32_ops, half_ops, emulated)
    return Tables(found.on, found.off, found.emulated, found.island)


def _island(device: str) -> Tables:
    return bare_island(device)


# torch.compile calls these once and does not look inside: torch.compiler.assume_constant_result, without a second of imports
_settled._dynamo_marked_constant = True  # type: ignore[attr-defined]
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
_island._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


class Products:
    """Which products run emulated on a CPU in the blocks of a run, as `products=` says it: the policy's, or those of the run that it goes on from."""

    def __init__(self, text: str = "auto") -> None:
        self.text = text

    def settled(self, policy: Policy, device: torch.device) -> str:
        """The text with "auto" replaced by what was measured; "" where there is no choice: without 16-bit products, and on a GPU."""
        if policy.autocast == "fp32" or device.type != "cpu":
            return ""
        asked = families_of(self.text)
        return products_text(emulated_families(policy.autocast) if asked is None else asked)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def forward_context(policy: Policy, device: torch.device, products: Products | None = None) -> AbstractContextManager[Any]:
    """The block in which a forward pass under `policy` runs. Nothing is switched before it is entered.

    products: read at each entry; without it the policy's hold.
    """
    parts: list[Callable[[], AbstractContextManager[Any]]] = []
    chosen(policy)
    if device.type == "cuda":
        parts.append(functools.partial(Fp32Products, policy.tf32))
    if policy.is_mixed:
        parts.append(functools.partial(_autocast_of, policy, device.type, products))
    elif policy.whole and device.type == "cpu":
        parts.append(functools.partial(_low_of, policy, products))
    return Region(*parts) if parts else _NOTHING


def _autocast_of(policy: Policy, device_type: str, products: Products | None) -> autocast:
    text = policy.products if products is None else products.text
    return autocast(device_type, policy.dtype, ops=policy.ops, fp32_ops=policy.fp32_ops, half_ops=policy.half_ops, products=text)


def _low_of(policy: Policy, products: Products | None) -> AbstractContextManager[Any]:
    return low_products(policy.autocast, policy.products if products is None else products.text)


def backward_context(policy: Policy, device: torch.device, products: Products | None = None) -> AbstractContextManager[Any]:
    """The block in which a backward pass under `policy` runs.

    A forward pass that is computed again inside it (activation checkpointing) sees the op policy that the first one saw.
    """
    parts: list[Callable[[], AbstractContextManager[Any]]] = []
    if device.type == "cuda":
        parts.append(functools.partial(Fp32Products, policy.tf32))
    if policy.is_mixed:
        wanted = _autocast_of(policy, device.type, products)._tables()
        if wanted is not None:
            parts.append(functools.partial(Applied, device.type, wanted))
    elif policy.whole and device.type == "cpu":
        parts.append(functools.partial(_low_of, policy, products))
    return Region(*parts) if parts else _NOTHING
