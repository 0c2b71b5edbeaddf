"""What the processes of a run do together: gathering, waiting, printing once. With one process there is nobody to wait for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn

from halfstep.accelerator.configuration import DistributedType
from halfstep.accelerator.core import Core
from halfstep.distributed import Ranks, over
from halfstep.errors import ConfigError, DataError, suggest

P = ParamSpec("P")
R = TypeVar("R")
REDUCTIONS = ("sum", "mean", "max", "none")


@dataclass(frozen=True)
class State:
    """Where this process stands among those of its run."""

    device: torch.device
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    is_main_process: bool
    is_local_main_process: bool
    is_last_process: bool
    mixed_precision: str


class Together(Core):
    """What an accelerator does over its processes."""

    @property
    def num_processes(self) -> int:
        """How many processes train together."""
        return self.ranks.world

    @property
    def process_index(self) -> int:
        """The number of this process, from 0."""
        return self.ranks.rank

    @property
    def local_process_index(self) -> int:
        """The number of this process on its machine."""
        return self.ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self.ranks.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its machine."""
        return self.ranks.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest number."""
        return self.ranks.rank == self.ranks.world - 1

    @property
    def distributed_type(self) -> DistributedType:
        """One process, several on CPUs, or several with a GPU each."""
        if self.ranks.world == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.ranks.world > 1

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16"."""
        return self.policy.autocast if self.policy.is_mixed else "no"

    @property
    def state(self) -> State:
        """Where this process stands."""
        own = (self.device, self.distributed_type, self.num_processes, self.process_index, self.local_process_index)
        return State(*own, self.is_main_process, self.is_local_main_process, self.is_last_process, self.mixed_precision)

    def gather(self, tensor: Any) -> Any:
        """The tensors of all processes, joined along the first dimension in the order of processes; a scalar counts as one row.

        tensor: a tensor, or lists, tuples and mappings of tensors. Every process gets the result, and every process must call this.
        Raises DataError for other objects, and for shapes that differ between processes.
        """
        _refuse_others("gather", tensor, "For other objects use gather_for_metrics(values, use_gather_object=True).")
        return self.ranks.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather`, without the samples that fill up the last batch of a prepared loader. The loader must be the one whose batch is at hand.

        What is not made of tensors is sent pickled: lists are joined, of anything else there is a list, one per process. use_gather_object: send
        tensors so too, which may then differ in shape. With one process `input_data` comes back as it is, scalars as vectors of one.
        """
        objects = use_gather_object or not _only_tensors(input_data)
        if objects:
            everyone = self.ranks.gather_object(input_data) if self.ranks.world > 1 else [input_data]
            joined = [one for each in everyone for one in each] if all(isinstance(each, list | tuple) for each in everyone) else everyone
            data = joined if self.ranks.world > 1 else input_data
        else:
            data = self.ranks.gather(input_data)
        ending = [loader for loader in self._loaders if loader.at_end and loader.remainder]
        if not ending:
            return data
        real = ending[-1].remainder
        return data[:real] if objects else over(data, lambda t: t[:real])

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """ "sum", "mean" or "max" over processes, element by element, times `scale`; "none" leaves the values of this process. New tensors.

        tensor: a tensor, or lists, tuples and mappings of tensors. Raises DataError for other objects, and for the mean of whole numbers.
        """
        if reduction not in REDUCTIONS:
            raise ConfigError(f"reduction={reduction!r} is not known", suggest(str(reduction), REDUCTIONS))
        _refuse_others("reduce", tensor, "Make a tensor of it: torch.tensor(value, device=accelerator.device).")
        if reduction == "max":
            found = over(tensor, lambda t: self.ranks.agree(t.detach().clone()))
        elif reduction == "none":
            found = tensor
        else:
            found = self.ranks.reduce(tensor, "sum" if reduction == "sum" else "mean")
        return found if scale == 1.0 else over(found, lambda t: t * scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded with `pad_index` along `dim` to the largest size over processes, behind (pad_first: before) what is there."""
        _refuse_others("pad_across_processes", tensor, "Give it tensors.")
        return self.ranks.pad_across(tensor, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, tuple, tensor or mapping of such; the first processes get one more where it does not come out even.

        apply_padding: the last element is repeated, so that every process has as many.
        """
        if not isinstance(inputs, list | tuple | Tensor | Mapping):
            raise DataError(
                f"split_between_processes() was given a {type(inputs).__name__}", "Give it a list, a tuple, a tensor or a mapping of such."
            )
        yield self.ranks.split(inputs, apply_padding)

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.ranks.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees in every process."""
        self._flag = True

    def check_trigger(self) -> bool:
        """Whether a process has called `set_trigger`; lowers the flag. Every process must call this."""
        raised, self._flag = self.ranks.any(self._flag), False
        return raised

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block in which backward passes of `model` leave gradients in this process: they are summed up with those of a later pass outside it."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"no_sync() was given a {type(model).__name__}", "Give it the prepared model.")
        return self._apart()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Let `function` run in process 0 only; elsewhere it returns None."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Let `function` run in the first process of each machine only."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Let `function` run in the last process only."""
        return self._only(lambda: self.is_last_process, function)

    @overload
    def on_process(self, function: Callable[P, R], process_index: int) -> Callable[P, R | None]: ...
    @overload
    def on_process(self, function: None = None, *, process_index: int) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Let a function run in process `process_index` only: `@accelerator.on_process(process_index=1)`."""
        if process_index is None:
            raise ConfigError("on_process() was not told which process", "Write @accelerator.on_process(process_index=N).")
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(lambda: self.process_index == process_index, function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Let a function run in process `local_process_index` of each machine only."""
        if local_process_index is None:
            raise ConfigError("on_local_process() was not told which process", "Write @accelerator.on_local_process(local_process_index=N).")
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(lambda: self.local_process_index == local_process_index, function)

    @staticmethod
    def _only(here: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
        if not callable(function):
            raise ConfigError(f"a {type(function).__name__} was given where a function runs in one process only", "Use it as a decorator.")

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if here() else None

        return called

    def main_process_first(self) -> AbstractContextManager[None]:
        """A block that process 0 runs before the others: to download or preprocess once and read it from the cache elsewhere."""
        return _first(self.is_main_process, self.ranks)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A block that the first process of each machine runs before the others."""
        return _first(self.is_local_main_process, self.ranks)


@contextmanager
def _first(is_first: bool, ranks: Ranks) -> Iterator[None]:
    if not is_first:
        ranks.barrier()
    try:
        yield
    finally:
        if is_first:
            ranks.barrier()  # also after an error, or the others would wait for ever


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree


def _only_tensors(tree: Any) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in _leaves(tree))


def _refuse_others(who: str, tree: Any, remedy: str) -> None:
    for leaf in _leaves(tree):
        if not isinstance(leaf, Tensor):
            raise DataError(f"{who}() was given a {type(leaf).__name__}, and processes exchange tensors", remedy)
