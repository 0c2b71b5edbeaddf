"""What a detector keeps during a run: notes on tensors, by the memory they stand in, and what it has found."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from halfstep.tracing.findings import Finding
from halfstep.tracing.observe import Event

T = TypeVar("T")


def memory(t: Tensor) -> int:
    """The address of the memory that a tensor and all its views stand in; 0 when it has none (meta, sparse, wrapped, empty)."""
    if t.layout != torch.strided or t.is_meta:
        return 0
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:  # a stand-in of torch.func or torch.compile
        return 0


class Tags(Generic[T]):
    """Notes on tensors that hold for their views too. Nothing is kept alive: a note goes when an op gets that memory anew, or writes to it."""

    def __init__(self) -> None:
        self._known: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, t: Tensor) -> T | None:
        """What is noted of a tensor, or None."""
        return self._known.get(memory(t)) if self._known else None

    def put(self, t: Tensor, note: T) -> None:
        """Note something of a tensor and its views."""
        if place := memory(t):
            self._known[place] = note

    def follow(self, event: Event) -> None:
        """Drop the notes on memory that an op has just written or been given. To be called for each op, before new notes are made."""
        if not self._known:
            return
        for t in event.outputs:
            place = memory(t)
            if place in self._known and (event.mutable or all(memory(i) != place for i in event.inputs)):
                del self._known[place]


class Collected:
    """Findings, the first of each kind: a loop over layers gives one, which says how many modules have it."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Finding] = {}
        self._modules: dict[Hashable, set[str]] = {}

    def add(self, finding: Finding, *key: Hashable) -> None:
        """Take a finding, unless there is one of the same fault and `key`; key: what makes two findings one, by default the line they are on."""
        kind = (finding.fault, *(key or (finding.place.source or finding.place.module,)))
        self._first.setdefault(kind, finding)
        self._modules.setdefault(kind, set()).add(finding.place.module)

    def modules(self) -> list[tuple[Finding, tuple[str, ...]]]:
        """Those taken, each with all modules that have it."""
        return [(finding, tuple(sorted(self._modules[kind]))) for kind, finding in self._first.items()]

    def findings(self) -> list[Finding]:
        """Those taken, in their order."""
        found = []
        for kind, finding in self._first.items():
            others = len(self._modules[kind]) - 1
            more = f" (and in {others} other module{'s' if others > 1 else ''})" if others else ""
            found.append(replace(finding, what=finding.what + more))
        return found
