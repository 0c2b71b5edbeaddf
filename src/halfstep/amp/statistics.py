"""Running statistics that follow a batch once, also where activation checkpointing computes the batch norm again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfstep.amp.lean import FP32_MODULES

BEFORE = "halfstep_statistics"  # the attribute of a batch norm that is being computed again: its statistics before that


def count_once(model: nn.Module) -> None:
    """Let the batch norms of `model` leave their running statistics alone in a forward pass that a backward pass computes again.

    torch counts such a batch twice. Memory while a batch norm is computed again: a copy of its statistics. The hooks keep nothing and go through
    deepcopy and pickle; calling this twice does no harm.
    """
    for part in model.modules():
        if isinstance(part, FP32_MODULES) and _remember not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_remember)
            part.register_forward_hook(_put_back, always_call=True)


def _remember(norm: nn.Module, args: Any) -> None:
    if norm.training and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        norm.__dict__[BEFORE] = [(buffer, buffer.detach().clone()) for buffer in norm.buffers(False)]


def _put_back(norm: nn.Module, args: Any, output: Any) -> None:
    for buffer, value in norm.__dict__.pop(BEFORE, ()):
        buffer.data.copy_(value)  # past autograd, which has saved them and does not use them in training mode
