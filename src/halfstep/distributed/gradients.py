"""Gradients as means over ranks: in buckets, sent while the backward pass still runs, in the format that was asked for.

Each rank differentiates its own batch. In the last backward pass of a window a bucket is sent as soon as its gradients are there, in the same
order on every rank; inside a window nothing is sent. Whatever was not sent by then (backward passes that the step engine repeats, those of the
user's own) is sent before gradients are judged, so no step is taken with the gradients of one rank.

Where gradients are used up inside the backward pass (gradient release), a bucket is received when the one after it was sent, and used in the order
of its parameters: an order that all ranks share, whichever gradient came first on each.

Why not torch's DistributedDataParallel: it wraps the module, fixes the dtypes of its buckets when it is made (weights go to 16 bits at the first
batch and back to fp32 when a module is pinned), and reduces no second backward pass through one forward pass, which a replayed step needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from halfstep.distributed.buckets import Bucket, Nobody, Users, gradient_dtype
from halfstep.distributed.buffers import Buffers
from halfstep.distributed.launch import TIMEOUT
from halfstep.distributed.ranks import Ranks
from halfstep.errors import ConfigError, StepOrderError

NOBODY = Nobody()
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET_MB = 25.0
IN_FLIGHT = 1  # buckets on their way while the backward pass goes on, where gradients are used up: the next one is filled meanwhile


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

    def expect(self, users: Users = NOBODY) -> None:
        """The backward pass that follows is the last of its step: send gradients as they come. users: who uses them up inside it."""

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

    def expect(self, users: Users = NOBODY) -> None:
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
        self._buckets: list[Bucket] = []  # in the order in which they are sent
        self._order: list[Bucket] = []  # those that the expected backward pass reaches
        self._flying: list[Bucket] = []  # sent, and not received yet, of those with gradients that are used up
        self._users: Users = NOBODY
        self._place: dict[int, Bucket] = {}
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
        found = [(p, wanted or gradient_dtype(p)) for p in reversed(self._listen())]
        built = tuple((id(p), dtype, p.device) for p, dtype in found)
        if built == self._built:
            return
        first, self._built, self._buckets, sizes = not self._built, built, [], dict[int, float]()
        complete: dict[int, int] = {}  # the place of the last parameter of each bucket
        open_: dict[tuple[int, torch.device, torch.dtype], Bucket] = {}
        for place, (p, dtype) in enumerate(found):
            if not (dtype.is_floating_point or dtype.is_complex):
                continue
            kind = self._groups[id(p)], p.device, dtype
            bucket = open_.get(kind)
            if bucket is None or sizes[id(bucket)] + p.numel() * dtype.itemsize > self.how.bucket_cap_mb * 2**20:
                bucket = open_[kind] = Bucket([], dtype, kind[0])
                self._buckets.append(bucket)
            bucket.parameters.append(p)
            complete[id(bucket)] = place
            sizes[id(bucket)] = sizes.get(id(bucket), 0.0) + p.numel() * dtype.itemsize
        self._buckets.sort(key=lambda b: complete[id(b)])  # a bucket that few parameters fill (fp32 norms among 16-bit weights) waits for nearly all
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
            if bucket.sent:
                bucket.late = True
                if bucket.used:
                    raise StepOrderError(
                        f"a gradient of {self._called([p])[0]} has come after those of its bucket were sent to the other ranks, to be used at once",
                        "Let each backward pass give every parameter one gradient: with activation checkpointing use use_reentrant=False; "
                        "or leave out the gradient release.",
                    )
            bucket.waits.discard(id(p))
            while self._next < len(self._order) and not self._order[self._next].waits:
                self._send(self._order[self._next])
                self._next += 1

    def _send(self, bucket: Bucket) -> None:
        for p in bucket.parameters:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ConfigError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, and ranks exchange dense ones",
                    "Use sparse=False in its embedding.",
                )
        self.sent += bucket.send(self.ranks.world)
        if bucket.used:
            self._flying.append(bucket)
            self._receive(IN_FLIGHT)

    def _receive(self, leave: int) -> None:
        """Receive the buckets whose gradients are used up, all but the last `leave` that were sent."""
        while len(self._flying) > leave:
            self._flying.pop(0).receive(self._users)

    def expect(self, users: Users = NOBODY) -> None:
        """See `Reducer`."""
        self._lay_out()
        self._forget()
        self._users = users
        for bucket in self._buckets:
            bucket.expect(users)
        reached = {bucket.group for bucket in self._buckets if bucket.waits}
        self._order = [bucket for bucket in self._buckets if bucket.group in reached]
        self._refuse_unused(p for b in self._order for p in b.parameters if p.grad is None and not users.reaches(p))
        self._touched.clear()
        self._expecting, self._next = True, 0

    def finish(self, only: Iterable[Tensor] | None = None) -> bool:
        """See `Reducer`. Where asked for, buffers become those of rank 0."""
        expected, self._expecting = self._expecting, False
        if not (expected or self._dirty):
            return False
        asked = self._dirty if only is None else {self._groups.get(id(p), -1) for p in only}
        chosen = self._touched | {b.group for b in self._buckets if b.sent} if expected else self._dirty & asked
        if not chosen:
            return False
        if not expected:
            self._lay_out()
            self._forget()
        mine = [bucket for bucket in self._buckets if bucket.group in chosen]
        try:
            for bucket in mine:
                if not bucket.sent:
                    self._send(bucket)
                elif bucket.late:  # reentrant checkpoints add to a gradient more than once
                    bucket.work.wait()
                    self._send(bucket)
            self._receive(0)
            self._refuse_unused(p for bucket in mine for p in bucket.lacks)
            for bucket in mine:
                if bucket.work is not None:
                    bucket.receive(NOBODY)
        finally:
            self._forget()
        self._dirty -= chosen
        self.sent += self._buffers.send()
        return True

    def give_up(self) -> None:
        """A backward pass has failed: what it has sent is thrown away."""
        self._expecting = False
        self._forget()

    def _forget(self) -> None:
        self._flying.clear()
        self._users = NOBODY
        for bucket in self._buckets:
            bucket.forget()

    def _called(self, chosen: Iterable[Tensor]) -> list[str]:
        named = {id(p): name for item in self._items if isinstance(item, nn.Module) for name, p in item.named_parameters()}
        return [named.get(id(p), f"one of shape {tuple(p.shape)}") for p in chosen]

    def _refuse_unused(self, chosen: Iterable[Tensor]) -> None:
        if self.how.find_unused_parameters is not False:
            return
        unused = self._called(chosen)
        if unused:
            raise ConfigError(
                f"{len(unused)} parameters have no gradient on rank {self.ranks.rank}, {unused[-1]} among them, and find_unused_parameters is False",
                "Leave ddp_find_unused_parameters out, freeze them, or use them.",
            )
