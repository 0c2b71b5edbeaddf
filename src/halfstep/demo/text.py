"""Text as blocks of bytes: by default the documentation that comes inside Python, so that a first run downloads nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from halfstep.errors import DataError


def python_documentation() -> bytes:
    """The reference texts behind Python's `help()` (pydoc_data.topics, about 460 kB of English; PSF licence)."""
    from pydoc_data.topics import topics  # half a megabyte that only this function needs

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read(path: str | None) -> bytes:
    """The bytes of a text file, or Python's documentation when there is none. Raises DataError when the file cannot be used."""
    if path is None:
        return python_documentation()
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"the text {path} cannot be read: {error.strerror}", "Name a text file, or leave it out to use Python's documentation."
        ) from error
    if not data.strip():
        raise DataError(f"the text {path} is empty", "Name a file with text in it.")
    return data


class Blocks(Dataset[dict[str, Tensor]]):
    """Non-overlapping blocks of `block_size` bytes as {"input_ids", "labels"}, both int64 of shape (block_size,)."""

    def __init__(self, data: bytes, block_size: int) -> None:
        count = len(data) // block_size
        self.blocks = torch.frombuffer(bytearray(data[: count * block_size]), dtype=torch.uint8).view(count, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index].long()
        return {"input_ids": block, "labels": block}


def split(data: bytes, block_size: int, held_out: float = 0.1) -> tuple[Blocks, Blocks]:
    """Training and evaluation blocks: the last `held_out` share of the text, at least one block, is for evaluation.

    Raises DataError when the text is shorter than one block, or than the two blocks it takes to have both.
    """
    if len(data) < 2 * block_size:
        what = "one block" if len(data) < block_size else "two blocks, one to train on and one to evaluate"
        raise DataError(
            f"the text has {len(data)} bytes, fewer than {what} of {block_size}",
            f"Use a longer text, or block_size={max(1, len(data) // 2)} or less.",
        )
    kept = max(block_size, int(len(data) * held_out))
    return Blocks(data[:-kept], block_size), Blocks(data[-kept:], block_size)
