"""The tokenizer or processor of a run: it pads batches, and is saved beside the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError, ConfigError


def chosen_processing(processing_class: Any, tokenizer: Any) -> Any:
    """The processing class; `tokenizer` is its old name. Raises ConfigError when both are given."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise ConfigError("tokenizer is the old name of processing_class, and both were given", "Leave tokenizer out.")
    warnings.warn("Trainer(tokenizer=) is now called processing_class; it is read as that", DeprecationWarning, stacklevel=3)
    return tokenizer


def write_processing(processing_class: Any, folder: Path) -> None:
    """Save a processing class in the folder of a model, for `from_pretrained` to find."""
    if not hasattr(processing_class, "save_pretrained"):
        return
    try:
        processing_class.save_pretrained(str(folder))
    except OSError as error:
        what = f"{type(processing_class).__name__} could not be saved in {folder}: {error.strerror}"
        raise CheckpointError(what, "Free some space or name another folder.") from error
