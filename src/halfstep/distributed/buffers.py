"""Buffers that a forward pass updates, made those of rank 0 on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed.ranks import Ranks


class Buffers:
    """The buffers of models that are saved with them (running statistics); tables that are computed anew (persistent=False) are the same anyhow."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._models: list[nn.Module] = []

    def join(self, model: nn.Module) -> None:
        """Send the buffers of `model` too."""
        if not any(model is known for known in self._models):
            self._models.append(model)

    def _held(self) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
        found: dict[int, Tensor] = {}
        for model in self._models:
            for part in model.modules():
                left_out = part._non_persistent_buffers_set
                found |= {id(b): b for name, b in part._buffers.items() if b is not None and name not in left_out}
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in found.values():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        return kinds

    @torch.no_grad()
    def send(self) -> int:
        """Make all buffers those of rank 0; returns the bytes sent. Written through `.data`: a graph that is still to be differentiated again has
        saved some of them, and in training mode does not use them.
        """
        sent = 0
        for held in self._held().values():
            flat = torch.cat([b.detach().reshape(-1) for b in held])
            dist.broadcast(flat.view(torch.uint8), 0)  # as bytes: not every transport knows every dtype
            sent += flat.nbytes
            if not self._ranks.is_main:
                for buffer, part in zip(held, torch.split(flat, [b.numel() for b in held]), strict=True):
                    buffer.data.copy_(part.view(buffer.shape))
        return sent
