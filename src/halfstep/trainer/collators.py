"""Batches of samples whose lengths differ: padded by what made the samples, a tokenizer or a feature extractor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data import Collator, default_data_collator, is_label
from halfstep.trainer.items import IGNORED


class PaddingCollator:
    """A collator that pads samples to the longest of their batch.

    The inputs of `processing_class` (its `model_input_names`) are padded by its own `pad`, on its own side. Labels that are sequences are padded with
    -100 on the same side, other columns must have one shape; text is left out, and `label` and `label_ids` become `labels`.
    Raises DataError for other columns of differing lengths, ConfigError for a tokenizer that has no padding token where one is needed.
    """

    def __init__(self, processing_class: Any) -> None:
        self.processing_class = processing_class
        self.names = tuple(getattr(processing_class, "model_input_names", None) or ("input_ids", "attention_mask"))

    def __call__(self, features: list[Any]) -> dict[str, Tensor]:
        """Pad and collate."""
        if not isinstance(features[0], Mapping):
            return default_data_collator(features)
        own = [name for name in self.names if name in features[0]]
        rest = [{k: v for k, v in f.items() if k not in own} for f in features]
        batch: dict[str, Tensor] = dict(self._padded([{k: f[k] for k in own} for f in features])) if own else {}
        left = getattr(self.processing_class, "padding_side", "right") == "left"
        for key in [k for k in rest[0] if is_label(k) and all(_length(r.get(k)) is not None for r in rest)]:
            for row, value in zip(rest, padded_labels([r[key] for r in rest], left), strict=True):
                row[key] = value
        return batch | (default_data_collator(rest) if any(rest) else {})

    def _padded(self, rows: list[dict[str, Any]]) -> Mapping[str, Tensor]:
        tool = self.processing_class
        if getattr(tool, "pad_token", "") is None and len({_length(row[name]) for row in rows for name in row}) > 1:
            raise ConfigError(
                f"the samples of a batch differ in length, and this {type(tool).__name__} has no padding token",
                "Set one (tokenizer.pad_token = tokenizer.eos_token and model.config.pad_token_id), or pass a data_collator of your own.",
            )
        if getattr(tool, "pad_token", "") is None:
            return default_data_collator(rows)
        warned = getattr(tool, "deprecation_warnings", None)  # a fast tokenizer says that pad() after it is slow: the samples are tokenized already
        if isinstance(warned, dict):
            warned["Asking-to-pad-a-fast-tokenizer"] = True
        found: Mapping[str, Tensor] = tool.pad(rows, return_tensors="pt")
        return found


class DecoderInputs:
    """A collator for encoder-decoder models whose loss is not their own: adds what the decoder is given, made of the labels by the model."""

    def __init__(self, collate: Collator, model: nn.Module) -> None:
        self.collate = collate
        self.make: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)

    def __call__(self, features: list[Any]) -> Mapping[str, Any]:
        """Collate, and add `decoder_input_ids` where there are none."""
        batch = dict(self.collate(features))
        if self.make is not None and "labels" in batch and "decoder_input_ids" not in batch:
            batch["decoder_input_ids"] = self.make(labels=batch["labels"])
        return batch


def collator_for(processing_class: Any) -> Collator:
    """The collator for samples that `processing_class` made: one that pads where it can pad sequences, else the default one."""
    return PaddingCollator(processing_class) if hasattr(processing_class, "pad") else default_data_collator


def padded_labels(values: Sequence[Any], left: bool = False) -> list[Tensor]:
    """Sequences of labels, each filled up with -100 to the longest: tensors of one length."""
    made = [torch.as_tensor(np.asarray(v) if not isinstance(v, Tensor) else v) for v in values]
    longest = max(len(t) for t in made)
    if len({t.shape[1:] for t in made}) > 1:
        raise DataError(f"labels of a batch have shapes {', '.join(str(tuple(t.shape)) for t in made[:4])}", "Only their first axis may differ.")
    found = []
    for t in made:
        fill = torch.full((longest - len(t), *t.shape[1:]), IGNORED, dtype=t.dtype)
        found.append(torch.cat((fill, t) if left else (t, fill)))
    return found


def _length(value: Any) -> int | None:
    """The length of a sequence; None for a number and for text."""
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) and not (value and isinstance(value[0], str)) else None
