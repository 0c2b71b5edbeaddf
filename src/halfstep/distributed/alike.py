"""Whether all ranks train the same: refused before the first step, naming the rank that differs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed.ranks import Ranks
from halfstep.errors import ConfigError

GOLDEN = 0x9E3779B1


def refuse_unlike(ranks: Ranks, model: nn.Module, policy: str) -> None:
    """Raise ConfigError, on every rank alike, unless all have this policy and a model of the same class, parameters, buffers and values."""
    if ranks.world == 1:
        return
    mine = {"policy": policy, "class": type(model).__name__, "tensors": [(name, *_about(t)) for name, t in _named(model)]}
    everybody = ranks.gather_object(mine)
    for rank, theirs in enumerate(everybody):
        if (difference := _difference(everybody[0], theirs)) is not None:
            zero, other, remedy = difference
            raise ConfigError(f"rank 0 and rank {rank} do not train the same: {zero} on rank 0, {other} on rank {rank}", remedy)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if not torch.nn.parameter.is_lazy(t)]


def _about(t: Tensor) -> tuple[tuple[int, ...], str, bool, int]:
    return tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad, _digest(t)


@torch.no_grad()
def _digest(t: Tensor) -> int:
    """A number that differs when a bit of the tensor does (but for one chance in 2^31 or so): a sum of its bytes, weighted by place."""
    if t.device.type == "meta" or not t.numel():
        return 0
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    kind = next(
        (kind for kind in (torch.int32, torch.int16) if flat.numel() % kind.itemsize == 0 and flat.data_ptr() % kind.itemsize == 0), torch.uint8
    )
    words, total = flat.view(kind), 0
    for start in range(0, words.numel(), 2**22):
        part = words[start : start + 2**22].long()
        places = torch.arange(start, start + part.numel(), device=part.device)
        total = (total + int((part * (places * GOLDEN % 0x7FFFFFFF + 1)).sum())) % 2**63
    return total


def _difference(zero: dict[str, Any], other: dict[str, Any]) -> tuple[str, str, str] | None:
    """What rank 0 has, what the other has, and what to do."""
    if zero["policy"] != other["policy"]:
        return (
            f"precision {zero['policy']}",
            f"precision {other['policy']}",
            "Give every rank the same precision (precision='auto' may choose by the device).",
        )
    build = "Build the same model on every rank."
    if zero["class"] != other["class"]:
        return f"a {zero['class']}", f"a {other['class']}", build
    for ours, theirs in zip(zero["tensors"], other["tensors"], strict=False):
        if ours[:4] != theirs[:4]:
            return f"{ours[0]} {ours[2]} {ours[1]}{_frozen(ours)}", f"{theirs[0]} {theirs[2]} {theirs[1]}{_frozen(theirs)}", build
    if len(zero["tensors"]) != len(other["tensors"]):
        return f"{len(zero['tensors'])} parameters and buffers", f"{len(other['tensors'])}", build
    differ = [ours[0] for ours, theirs in zip(zero["tensors"], other["tensors"], strict=True) if ours[4] != theirs[4]]
    if differ:
        return (
            f"values of {differ[0]}",
            f"others (of {len(differ)} of {len(zero['tensors'])} tensors)",
            "Seed every rank alike before the model is built (halfstep's Trainer does; torch.manual_seed(0) in a script), or load the same weights.",
        )
    return None


def _frozen(tensor: tuple[Any, ...]) -> str:
    return "" if tensor[3] else ", frozen"
