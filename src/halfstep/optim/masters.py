"""The fp32 master of a 16-bit parameter: its own 16 bits and a residual, kept in step with each other.

A parameter that has one carries it as `parameter.halfstep_master`. Optimizers read and write masters; everything else sees the 16-bit
weight. What others write into the weight (a loaded state, an average swapped in, a clamp) is seen by the tensor's version and followed:
elements that changed become the master, with no residual. The first such write cannot tell which elements changed and clears the residual
of all of them (at most half an ulp of the weight each); from then on a copy of the 16 bits is kept (2 bytes per weight), and only elements
that changed lose theirs. A write through `.data`, or by a fused kernel of somebody else's, bumps no version: the stale residual is then
off by at most half an ulp of the weight, and `refresh(model)` clears it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.errors import ConfigError, suggest
from halfstep.kernels import weight_kernels
from halfstep.numerics import Noise
from halfstep.numerics.standins import asked
from halfstep.optim.storage import STORAGES, Storage, draw

HALF = (torch.float16, torch.bfloat16)
RELEASES: WeakSet[Any] = WeakSet()  # handles of gradient release: whoever scales a loss finds out that its gradients will be used at once
LARGEST_FP16 = 2.0**15  # larger weights stay fp32: a step could take them out of fp16's range


class Master:
    """What stands beside a 16-bit parameter, and the version of the parameter that it belongs to."""

    def __init__(self, parameter: Tensor, storage: Storage, residual: Tensor | None) -> None:
        self.storage, self.residual = storage, residual
        self._parameter, self._version, self._dtype = ref(parameter), parameter._version, parameter.dtype
        self._copy: Tensor | None = None  # of the 16 bits, kept once others have written

    def __getstate__(self) -> dict[str, Any]:
        parameter = self._parameter()
        if parameter is not None:
            self.follow()
        return {"storage": self.storage.name, "residual": self.residual, "dtype": self._dtype, "copy": self._copy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.storage, self.residual, self._dtype = STORAGES[state["storage"]], state["residual"], state["dtype"]
        self._parameter, self._version, self._copy = (lambda: None), -1, state["copy"]  # type: ignore[assignment]  # bound by master_of

    @property
    def parameter(self) -> Tensor:
        """The parameter that this is the master of."""
        found = self._parameter()
        assert found is not None
        return found

    def bind(self, parameter: Tensor) -> None:
        """Belong to `parameter`, a copy with the same bits of the one that this was made for."""
        self._parameter, self._version = ref(parameter), parameter._version

    def follow(self) -> None:
        """Take notice of what others did to the parameter since the last write: new values, another device, other strides, more or fewer rows."""
        p, residual = self.parameter, self.residual
        if p._version == self._version and (residual is None or _lies_beside(residual, p)):
            return
        with torch.no_grad():
            self._follow(p)

    def _follow(self, p: Tensor) -> None:
        if self.residual is not None and not _lies_beside(self.residual, p):
            self.residual = _like(self.residual, p)
        if self._copy is not None and not _lies_beside(self._copy, p):
            self._copy = _like(self._copy, p)
        if p._version == self._version:
            return
        self._version = p._version
        if self.residual is None:
            return
        if self._copy is None:
            self.residual.zero_()
            self._copy = p.detach().clone()
            return
        same = p.detach().view(torch.int16) == self._copy.view(torch.int16)
        self.residual.masked_fill_(~same, 0)  # no residual, in every storage
        self._copy.copy_(p.detach())

    def read(self) -> Tensor:
        """The fp32 master, a new tensor in the shape of the parameter."""
        self.follow()
        p = self.parameter.detach()
        kernels = weight_kernels(p)
        if kernels is not None and self._is_plain(kernels, p):
            return kernels.read_weight(p, self.storage.name, self.residual)  # type: ignore[no-any-return]
        return self.storage.read(p, self.residual)

    def _is_plain(self, kernels: ModuleType, values: Tensor) -> bool:
        """Whether the compiled twins take the parameter, its residual and `values`."""
        p, expected = self.parameter, self.storage.residual_dtype(self._dtype)
        fits = p.shape == values.shape and expected == (None if self.residual is None else self.residual.dtype)
        return fits and (self.residual is None or self.residual.shape == p.shape) and bool(kernels.takes(values, p.detach(), self.residual))

    @torch.no_grad()
    def write(self, values: Tensor, noise: Noise | None = None) -> None:
        """Make fp32 `values` the master: the parameter gets its 16 bits, the residual the rest. noise: None rounds to nearest."""
        p = self.parameter
        values, kernels = values.to(p.device, torch.float32), weight_kernels(p)
        if kernels is not None and self._is_plain(kernels, values) and (noise is not None or not self.storage.draws):
            kernels.write_weight(values, p.detach(), self.storage.name, self.residual, noise.keys if noise is not None else (0, 0))
            return self.wrote()
        weight, residual = self.storage.parts(values, p.dtype, draw(self.storage, noise, values))
        p.detach().copy_(weight)
        if residual is not None:
            if self.residual is None or self.residual.shape != p.shape or self.residual.device != p.device:
                self.residual = torch.empty_like(p, dtype=residual.dtype)
            self.residual.copy_(residual)
        return self.wrote()

    def wrote(self, counted: bool = False) -> None:
        """The parameter's bits and the residual were written together: a version of their own, unless it is counted already."""
        p = self.parameter
        if not counted:
            increment_version(p)
        self._version = p._version
        if self._copy is not None:
            self._copy.copy_(p.detach())

    def put(self, residual: Tensor) -> None:
        """Put a residual beside the parameter as it is now."""
        self.residual, self._copy = _like(residual, self.parameter), None
        self.wrote()

    def refresh(self) -> None:
        """Take the parameter as it is now for the master, with no residual."""
        if self.residual is not None:
            self.residual.zero_()
        self._version = self.parameter._version
        if self._copy is not None:
            self._copy.copy_(self.parameter.detach())

    def nbytes(self) -> int:
        """Bytes that stand beside the parameter."""
        return sum(t.nbytes for t in (self.residual, self._copy) if t is not None)


torch.serialization.add_safe_globals([Master])  # a pickled parameter brings its master: torch.load(weights_only=True) may make one


def _lies_beside(tensor: Tensor, p: Tensor) -> bool:
    return tensor.shape == p.shape and tensor.stride() == p.stride() and tensor.device == p.device


def _like(tensor: Tensor, p: Tensor) -> Tensor:
    """`tensor` where and as `p` lies. Of one that has got more rows, or fewer, those that both have are kept, and others are 0."""
    if tensor.shape == p.shape:
        return torch.empty_like(p, dtype=tensor.dtype).copy_(tensor)
    made = torch.zeros_like(p, dtype=tensor.dtype, requires_grad=False)
    if tensor.dim() and tensor.shape[1:] == p.shape[1:]:
        rows = min(len(tensor), len(p))
        made[:rows].copy_(tensor[:rows])
    return made


def storage_named(name: str) -> Storage:
    """The storage of that name. Raises ConfigError with the nearest one."""
    if name not in STORAGES:
        raise ConfigError(f"weights={name!r} is not known", suggest(str(name), STORAGES))
    return STORAGES[name]


def master_of(p: Tensor) -> Master | None:
    """The master of a parameter, or None. One whose parameter was cast back to fp32 is joined with it and taken off."""
    master: Master | None = getattr(p, "halfstep_master", None)
    if master is None:
        return None
    if master._parameter() is not p:
        master.bind(p)  # the parameter is a copy, by pickle
    if p.dtype == master._dtype:
        return master
    before = master._dtype
    del p.halfstep_master  # type: ignore[attr-defined]
    gradient, p.grad = p.grad, None
    p.grad_dtype = p.dtype
    p.grad = None if gradient is None else gradient.to(p.dtype)
    narrow = p.detach().to(before)
    if p.dtype in HALF or p._version != master._version or master.residual is None or not torch.equal(narrow.to(p.dtype), p.detach()):
        return None  # its values are others now
    p.data = master.storage.read(narrow, _like(master.residual, narrow)).to(p.dtype)
    return None


def refuse_large(p: Tensor, dtype: torch.dtype | None) -> None:
    """Raise ConfigError for weights that are to be fp16 and of a magnitude above 2^15."""
    if dtype == torch.float16 and asked(p, lambda values: bool((values.abs() > LARGEST_FP16).any()), False):
        raise ConfigError(
            f"a parameter of shape {tuple(p.shape)} has weights of a magnitude above 2^15, and a step could take them out of fp16's range",
            "Keep it in fp32 (fp32=PATTERN in the precision), or use bf16.",
        )


@torch.no_grad()
def attach(p: Tensor, storage: str = "split", dtype: torch.dtype | None = None) -> Master:
    """Give `p` a master in `storage`.

    An fp32 parameter is cast in place to `dtype`, and its values become the master; one that is 16-bit already keeps its bits.
    Memory per weight: 2 bytes and the storage's residual (2 for split and kahan, 1 for split24, 0 for stochastic and plain) instead of 4.
    Raises ConfigError for a storage that is not known or is "fp32", and for fp16 weights of a magnitude above 2^15.
    """
    chosen = storage_named(storage)
    known = master_of(p)
    if known is not None:
        if known.storage.name != storage:
            raise ConfigError(
                f"a parameter of shape {tuple(p.shape)} has a {known.storage.name} master already, and {storage} was asked for",
                f"Use weights={known.storage.name}, or halfstep.optim.detach it first.",
            )
        return known
    target = p.dtype if p.dtype in HALF else dtype
    if chosen.name == "fp32" or target not in HALF or p.dtype not in (*HALF, torch.float32):
        raise ConfigError(
            f"{storage} masters were asked for a {dtype_name(p.dtype)} parameter" + (f" cast to {dtype_name(target)}" if target is not None else ""),
            "Name a 16-bit dtype and one of split, split24, kahan, stochastic, plain.",
        )
    refuse_large(p, target)
    residual_dtype = chosen.residual_dtype(target)
    if p.dtype in HALF:
        residual = torch.zeros_like(p, dtype=residual_dtype, requires_grad=False) if residual_dtype is not None else None
    else:
        weight, rest = chosen.parts(p.detach(), target, None)
        residual = None if rest is None else _like(rest, p)
        gradient, p.grad = p.grad, None
        p.data = torch.empty_like(p, dtype=target).copy_(weight)
        p.grad_dtype = target
        if gradient is not None:
            p.grad = gradient.to(target)
    _watch_stock_optimizers()
    master = Master(p, chosen, residual)
    p.halfstep_master = master  # type: ignore[attr-defined]
    return master


@functools.cache
def _watch_stock_optimizers() -> None:
    """Ask torch, once per process, to show every optimizer before its step. The hook keeps nothing."""
    register_optimizer_step_pre_hook(_refuse_stock)


def _refuse_stock(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "knows_masters", False):
        return
    around = any(isinstance(o, Optimizer) and getattr(o, "knows_masters", False) for o in vars(optimizer).values())
    if around and "halfstep_told" in vars(optimizer):
        return
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            known = getattr(p, "halfstep_master", None)  # not by way of __dict__, which torch.compile cannot look into
            if p.grad is not None and known is not None and known.storage.name != "plain" and master_of(p) is not None:
                if around:
                    optimizer.halfstep_told = True  # type: ignore[attr-defined]
                    warnings.warn(
                        f"a {type(optimizer).__name__} steps around an optimizer of halfstep's: what it writes into 16-bit weights itself is "
                        "rounded to 16 bits and may be lost. Use it with weights that are fp32.",
                        stacklevel=5,
                    )
                    return
                place = f"param_groups[{g}]['params'][{i}], a {dtype_name(p.dtype)} weight of shape {tuple(p.shape)}"
                raise ConfigError(
                    f"this {type(optimizer).__name__} would update {place}, past its {known.storage.name} master, and small updates would round away",
                    "Step with what accelerator.prepare(optimizer) or halfstep.optim.wrap(optimizer) returns.",
                )


@torch.no_grad()
def detach(p: Tensor) -> None:
    """Make `p` fp32 again, exactly its master, and take the master off. Nothing is done to a parameter without one."""
    master = master_of(p)
    if master is None:
        return
    values = master.read()
    gradient, p.grad = p.grad, None
    p.data = _like(values, p) if values.stride() != p.stride() else values
    p.grad_dtype = torch.float32
    if gradient is not None:
        p.grad = gradient.float()
    del p.halfstep_master  # type: ignore[attr-defined]


def full_values(p: Tensor) -> Tensor:
    """The value of a parameter in full: its fp32 master if it has one, else its own value. A new tensor; fp32 unless the parameter is wider."""
    master = master_of(p)
    if master is not None:
        return master.read()
    return p.detach().float() if p.dtype in HALF else p.detach().clone()


def keep(p: Tensor) -> Callable[[], None]:
    """What puts a parameter, and the residual of its master, back to what they are now. Memory: a copy of both.

    One that was cast in between (to 16 bits by the first call of a `*-lean` model, or back) gets the fp32 value that it has now.
    """
    master = master_of(p)
    if master is not None:
        master.follow()
    weight, residual = p.detach().clone(), master.residual.clone() if master is not None and master.residual is not None else None

    @torch.no_grad()
    def put_back() -> None:
        now = master_of(p)
        if now is not master:
            values = weight if master is None else master.storage.read(weight, residual)
            if now is None:
                p.copy_(values)
            else:
                now.write(values)
            return
        p.copy_(weight)
        if master is not None:
            if residual is not None and master.residual is not None:
                master.residual.copy_(residual)
            master.wrote()

    return put_back


def refresh(items: nn.Module | Iterable[Tensor]) -> int:
    """Take 16-bit parameters as they are now for their masters; returns how many have one.

    To be called after writes that torch does not see: through `.data`, or by another library's kernel. Others are followed by themselves.
    """
    found = [m for p in (items.parameters() if isinstance(items, nn.Module) else items) if (m := master_of(p)) is not None]
    for master in found:
        master.refresh()
    return len(found)


def digest(weight: Tensor) -> int:
    """A number that tells the bits of a 16-bit tensor from others, on every device the same: residuals are saved with it."""
    flat = weight.detach().contiguous().view(torch.int16).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 1 << 22):
        part = flat[start : start + (1 << 22)].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=flat.device) * 2 + 1
        total += ((part + 0x10001) * (place * 0x9E3779B1) & 0xFFFFFFFFFFFF).sum()
    return int(total) & 0x7FFFFFFFFFFFFFFF


def dtype_name(dtype: torch.dtype | None) -> str:
    """A dtype as people write it: bfloat16."""
    return str(dtype).removeprefix("torch.")
