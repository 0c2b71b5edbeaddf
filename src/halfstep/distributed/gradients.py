"""Gradients as means over ranks: in buckets, sent while the backward pass still runs, in the format that was asked for.

Each rank differentiates its own batch. In the last backward pass of a window a bucket is sent as soon as its gradients are there, in the same
order on every rank; inside a window nothing is sent. Whatever was not sent by then (backward passes that the step engine repeats, those of the
user's own) is sent before gradients are judged, so no step is taken with the gradients of one rank.

Why not torch's DistributedDataParallel: it wraps the module, fixes the dtypes of its buckets when it is made (weights go to 16 bits at the first
batch and back to fp32 when a module is pinned), and reduces no second backward pass through one forward pass, which a replayed step needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed.buffers import Buffers
from halfstep.distributed.launch import TIMEOUT
from halfstep.distributed.ranks import Ranks
from halfstep.errors import ConfigError

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET_MB = 25.0


@dataclass(frozen=True)
class DataParallel:
    """How several processes train one model: how they find each other, and how gradients go over the wire.

    reduce_dtype: "fp32", "bf16" or "fp16"; None for the format each gradient has (16-bit weights have 16-bit gradients while there is one backward
        pass per step). Sums are of gradients divided by the number of ranks, so that 16 bits hold them. fp16 carries gradients as the loss scale has
        made them; what does not fit becomes inf, which the verdict on the step sees.
    bucket_cap_mb: MiB of gradients sent at a time.
    find_unused_parameters: True or None let parameters be without a gradient, on some ranks or on all; False refuses that.
    broadcast_buffers: rank 0's buffers (running statistics) become everybody's at each step.
    backend, timeout: see `launch`.
    """

    reduce_dtype: str | None = None
    bucket_cap_mb: float = BUCKET_MB
    find_unused_parameters: bool | None = None
    broadcast_buffers: bool = True
    backend: str | None = None
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if self.reduce_dtype not in (None, *FORMATS):
            raise ConfigError(f"reduce_dtype={self.reduce_dtype!r} is not known", f"Use one of {', '.join(FORMATS)}, or leave it out.")
        if not self.bucket_cap_mb > 0:
            raise ConfigError(f"buckets of {self.bucket_cap_mb} MiB hold nothing", f"Use {BUCKET_MB:g}, or leave it out.")

    def refuse_without_scale(self, policy: str, scales: bool) -> None:
        """Raise ConfigError for fp16 on the wire where no loss scale keeps small gradients above its range."""
        if self.reduce_dtype == "fp16" and not scales:
            raise ConfigError(
                f"reduce_dtype='fp16' under {policy}, which has no loss scale: gradients below 6e-8 would be sent as 0",
                "Use reduce_dtype='bf16', or a fp16 precision.",
            )


class Reducer(Protocol):
    """What a step needs of whoever brings the gradients of ranks together."""

    sent: int  # bytes that this rank has handed to collectives so far

    def join(self, item: nn.Module | Iterable[Tensor]) -> None:
        """Bring the gradients of these parameters together from now on."""

    def expect(self) -> None:
        """The backward pass that follows is the last of its step: send gradients as they come."""

    def finish(self, only: Iterable[Tensor] | None = None) -> bool:
        """Make gradients the mean over ranks. Whether there were any to do.

        After `expect`: those of the models that the backward pass has reached; else all that backward passes have changed since the last time.
        only: of models that have some of these parameters.
        """

    def give_up(self) -> None:
        """A backward pass has failed: what it has sent is thrown away."""


class NoReducer:
    """One process: its gradients are the mean."""

    sent = 0

    def join(self, item: nn.Module | Iterable[Tensor]) -> None:
        """Nothing to do."""

    def expect(self) -> None:
        """Nothing to do."""

    def finish(self, only: Iterable[Tensor] | None = None) -> bool:
        """Nothing to do."""
        return False

    def give_up(self) -> None:
        """Nothing to do."""


class _Heard:
    """A hook on a parameter that tells a reducer of its gradient. Holds it weakly; a copy, by deepcopy or pickle, tells nobody."""

    def __init__(self, reducer: MeanOverRanks | None = None) -> None:
        self._reducer = ref(reducer) if reducer is not None else None

    def __call__(self, parameter: Tensor) -> None:
        reducer = self._reducer() if self._reducer is not None else None
        if reducer is not None:
            reducer.heard(parameter)

    def __reduce__(self) -> tuple[type[_Heard], tuple[()]]:
        return _Heard, ()


@dataclass
class _Bucket:
    """Gradients that are sent together. The last elements of `flat` say of how many ranks each gradient is."""

    parameters: list[Tensor]
    dtype: torch.dtype
    group: int  # number of the model they belong to
    waits: set[int] = field(default_factory=set)  # ids of parameters whose gradient is not there yet
    late: bool = False  # a gradient was added to after the bucket was sent
    flat: Tensor | None = None
    work: Any = None

    def views(self) -> tuple[list[Tensor], Tensor]:
        """The parts of `flat`, shaped as the parameters, and the counts."""
        assert self.flat is not None
        parts = torch.split(self.flat, [*(p.numel() for p in self.parameters), len(self.parameters)])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=False)], parts[-1]

    @torch.no_grad()
    def send(self, world: int) -> int:
        """Start the sum over ranks; returns its bytes."""
        device = self.parameters[0].device
        self.flat = torch.empty(sum(p.numel() + 1 for p in self.parameters), dtype=self.dtype, device=device)
        parts, counts = self.views()
        held = [(part, p.grad) for part, p in zip(parts, self.parameters, strict=True) if p.grad is not None]
        if held:
            torch._foreach_copy_([part for part, _ in held], [g for _, g in held])
        if len(held) < len(parts):
            counts.copy_(torch.tensor([float(p.grad is not None) for p in self.parameters]))
            for part, p in zip(parts, self.parameters, strict=True):
                if p.grad is None:
                    part.zero_()
        else:
            counts.fill_(1.0)
        self.flat.div_(world)
        self.late, self.work = False, dist.all_reduce(self.flat, async_op=True)
        return self.flat.nbytes

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the sum and make it the gradients. A parameter that no rank has a gradient of gets none."""
        self.work.wait()
        parts, counts = self.views()
        held = [(p.grad, part) for part, p in zip(parts, self.parameters, strict=True) if p.grad is not None]
        if held:
            torch._foreach_copy_([g for g, _ in held], [part for _, part in held])
        if len(held) < len(parts):  # only now is something read from the device
            for p, part, count in zip(self.parameters, parts, counts.tolist(), strict=True):
                if p.grad is None and count > 0:
                    p.grad = part.to(_gradient_dtype(p), copy=True)
        self.flat, self.work = None, None


class MeanOverRanks:
    """Makes each gradient the mean over the ranks of torch's process group. Memory: one bucket-wise copy of the gradients while they are sent."""

    def __init__(self, ranks: Ranks, how: DataParallel) -> None:
        self.ranks, self.how = ranks, how
        self.sent = 0
        self._items: list[nn.Module | list[Tensor]] = []
        self._names: dict[int, str] = {}
        self._hooked: dict[int, ref[Tensor]] = {}
        self._groups: dict[int, int] = {}  # the number of the item that each parameter belongs to
        self._dirty: set[int] = set()  # groups whose gradients are those of this rank
        self._touched: set[int] = set()  # groups that the expected backward pass has reached
        self._buckets: list[_Bucket] = []
        self._place: dict[int, _Bucket] = {}
        self._built: tuple[Any, ...] = ()  # what the buckets were made for
        self._buffers = Buffers(ranks)
        self._expecting, self._next = False, 0
        self._lock = threading.Lock()  # hooks run in the threads of the devices

    def join(self, item: nn.Module | Iterable[Tensor]) -> None:
        """Bring the gradients of a model's parameters, or of these tensors, together from now on."""
        if isinstance(item, nn.Module):
            if not any(item is known for known in self._items):
                self._items.append(item)
            if self.how.broadcast_buffers:
                self._buffers.join(item)
        else:
            self._items.append(list(item))
        self._listen()

    def _parameters(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        self._groups = {}
        for number, item in enumerate(self._items):
            for p in item.parameters() if isinstance(item, nn.Module) else item:
                if p.requires_grad and id(p) not in found and not torch.nn.parameter.is_lazy(p):
                    found[id(p)], self._groups[id(p)] = p, number
        return list(found.values())

    def _listen(self) -> list[Tensor]:
        """All parameters, each with a hook."""
        found = self._parameters()
        for p in found:
            known = self._hooked.get(id(p))
            if known is None or known() is not p:
                p.register_post_accumulate_grad_hook(_Heard(self))  # type: ignore[no-untyped-call]
                self._hooked[id(p)] = ref(p)
        return found

    def _lay_out(self) -> None:
        """Buckets for the parameters as they are now, those that come last in the forward pass first."""
        wanted = None if self.how.reduce_dtype is None else FORMATS[self.how.reduce_dtype]
        found = [(p, wanted or _gradient_dtype(p)) for p in reversed(self._listen())]
        built = tuple((id(p), dtype, p.device) for p, dtype in found)
        if built == self._built:
            return
        first, self._built, self._buckets, sizes = not self._built, built, [], dict[int, float]()
        open_: dict[tuple[int, torch.device, torch.dtype], _Bucket] = {}
        for p, dtype in found:
            if not (dtype.is_floating_point or dtype.is_complex):
                continue
            kind = self._groups[id(p)], p.device, dtype
            bucket = open_.get(kind)
            if bucket is None or sizes[id(bucket)] + p.numel() * dtype.itemsize > self.how.bucket_cap_mb * 2**20:
                bucket = open_[kind] = _Bucket([], dtype, kind[0])
                self._buckets.append(bucket)
            bucket.parameters.append(p)
            sizes[id(bucket)] = sizes.get(id(bucket), 0.0) + p.numel() * dtype.itemsize
        self._place = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        if first:
            self._refuse_unlike([(tuple(p.shape), str(dtype)) for p, dtype in found])

    def _refuse_unlike(self, mine: list[Any]) -> None:
        """Raise ConfigError on all ranks unless all have these parameters, in this order and these formats."""
        everybody = self.ranks.gather_object(mine)
        for rank, theirs in enumerate(everybody):
            for rank_0, other in zip(first := everybody[0], theirs, strict=False):
                if rank_0 != other:
                    raise ConfigError(
                        f"rank 0 has a gradient of shape {rank_0[0]} in {rank_0[1]} where rank {rank} has one of {other[0]} in {other[1]}",
                        "Build the same model, and give the first step data of the same kind, on every rank.",
                    )
            if len(first) != len(theirs):
                raise ConfigError(f"rank 0 trains {len(first)} parameters and rank {rank} {len(theirs)}", "Train the same parameters on every rank.")

    def heard(self, p: Tensor) -> None:
        """A backward pass has added to the gradient of `p`."""
        with self._lock:
            group, bucket = self._groups.get(id(p)), self._place.get(id(p))
            if group is None:
                return
            self._dirty.add(group)
            if not self._expecting or bucket is None:
                return
            self._touched.add(group)
            if bucket.work is not None:
                bucket.late = True
            bucket.waits.discard(id(p))
            while self._next < len(self._buckets) and not self._buckets[self._next].waits:
                self._send(self._buckets[self._next])
                self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        for p in bucket.parameters:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ConfigError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, and ranks exchange dense ones",
                    "Use sparse=False in its embedding.",
                )
        self.sent += bucket.send(self.ranks.world)

    def expect(self) -> None:
        """The backward pass that follows is the last of its step: send gradients as they come."""
        self._lay_out()
        for bucket in self._buckets:
            bucket.waits, bucket.late = {id(p) for p in bucket.parameters}, False
        self._touched.clear()
        self._expecting, self._next = True, 0

    def finish(self, only: Iterable[Tensor] | None = None) -> bool:
        """See `Reducer`. Where asked for, buffers become those of rank 0."""
        expected, self._expecting = self._expecting, False
        if not (expected or self._dirty):
            return False
        asked = self._dirty if only is None else {self._groups.get(id(p), -1) for p in only}
        chosen = set(self._touched) if expected else self._dirty & asked
        if not chosen:
            return False
        if not expected:
            self._lay_out()
            self._next = 0
        mine = [bucket for bucket in self._buckets if bucket.group in chosen]
        try:
            for bucket in mine:
                if bucket.work is None:
                    self._send(bucket)
                elif bucket.late:  # reentrant checkpoints add to a gradient more than once
                    bucket.work.wait()
                    self._send(bucket)
            self._refuse_unused(mine)
            for bucket in mine:
                bucket.receive()
        finally:
            for bucket in self._buckets:
                bucket.flat, bucket.work = None, None
        self._dirty -= chosen
        self.sent += self._buffers.send()
        return True

    def give_up(self) -> None:
        """A backward pass has failed: what it has sent is thrown away."""
        self._expecting = False
        for bucket in self._buckets:
            bucket.flat, bucket.work = None, None

    def _refuse_unused(self, buckets: list[_Bucket]) -> None:
        if self.how.find_unused_parameters is not False:
            return
        named = {id(p): name for item in self._items if isinstance(item, nn.Module) for name, p in item.named_parameters()}
        unused = [named.get(id(p), f"one of shape {tuple(p.shape)}") for b in buckets for p in b.parameters if p.grad is None]
        if unused:
            raise ConfigError(
                f"{len(unused)} parameters have no gradient on rank {self.ranks.rank}, {unused[-1]} among them, and find_unused_parameters is False",
                "Leave ddp_find_unused_parameters out, freeze them, or use them.",
            )


def _gradient_dtype(p: Tensor) -> torch.dtype:
    """The dtype that gradients of a parameter have."""
    return getattr(p, "grad_dtype", None) or p.dtype
