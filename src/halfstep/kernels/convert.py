"""Weights and states to fp32 and back, one tensor at a time: what an optimizer that has no kernel of its own needs.

The loops are those of `halfstep.kernels.loops`, so the bits are those of `halfstep.numerics`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels import loops, pool
from halfstep.kernels.codes import BLOCK, FORMATS, SPLIT24, STOCHASTIC, STORAGES
from halfstep.kernels.compile import compiled, floats, halves, naturals, signed_bytes, unsigned_bytes
from halfstep.numerics.standins import is_shape

FIRST, SECOND = 0, 1


def _unpack_weight(storage, form, weight, residual, out, begin, end):
    for start in range(begin, end, loops.STRETCH):
        n = min(loops.STRETCH, end - start)
        high, low, low8 = halves(weight, start, n), halves(residual, start, n), signed_bytes(residual, start, n)
        loops._read_weight(storage, form, high, low, low8, floats(out, start, n))


def _pack_weight(storage, form, weight, residual, source, key1, key2, space, begin, end):
    buffers = loops._first_line(space)
    for start in range(begin, end, loops.STRETCH):
        n = min(loops.STRETCH, end - start)
        bits = naturals(buffers, loops.BITS, n)
        if storage in (SPLIT24, STOCHASTIC):
            loops._draw(key1, key2, start, bits, naturals(buffers, loops.MIXED, n))
        high, low, low8 = halves(weight, start, n), halves(residual, start, n), signed_bytes(residual, start, n)
        loops._write_weight(floats(source, start, n), bits, storage, form, high, low, low8)


def _unpack_state(role, codes, scales, out, begin, end):
    for start in range(begin, end, loops.STRETCH):
        n = min(loops.STRETCH, end - start)
        if scales == 0:
            loops._read_bf16(halves(codes, start, n), loops.f32(1), floats(out, start, n))
        elif role == FIRST:
            loops._read_first(signed_bytes(codes, start, n), loops._blocks(scales, start, n), floats(out, start, n))
        else:
            loops._read_second(unsigned_bytes(codes, start, n), loops._blocks(scales, start, n), floats(out, start, n))


def _pack_state(role, codes, scales, source, key1, key2, space, begin, end):
    buffers = loops._first_line(space)
    for start in range(begin, end, loops.STRETCH):
        n = min(loops.STRETCH, end - start)
        x, m8, v8, places = floats(source, start, n), signed_bytes(codes, start, n), unsigned_bytes(codes, start, n), loops._blocks(scales, start, n)
        if scales == 0:
            mixed = naturals(buffers, loops.MIXED, n)
            loops._draw(key1, key2, start, naturals(buffers, loops.BITS, n), mixed)
            if role == FIRST:
                loops._write_bf16_first(x, mixed, halves(codes, start, n))
            else:
                loops._write_bf16_second(x, mixed, halves(codes, start, n))
        elif role == FIRST:
            m = floats(buffers, loops.M, n)
            for i in range(n):
                m[i] = x[i]
            loops._write_first_int8(m8, places, key1, key2, start, n, buffers)
        else:
            m, v, root = floats(buffers, loops.M, n), floats(buffers, loops.V, n), floats(buffers, loops.ROOT, n)
            for i in range(n):
                m[i] = v[i] = x[i]
                root[i] = np.sqrt(x[i])
            loops._write_int8(False, True, m8, places, v8, places, key1, key2, start, n, buffers)


unpack_weight = compiled(_unpack_weight, *loops.PARTS)
pack_weight = compiled(_pack_weight, *loops.PARTS)
unpack_state = compiled(_unpack_state, *loops.PARTS)
pack_state = compiled(_pack_state, *loops.PARTS)


def takes(*tensors: Tensor | None) -> bool:
    """Whether these lie on the CPU in the usual order in memory, as everything here must."""
    return all(t is None or (t.device.type == "cpu" and t.layout == torch.strided and t.is_contiguous()) for t in tensors)


def read_weight(weight: Tensor, storage: str, residual: Tensor | None) -> Tensor:
    """The fp32 master of a 16-bit weight: a new tensor, as `Storage.read` gives it."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    if is_shape(weight):
        return out
    about = (STORAGES[storage], FORMATS[weight.dtype], weight.data_ptr(), _at(residual), out.data_ptr())
    pool.share_range(weight.numel(), pool.CHUNK, lambda begin, end: unpack_weight(*about, begin, end))
    return out


def write_weight(values: Tensor, weight: Tensor, storage: str, residual: Tensor | None, keys: tuple[int, int]) -> None:
    """Put fp32 `values` into a 16-bit weight and its residual, in place, with the noise of these keys."""
    if is_shape(weight):
        return
    about = (STORAGES[storage], FORMATS[weight.dtype], weight.data_ptr(), _at(residual), values.data_ptr(), *map(np.uint32, keys))
    pool.share_range(weight.numel(), pool.CHUNK, lambda begin, end: pack_weight(*about, np.empty(loops.BUFFERS, np.float32), begin, end))


def decode_state(codes: Tensor, scales: Tensor | None, role: str, shape: torch.Size) -> Tensor:
    """A bf16 or int8 state (with scales) as a new fp32 tensor of this shape."""
    out = torch.empty(shape, dtype=torch.float32)
    if is_shape(codes):
        return out
    about = (FIRST if role == "first" else SECOND, codes.data_ptr(), _at(scales), out.data_ptr())
    pool.share_range(codes.numel(), pool.CHUNK, lambda begin, end: unpack_state(*about, begin, end))
    return out


def encode_state(values: Tensor, role: str, codec: str, keys: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """fp32 `values` as a bf16 tensor, or as int8 codes (flat) and their scales, rounded stochastically with the noise of these keys."""
    count = values.numel()
    if codec == "bf16":
        codes, scales = torch.empty(values.shape, dtype=torch.bfloat16), None
    else:
        codes = torch.empty(count, dtype=torch.int8 if role == "first" else torch.uint8)
        scales = torch.empty(-(-count // BLOCK), dtype=torch.float32)
    if is_shape(values):
        return codes, scales
    about = (FIRST if role == "first" else SECOND, codes.data_ptr(), _at(scales), values.data_ptr(), *map(np.uint32, keys))
    pool.share_range(count, pool.CHUNK, lambda begin, end: pack_state(*about, np.empty(loops.BUFFERS, np.float32), begin, end))
    return codes, scales


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
