"""Other code for parts of a transformers model: the fused kernels of liger-kernel, and the loss without all logits. They stay in the model."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch
from torch import nn

from halfstep.amp import ChunkedLoss, chunk_loss
from halfstep.errors import ConfigError, MissingExtraError

logger = logging.getLogger("halfstep")


def use_fused_kernels(model: nn.Module, device: torch.device) -> None:
    """Let a transformers model run by liger-kernel's fused kernels; they stay in it. Call it before the model is bound to a policy.

    Raises ConfigError on a CPU, for which the package has none, and for a model that it does not know; MissingExtraError without the package.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"use_liger_kernel=True needs a GPU, and the run is on {device.type}: the kernels are written in Triton",
            "Leave it out; chunked_loss='auto' saves the memory of the logits on every device.",
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise MissingExtraError("use_liger_kernel=True needs the package liger-kernel, which is not installed", "pip install 'liger-kernel>=0.5'")
    from liger_kernel.transformers import monkey_patch

    known: dict[str, Any] = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in known:
        raise ConfigError(
            f"use_liger_kernel=True has no effect: liger-kernel has no kernels for {kind or type(model).__name__}",
            f"Leave it out, or use one of {', '.join(sorted(known))}.",
        )
    monkey_patch._apply_liger_kernel_to_instance(model=model)


def use_chunked_loss(model: nn.Module, wanted: Literal["off", "auto", "on"], own_loss: str = "") -> None:
    """Let a causal language model compute its loss in training without all logits in memory. Call it before the model is bound to a policy.

    wanted: "on" raises ConfigError for a model that cannot; "auto" leaves such a model as it is, and says why. own_loss: the setting that asks for
    another loss than the model's. A model that has it from an earlier trainer keeps it.
    """
    if wanted == "off" or "halfstep_chunked_loss" in model.__dict__:
        return
    try:
        handle = _chunked(model, wanted, own_loss)
    except ConfigError as error:
        if wanted == "on":
            raise
        logger.info("chunked_loss=auto: the model's own loss is used, because %s", error.cause)
    else:
        logger.info("the loss is computed without all logits in memory; %s is applied in pieces", handle.head)


def _chunked(model: nn.Module, wanted: str, own_loss: str) -> ChunkedLoss:
    if own_loss:
        raise ConfigError(f"chunked_loss={wanted!r} replaces the model's own loss, and {own_loss} asks for another", "Leave one of them out.")
    return chunk_loss(model)
