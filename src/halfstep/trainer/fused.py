"""The fused kernels of the package liger-kernel, put into a transformers model."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from halfstep.errors import ConfigError, MissingExtraError


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
