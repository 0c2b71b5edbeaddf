"""Noise on the embeddings of a model in training. Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, arXiv:2310.05914."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError


def add_noise(model: nn.Module, alpha: float) -> Any:
    """Add uniform noise to the input embeddings of `model` while it trains; returns a handle whose `remove()` ends that.

    To embeddings [batch, length, width] numbers between -m and m are added, m = alpha / sqrt(length * width). Drawn from torch's random state:
    a run that goes on from a checkpoint, or takes a step again, draws the same. 16-bit embeddings are added to in fp32 and rounded once.
    Raises ConfigError for a model whose input embeddings are not known.
    """
    return input_embeddings(model).register_forward_hook(_Noise(alpha))


class _Noise:
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, part: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not part.training or output.dim() < 2:
            return None
        most = self.alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        wide = output.float()
        return (wide + torch.zeros_like(wide).uniform_(-most, most)).to(output.dtype)


def input_embeddings(model: nn.Module) -> nn.Module:
    """The module that gives the embeddings of a model's tokens: what `get_input_embeddings()` says, else its only nn.Embedding.

    Raises ConfigError when there is none or more than one.
    """
    said = getattr(model, "get_input_embeddings", None)
    try:
        found = said() if said is not None else None
    except NotImplementedError:
        found = None
    if isinstance(found, nn.Module):
        return found
    tables = {name: part for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    if len(tables) == 1:
        return next(iter(tables.values()))
    have = f"several nn.Embedding ({', '.join(tables)})" if tables else "no nn.Embedding"
    raise ConfigError(
        f"neftune_noise_alpha adds noise to the embeddings of tokens, and this {type(model).__name__} has {have}",
        "Give the model a method get_input_embeddings() that returns the one." if tables else "Leave it out.",
    )
