"""Nested Python values to JSON and tensors, and back, bit for bit. Nothing is pickled and nothing is executed on reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.checkpoint.tensors import NAMES
from halfstep.errors import CheckpointError

MARKS = ("$tensor", "$tuple", "$items", "$dtype", "$array")


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON-able data, in which tensors are references, and the tensors by name.

    A tensor's name is its path (`state.0.exp_avg`). A tensor met twice (tied weights) is stored once. Takes dicts, lists,
    tuples, numbers, strings, None, tensors, torch dtypes and numpy arrays; raises CheckpointError naming the path of
    anything else. No tensor is copied: they are those of `value`, wherever they are and however they lie in memory.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def tensor(item: Tensor, path: str) -> dict[str, str]:
        if item.layout is not torch.strided or item.is_meta or item.is_quantized or item.dtype not in NAMES:
            kind = "meta" if item.is_meta else f"{item.layout} {item.dtype}".replace("torch.", "")
            raise _refusal(path, f"tensor without plain storage in the safetensors format ({kind})")
        item = item.detach()
        where = item.untyped_storage().data_ptr()
        same = (where, item.device, item.storage_offset(), tuple(item.shape), item.stride(), item.dtype, item.is_conj(), item.is_neg())
        if where and same in seen:
            return {"$tensor": seen[same]}
        name = path if path not in ("", "__metadata__") and path not in tensors and path.isprintable() else f"tensor-{len(tensors)} {path!a}"
        seen[same] = name
        tensors[name] = item
        return {"$tensor": name}

    def walk(item: Any, path: str) -> Any:
        if item is None or isinstance(item, bool | str):
            return str(item) if isinstance(item, np.str_) else item
        if isinstance(item, np.generic) and not isinstance(item.item(), np.generic):
            return walk(item.item(), path)
        if isinstance(item, int | float) and not isinstance(item, np.generic):
            return item
        if isinstance(item, Tensor):
            return tensor(item, path)
        if isinstance(item, torch.dtype):
            return {"$dtype": str(item).removeprefix("torch.")}
        if (
            isinstance(item, np.ndarray)
            and item.dtype.kind in "biufU"
            and item.dtype.itemsize <= (8 if item.dtype.kind != "U" else item.dtype.itemsize)
        ):
            return {"$array": item.ravel().tolist(), "dtype": item.dtype.str, "shape": list(item.shape)}
        if isinstance(item, tuple):
            return {"$tuple": [walk(v, f"{path}.{i}") for i, v in enumerate(item)]}
        if isinstance(item, list):
            return [walk(v, f"{path}.{i}") for i, v in enumerate(item)]
        if isinstance(item, Mapping):
            plain = all(type(k) is str and k not in MARKS for k in item)
            pairs = [(k, walk(v, f"{path}.{k}" if path else str(k))) for k, v in item.items()]
            return dict(pairs) if plain else {"$items": [[walk(k, path), v] for k, v in pairs]}
        what = f"{type(item).__name__} of {item.dtype}" if isinstance(item, np.ndarray) else type(item).__name__
        raise _refusal(path, what)

    return walk(value, ""), tensors


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given; tensors are on the CPU."""
    if isinstance(data, list):
        return [decode(v, tensors) for v in data]
    if not isinstance(data, dict):
        return data
    if "$tensor" in data:
        return tensors[data["$tensor"]]
    if "$tuple" in data:
        return tuple(decode(v, tensors) for v in data["$tuple"])
    if "$items" in data:
        return {decode(k, tensors): decode(v, tensors) for k, v in data["$items"]}
    if "$dtype" in data:
        return getattr(torch, data["$dtype"])
    if "$array" in data:
        return np.array(data["$array"], dtype=data["dtype"]).reshape(data["shape"])
    return {k: decode(v, tensors) for k, v in data.items()}


def _refusal(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path or 'the value'} is a {what}, which a checkpoint cannot hold without pickling",
        "Keep it out of the state, or turn it into numbers, text, lists, dicts or tensors.",
    )
