"""What is known of each optimizer, as long as it lives."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class ByOwner(Generic[T]):
    """A value for each optimizer, by identity; it goes with the optimizer.

    What a `WeakKeyDictionary` does. That one guards every iteration against what dies meanwhile by some ten calls in Python, and a step asks a dozen
    times; here what there is now is handed out as a list.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ref[Any], T]] = {}

    def get(self, owner: Any) -> T | None:
        """The value for an owner, or None."""
        known = self._kept.get(id(owner))
        return known[1] if known is not None and known[0]() is owner else None  # an id is given out again when its owner has died

    def put(self, owner: Any, value: T) -> T:
        """Keep a value for an owner."""
        number = id(owner)
        self._kept[number] = ref(owner, partial(_drop, self._kept, number)), value
        return value

    def drop(self, owner: Any) -> None:
        """Forget an owner; nothing for one that is not known."""
        self._kept.pop(id(owner), None)

    def owners(self) -> list[Any]:
        """Those that live, in the order in which they were met."""
        return [owner for known, _ in list(self._kept.values()) if (owner := known()) is not None]

    def values(self) -> list[T]:
        """Their values."""
        return [value for _, value in list(self._kept.values())]

    def items(self) -> list[tuple[Any, T]]:
        """Both."""
        return [(owner, value) for known, value in list(self._kept.values()) if (owner := known()) is not None]


def _drop(kept: dict[int, tuple[ref[Any], T]], number: int, dead: ref[Any]) -> None:
    known = kept.get(number)
    if known is not None and known[0] is dead:
        del kept[number]
