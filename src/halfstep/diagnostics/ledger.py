"""A step that is walked through on fake tensors: every block of memory that it would make and let go of, and nothing computed.

Tensors of numbers that the step depends on stay real: integers and truths (tokens, masks, positions), and single numbers. What is made of nothing but
such is computed, so that a model goes the way that it would go with this batch. Everything else is a shape, and reading one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.amp.rehearsal import written
from halfstep.diagnostics.blocks import TEMPORARY, Block, Timeline
from halfstep.diagnostics.kernels import INSTEAD, kept_inside, workspace

aten = torch.ops.aten
KNOWN = 1 << 20  # elements up to which numbers that are known are computed with
UNWRITTEN = frozenset((aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided))
FEW = 16  # and floating numbers that come from nowhere (zeros, ones, random ones)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or results of an op."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def memory_of(t: Tensor) -> int | None:
    """What tells the memory of a tensor from others while it is there; None for kinds without one memory (sparse)."""
    return int(t.untyped_storage()._cdata) if t.layout == torch.strided else None


def _added_to(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The gradient to which autograd's engine would add another in place, were they no fake tensors: one that nobody else has a hand on."""
    if func is not aten.add.Tensor or kwargs or len(args) != 2 or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return None
    if not all(isinstance(t, Tensor) for t in args) or args[0].shape != args[1].shape or args[0].dtype != args[1].dtype:
        return None
    return next((t for t in args if _alone(t) and t.is_contiguous()), None)


def _alone(t: Tensor) -> bool:
    """Whether only the engine holds a tensor that an op was given: beside the engine's own references there are those of this call."""
    return t._use_count() == 4 and torch._C._storage_Use_Count(t.untyped_storage()._cdata) == 2  # type: ignore[attr-defined]


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The block in which a step is walked through. To be entered inside `fake`.

    timeline: the blocks that ops have made. modules: the path of the module that is running, innermost last. place: the module of the last op.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: torch would import its compiler for it, which takes seconds."""
        return False

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake, self.timeline, self.modules = fake, Timeline(), list[str]()
        self.place = ""
        self._now = 0
        self._of: dict[int, tuple[Any, Block]] = {}  # by memory: what tells of its end, and its block
        self._remembered: list[Block] = []
        self._stale: dict[int, Any] = {}  # memory of real tensors that shapes were written to

    def tick(self) -> int:
        """A moment of its own."""
        self._now += 1
        return self._now

    def block(self, t: Tensor) -> Block | None:
        """The block that a tensor lies in, if an op has made it or `adopt` was told of it."""
        found = self._of.get(memory_of(t) or 0)
        return found[1] if found is not None else None

    def blocks(self, given: Iterable[Tensor]) -> list[Block]:
        """Those of several tensors."""
        return [found for found in map(self.block, given) if found is not None]

    def adopt(self, t: Tensor, kind: str) -> None:
        """Count a tensor that was there before, or call its block by a kind."""
        found = self.block(t) or self._note(t)
        while found is not None:
            found.kind = kind
            found = found.follows

    def forget_kinds(self) -> None:
        """What blocks were called in a step that settles things counts no more."""
        for block in self.timeline.blocks:
            block.kind = TEMPORARY

    def leave_out(self, value: Any) -> None:
        """Do not count the tensors in a value: they are the caller's own."""
        for t in tensors(value):
            block = self.block(t)
            if block is not None:
                block.bytes = 0

    def remember(self, block: Block) -> None:
        """Count what a step engine keeps of a forward pass, up to the next step."""
        self.timeline.blocks.append(block)
        self._remembered.append(block)

    def remembers(self, block: Block) -> bool:
        """Whether it is one of those."""
        return any(b is block for b in self._remembered)

    def forget(self) -> None:
        """A step begins."""
        for block in self._remembered:
            block.died = self.tick()
        self._remembered.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.place = self.modules[-1] if self.modules else ""
        given = list(tensors((args, kwargs)))
        schema = getattr(func, "_schema", None)
        if self._is_known(func, given, args, kwargs):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        else:
            if schema is not None and schema.is_mutable:
                self._spoil(written(func, args, kwargs))
            result = INSTEAD.get(func, func)(*args, **kwargs)
        if schema is not None and schema.is_mutable:
            self._resized(given)
        before, into = {memory_of(t) for t in given}, _added_to(func, args, kwargs)
        for t in tensors(result):
            key = memory_of(t)
            if key is not None and key not in self._of and key not in before and not getattr(func, "is_view", False):
                block = self._note(t)
                if into is not None and block is not None:
                    self._goes_on(into, block)
        self._work_in(workspace(func, args))
        if (inside := kept_inside(func, args, result)) is not None and (block := self.block(inside[0])) is not None:
            block.bytes = inside[1]
        return result

    def _work_in(self, count: int) -> None:
        """What a kernel takes for itself while it runs."""
        if count:
            born = self.tick()
            self.timeline.blocks.append(Block(count, born, self.tick()))

    def _goes_on(self, old: Tensor, new: Block) -> None:
        """What an op has made stands for an addition in place: one block ends as the other begins."""
        before = self.block(old)
        if before is not None and before.died is None:
            before.died, new.follows = new.born, before

    def _is_known(self, func: Any, given: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Whether the numbers of a result are known: those of all that it is made of are, and there are not too many."""
        if getattr(func, "_overloadpacket", None) in UNWRITTEN:
            return False
        if given:
            known = not any(type(t) is FakeTensor or t.is_meta or memory_of(t) in self._stale for t in given)
            return known and sum(t.numel() for t in given) <= KNOWN
        size = args[0] if args and isinstance(args[0], list | tuple) and all(isinstance(n, int) for n in args[0]) else None
        if size is None:
            return func._overloadpacket in (aten.arange, aten.scalar_tensor, aten.randperm)
        count = 1
        for n in size:
            count *= n
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if not isinstance(args[-1], bool | int) or len(args) == 1 else torch.int64)
        return count <= (FEW if dtype.is_floating_point or dtype.is_complex else KNOWN)

    def _spoil(self, targets: list[Tensor]) -> None:
        """Real tensors that a shape is written to: their numbers are no longer known."""
        for t in targets:
            key = memory_of(t)
            if type(t) is not FakeTensor and key is not None and key not in self._stale:
                self._stale[key] = ref(t.untyped_storage(), partial(self._fresh, key))

    def _note(self, t: Tensor) -> Block | None:
        """A block has come."""
        key = memory_of(t)
        if key is None:
            return None
        storage = t.untyped_storage()
        block = Block(storage.nbytes(), self.tick(), module=self.modules[-1] if self.modules else "")
        self.timeline.blocks.append(block)
        self._of[key] = ref(storage, partial(self._end, key)), block
        return block

    def _fresh(self, key: int, _: Any) -> None:
        self._stale.pop(key, None)

    def _end(self, key: int, _: Any = None) -> None:
        _, block = self._of.pop(key)
        if block.died is None:
            block.died = self.tick()

    def _resized(self, given: list[Tensor]) -> None:
        """What an op has written to may have grown: an empty tensor that a result was put into."""
        for t in given:
            key = memory_of(t)
            if key in self._of and self._of[key][1].bytes != t.untyped_storage().nbytes():
                self._end(key)
                self._note(t)
