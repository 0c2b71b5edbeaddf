"""The processes of a run and what they tell each other: one interface, for one process alone and for a torch.distributed group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import ConfigError, DataError

Reduction = Literal["sum", "mean"]
MEETING = 300.0  # seconds that ranks may be apart where all of them write one checkpoint


class Ranks(Protocol):
    """What a run needs of the processes it runs in. Trees are tensors in lists, tuples and mappings; all ranks call each method in the same order.

    rank: the number of this process, from 0; local_rank: on its machine; world: how many there are.
    """

    rank: int
    local_rank: int
    world: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes logs and files."""

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""

    def gather(self, tree: Any) -> Any:
        """The tensors of all ranks, joined along the first dimension in the order of ranks (a scalar counts as one row). The same on every rank.

        Raises DataError when shapes differ: `pad_across` makes them equal.
        """

    def reduce(self, tree: Any, how: Reduction = "sum") -> Any:
        """Sum or mean over ranks of each tensor, of its shape and dtype; new tensors. Whole numbers have no mean: DataError."""

    def broadcast(self, tree: Any, source: int = 0) -> Any:
        """The tensors of rank `source`; new tensors of the same shapes and dtypes as this rank's."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def meet(self, where: str) -> None:
        """Wait until every rank is at `where`, a method that all must call. After MEETING seconds a ConfigError names who is not."""

    def agree(self, tensor: Tensor) -> Tensor:
        """The maximum over ranks, element by element, written into `tensor` and returned."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank."""

    def gather_object(self, value: Any) -> list[Any]:
        """`value` of each rank, in the order of ranks. Any object that can be pickled."""

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """`value` of rank `source`."""

    def split(self, inputs: Any, padded: bool = False) -> Any:
        """This rank's part of a list, tuple, tensor, or mapping of such: the first ranks get one more where it does not come out even.

        padded: repeat the last element, so that every rank has as many.
        """

    def pad_across(self, tree: Any, dim: int = 0, value: float = 0, first: bool = False) -> Any:
        """Each tensor padded with `value` along `dim` to the largest size over ranks, behind (or, with `first`, before) what is there."""


class Solo:
    """One process: it agrees with itself and has everything."""

    rank, local_rank, world = 0, 0, 1
    is_main = is_local_main = True

    def gather(self, tree: Any) -> Any:
        """The tree as it is, scalars as vectors of one."""
        return over(tree, lambda t: t.reshape(1) if t.dim() == 0 else t)

    def reduce(self, tree: Any, how: Reduction = "sum") -> Any:
        """The tree as it is."""
        return tree

    def broadcast(self, tree: Any, source: int = 0) -> Any:
        """The tree as it is."""
        return tree

    def barrier(self) -> None:
        """Return at once."""

    def meet(self, where: str) -> None:
        """Return at once."""

    def agree(self, tensor: Tensor) -> Tensor:
        """The tensor as it is."""
        return tensor

    def any(self, flag: bool) -> bool:
        """The flag."""
        return flag

    def gather_object(self, value: Any) -> list[Any]:
        """A list of one."""
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value as it is."""
        return value

    def split(self, inputs: Any, padded: bool = False) -> Any:
        """All of it."""
        return inputs

    def pad_across(self, tree: Any, dim: int = 0, value: float = 0, first: bool = False) -> Any:
        """The tree as it is."""
        return tree


class Group:
    """The processes of torch's default process group."""

    def __init__(self, local_rank: int = 0) -> None:
        self.rank, self.world, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    def gather(self, tree: Any) -> Any:
        """See `Ranks`."""
        tensors: list[Tensor] = []
        over(tree, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
        shapes = self.gather_object([(tuple(t.shape), str(t.dtype)) for t in tensors])
        for other, theirs in enumerate(shapes):
            if theirs != shapes[0]:
                raise DataError(
                    f"gather() was given tensors of {shapes[0]} on rank 0 and of {theirs} on rank {other}",
                    "Call pad_across_processes() first, or gather_for_metrics(), which knows the padding of prepared loaders.",
                )

        def joined(t: Tensor) -> Tensor:
            mine = (t.reshape(1) if t.dim() == 0 else t).contiguous()
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, mine)
            return torch.cat(parts)

        return over(tree, joined)

    def reduce(self, tree: Any, how: Reduction = "sum") -> Any:
        """See `Ranks`."""
        if how not in ("sum", "mean"):
            raise ConfigError(f"reduction {how!r} is not known", "Use 'sum' or 'mean'.")

        def reduced(t: Tensor) -> Tensor:
            if how == "mean" and not (t.is_floating_point() or t.is_complex()):
                raise DataError(f"a {t.dtype} tensor has no mean of its own dtype", "Use 'sum', or make it floating.")
            mine = t.detach().clone().contiguous()
            dist.all_reduce(mine)
            return mine / self.world if how == "mean" else mine

        return over(tree, reduced)

    def broadcast(self, tree: Any, source: int = 0) -> Any:
        """See `Ranks`."""

        def sent(t: Tensor) -> Tensor:
            mine = t.detach().clone().contiguous()
            dist.broadcast(mine, source)
            return mine

        return over(tree, sent)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()

    def meet(self, where: str) -> None:
        """See `Ranks`. Only gloo tells who is missing; without it, as any barrier."""
        if "gloo" not in str(dist.get_backend_config()):
            dist.barrier()
            return
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=MEETING), wait_all_ranks=True)
        except RuntimeError as error:
            raise ConfigError(
                f"rank {self.rank} called {where}, and not every rank did within {MEETING:.0f} seconds: {str(error).splitlines()[0]}",
                f"Call {where} on every rank, and not under is_main_process: it exchanges what each of them has, and writes on rank 0 alone.",
            ) from error

    def agree(self, tensor: Tensor) -> Tensor:
        """See `Ranks`."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def any(self, flag: bool) -> bool:
        """See `Ranks`."""
        return any(self.gather_object(bool(flag)))

    def gather_object(self, value: Any) -> list[Any]:
        """See `Ranks`."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """See `Ranks`."""
        box = [value]
        dist.broadcast_object_list(box, source)
        return box[0]

    def split(self, inputs: Any, padded: bool = False) -> Any:
        """See `Ranks`."""
        if isinstance(inputs, Mapping):
            sizes = {key: len(value) for key, value in inputs.items()}
            if len(set(sizes.values())) > 1:
                raise DataError(f"the values to split have different lengths: {sizes}", "Give every key as many elements.")
            return type(inputs)({key: self.split(value, padded) for key, value in inputs.items()})  # type: ignore[call-arg]
        each, more = divmod(len(inputs), self.world)
        begin = self.rank * each + min(self.rank, more)
        part = inputs[begin : begin + each + (self.rank < more)]
        lacks = (each + (more > 0)) - len(part) if padded and len(inputs) else 0
        if not lacks:
            return part
        last = inputs[-1:]
        return torch.cat([part, *[last] * lacks]) if isinstance(inputs, Tensor) else part + last * lacks

    def pad_across(self, tree: Any, dim: int = 0, value: float = 0, first: bool = False) -> Any:
        """See `Ranks`."""

        def padded(t: Tensor) -> Tensor:
            if dim >= t.dim():
                return t
            size = max(self.gather_object(t.shape[dim]))
            if size == t.shape[dim]:
                return t
            shape = list(t.shape)
            shape[dim] = size - t.shape[dim]
            parts = [t, torch.full(shape, value, dtype=t.dtype, device=t.device)]
            return torch.cat(parts[::-1] if first else parts, dim)

        return over(tree, padded)


def over(tree: Any, do: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with `do` applied to each tensor in it; containers keep their type, everything else stays."""
    if isinstance(tree, Tensor):
        return do(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(over(v, do) for v in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(over(v, do) for v in tree)
    if isinstance(tree, Mapping):
        return type(tree)({k: over(v, do) for k, v in tree.items()})  # type: ignore[call-arg]
    return tree
