"""Tensors as the bytes of a safetensors file, one tensor at a time: writing them needs no second copy of them all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

NAMES = {  # of dtypes in the safetensors format
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8  # bytes at which the data begins


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the file that `pieces` makes."""
    return len(_head(tensors)) + sum(t.numel() * t.element_size() for t in tensors.values())


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file with `tensors`, of any device, strides and sharing, in pieces to be written one after the other.

    At most one tensor is copied at a time: one that is on another device or not contiguous. The dtypes are those of NAMES.
    """
    yield _head(tensors)
    for name in _order(tensors):
        if tensors[name].numel():
            yield _raw(tensors[name])


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide dtypes first, so that every tensor lies at a multiple of its element's size; then by name, so that equal values give equal files."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _head(tensors: Mapping[str, Tensor]) -> bytes:
    """Eight bytes with the length of a JSON table, and the table: dtype, shape and place of each tensor."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in _order(tensors):
        tensor = tensors[name]
        end = place + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in order of its elements, without a copy where it lies in this machine's memory like that."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.reshape(-1)
    if flat.stride(0) != 1:  # a single element of a strided tensor counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data
