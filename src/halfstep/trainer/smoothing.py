"""A loss with smoothed labels, for a model that would compute its own.

Source: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2016, section 7; in the form of torch's cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.items import IGNORED


class LabelSmoother:
    """A loss function: cross-entropy of a model's logits with `factor` of each label spread evenly over all classes, in fp32.

    logits: [..., classes], floating, `logits` of a mapping or record, or the first of a tuple. labels: [...], integers; -100 leaves a place out.
    shifts: each place predicts the label of the next one, as causal language models do. The mean over the places that count; with
    `num_items_in_batch` their sum divided by that. NaN when every label is left out, as torch.
    """

    def __init__(self, factor: float, shifts: bool = False) -> None:
        self.factor, self.shifts = factor, shifts

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """The loss, an fp32 scalar. Raises DataError for labels that are no classes, ConfigError for outputs without logits."""
        logits = _logits(outputs)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            found = (
                f"{labels.dtype} labels of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else f"labels of type {type(labels).__name__}"
            )
            raise DataError(
                f"label_smoothing_factor={self.factor} spreads classes, and the batch has {found} for logits of shape {tuple(logits.shape)}",
                "Leave it out for regression and for models with other labels.",
            )
        if self.shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        with torch.autocast(logits.device.type, enabled=False):
            flat, places = logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
            how = "mean" if num_items_in_batch is None else "sum"
            loss = F.cross_entropy(flat, places, ignore_index=IGNORED, label_smoothing=self.factor, reduction=how)
            return loss if num_items_in_batch is None else torch.div(loss, num_items_in_batch)


def smoother_for(model: nn.Module, factor: float, label_names: tuple[str, ...]) -> LabelSmoother:
    """The loss with smoothed labels for `model`. Raises ConfigError for one whose labels are not a single column of classes."""
    if label_names != ("labels",):
        raise ConfigError(
            f"label_smoothing_factor={factor} acts on the column 'labels', and those of this {type(model).__name__} are {', '.join(label_names)}",
            "Leave it out, or pass a compute_loss_func.",
        )
    return LabelSmoother(factor, is_causal(model))


def is_causal(model: nn.Module) -> bool:
    """Whether this is a causal language model of transformers: its labels are its inputs, and its loss shifts them by one place."""
    if not hasattr(model, "main_input_name") or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return any(kind.__name__ in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) for kind in type(model).__mro__)


def _logits(outputs: Any) -> Tensor:
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    found = outputs if found is None and isinstance(outputs, Tensor) else found
    if not isinstance(found, Tensor) or found.dim() < 2:
        raise ConfigError(
            f"label_smoothing_factor needs the model's logits, and it returned a {type(outputs).__name__} without",
            "Let it return a mapping with 'logits' when it is given no labels.",
        )
    return found
