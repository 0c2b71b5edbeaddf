"""Blocks of memory over time: when each came, when it went, what it is. A prediction and a measurement are both told as these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

TEMPORARY = "temporary"  # what nobody has called anything else


@dataclass(eq=False)
class Block:
    """A block of `bytes`, there from `born` up to `died` (None: to the end), in ticks of its timeline. module: the innermost that was running."""

    bytes: int
    born: int
    died: int | None = None
    kind: str = TEMPORARY
    module: str = ""
    follows: Block | None = None  # the one in whose place it came: the same memory in a real run

    def alive(self, at: int) -> bool:
        """Whether it is there at a tick."""
        return self.born <= at and (self.died is None or self.died > at)


@dataclass(frozen=True)
class Peak:
    """The most that was there at once: bytes in all and of each kind, and when."""

    bytes: int
    kinds: dict[str, int]
    at: int


@dataclass
class Timeline:
    """All blocks in the order in which they came."""

    blocks: list[Block] = field(default_factory=list)

    def alive(self, at: int, kind: str | None = None) -> list[Block]:
        """The blocks, of one kind, that are there at a tick."""
        return [b for b in self.blocks if b.alive(at) and kind in (None, b.kind)]

    def of_kind(self, kind: str, at: int) -> int:
        """Bytes of a kind at a tick."""
        return sum(b.bytes for b in self.alive(at, kind))

    def by_module(self, kind: str, at: int) -> dict[str, int]:
        """Bytes of a kind at a tick by module, most first."""
        found: Counter[str] = Counter()
        for b in self.alive(at, kind):
            found[b.module] += b.bytes
        return dict(found.most_common())

    def peak(self, begin: int, end: int) -> Peak:
        """The peak between two ticks, both included."""
        events: dict[int, int] = {begin: 0}
        for b in self.blocks:
            if b.born > end or (b.died is not None and b.died <= begin):
                continue
            start = max(b.born, begin)
            events[start] = events.get(start, 0) + b.bytes
            if b.died is not None and b.died <= end:
                events[b.died] = events.get(b.died, 0) - b.bytes
        total, best, at = 0, -1, begin
        for tick in sorted(events):
            total += events[tick]
            if total > best:
                best, at = total, tick
        kinds: Counter[str] = Counter()
        for b in self.alive(at):
            kinds[b.kind] += b.bytes
        return Peak(best, dict(kinds), at)


def call(blocks: Iterable[Block], kind: str) -> None:
    """Call blocks that have no kind yet by one."""
    for b in blocks:
        if b.kind == TEMPORARY:
            b.kind = kind
