"""Which of the tensors that a graph has saved are 16-bit copies of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from halfstep.diagnostics.ledger import memory_of, tensors
from halfstep.step.graph import nodes
from halfstep.tracing.findings import HALF

CAST = "ToCopyBackward0"
VIEWS = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"))


def casts_in(loss: Tensor) -> Iterator[Tensor]:
    """The 16-bit copies of parameters that the graph of a loss has saved for its backward pass; some of them more than once."""
    for node in nodes(loss):
        weights = [w for w in (_cast_of(following) for following, _ in node.next_functions) if w is not None]
        own = getattr(node, "weight", None)  # of a rounded product of halfstep's, which makes the copy itself
        if isinstance(own, Tensor) and own.is_leaf and own.requires_grad:
            weights.append(own)
        for t in _saved(node) if weights else ():
            if t.dtype in HALF and any(t.numel() == w.numel() and memory_of(t) != memory_of(w) for w in weights):
                yield t


def _cast_of(node: Any) -> Tensor | None:
    """The parameter of which a node gives a 16-bit copy, or a view of one."""
    casts = 0
    while node is not None and (node.name() == CAST or node.name() in VIEWS):
        casts += node.name() == CAST
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    return leaf if casts == 1 and isinstance(leaf, Tensor) else None


def _saved(node: Any) -> Iterator[Tensor]:
    """The tensors that a node has saved and nobody has packed."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            found = getattr(node, name)
            for one in found if isinstance(found, tuple | list) else (found,):
                if getattr(one, "unpack_hook", True) is None:
                    yield from tensors(one.data)
