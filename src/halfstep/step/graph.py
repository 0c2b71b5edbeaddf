"""What an autograd graph tells: the leaf parameters a loss reaches, and the running statistics its forward pass has moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


@dataclass(frozen=True)
class Reached:
    """leaves: tensors that a backward pass will give gradients to. statistics: buffers that batch norms of the forward pass have updated.

    hidden: there are batch norms behind activation checkpointing, which compute again, and move, statistics that the graph does not show.
    foreign: names of custom autograd Functions, of neither torch nor halfstep, that do not say `repeatable = True`. Their backward
    pass may free or overwrite what it saved (fused losses scale their saved gradient in place), so it must not be run twice.
    partial: a backward pass may give gradients to more leaves than these: a Function may run one of its own (reentrant checkpoints do).
    """

    leaves: tuple[Tensor, ...]
    statistics: tuple[Tensor, ...]
    foreign: tuple[str, ...] = ()
    hidden: bool = False
    partial: bool = False


NOT_LOOKED_AT = Reached((), ())


def nodes(loss: Tensor) -> list[Any]:
    """Every node of the graph of `loss`, once."""
    waiting: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    found, seen = [], set(waiting)
    while waiting:
        node = waiting.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


_PLAIN: set[type[Any]] = set()  # kinds of nodes that have nothing to tell: autograd's own have the attributes of their kind, and no others


def walk(loss: Tensor) -> Reached:
    """Walk the graph of `loss` once, without running anything. About a microsecond a node."""
    leaves: list[Tensor] = [loss] if loss.grad_fn is None and loss.requires_grad else []
    statistics: list[Tensor] = []
    foreign: list[str] = []
    hidden = partial = False
    for node in nodes(loss):
        if type(node) in _PLAIN:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        elif not isinstance(node, BackwardCFunction) and not hasattr(type(node), "_raw_saved_running_mean"):
            _PLAIN.add(type(node))
            continue
        if isinstance(node, BackwardCFunction):
            kind = type(node)._forward_cls  # type: ignore[attr-defined]  # the Function that was applied
            if not _may_run_twice(kind):
                foreign.append(kind.__name__)
            partial = partial or kind.__module__ == "torch.utils.checkpoint" or not _is_ours(kind)
        if _has_statistics(node) and _training(node):
            statistics += [t for t in (node._saved_running_mean, node._saved_running_var) if t is not None]
        hidden = hidden or (getattr(node, "_raw_saved_running_mean", None) is not None and not _has_statistics(node))
    return Reached(tuple(leaves), tuple(statistics), tuple(foreign), hidden, partial)


def _may_run_twice(kind: type[Any]) -> bool:
    return getattr(kind, "repeatable", False) or _is_ours(kind)


def _is_ours(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "halfstep")


def _has_statistics(node: Any) -> bool:
    """Whether a batch norm holds its running statistics themselves. Behind hooks (activation checkpointing) reading them would compute them again."""
    saved = getattr(node, "_raw_saved_running_mean", None)
    return saved is not None and getattr(saved, "unpack_hook", True) is None


def _training(node: Any) -> bool:
    """Whether a batch norm used the batch's statistics, and so moved its running ones (cuDNN's and MIOpen's nodes do not say: assume it)."""
    return bool(getattr(node, "_saved_training", True))
