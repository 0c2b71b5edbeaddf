"""How functions are compiled by numba, and how they get at tensors: by address."""

# mypy: allow-untyped-defs

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

Function = Callable[..., Any]
_OPTIONS: dict[str, Any] = {"error_model": "numpy"}  # dividing by zero gives inf, with no branch that would stop vectorisation
_PART: dict[str, Any] = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # never called from Python: a third less to compile


def compiled(function: Function, *parts: str) -> Function:
    """Compile for this machine at the first call, to run without the interpreter's lock, and keep the result on disk.

    In NUMBA_CACHE_DIR, beside the function's file or in the user's cache folder: the first that can be written to. Where none can,
    every process compiles for itself. parts: other files whose functions it calls. The disk cache looks at the function's own file
    alone, so a digest of theirs, and of this one, goes into the name.
    """
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in (__file__, *parts))).hexdigest()[:16]
    function.__qualname__ = f"{function.__qualname__}_{digest}"
    try:
        return cast(Function, numba.njit(nogil=True, cache=True, **_OPTIONS)(function))
    except RuntimeError:  # "no locator available"
        return cast(Function, numba.njit(nogil=True, **_OPTIONS)(function))


def for_team(function: Function, *parts: str) -> int:
    """The address of a function of one address, compiled now for this machine and kept on disk in the same way: for `pool.run`."""
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in (__file__, *parts))).hexdigest()[:16]
    function.__qualname__ = f"{function.__qualname__}_{digest}"
    signature = types.void(types.CPointer(types.int64))  # type: ignore[no-untyped-call]
    try:
        return cast(int, numba.cfunc(signature, cache=True, **_OPTIONS)(function).address)
    except RuntimeError:  # "no locator available"
        return cast(int, numba.cfunc(signature, **_OPTIONS)(function).address)


def _adder() -> Function:
    """A part that adds to the int64 at an address, one thread at a time, and gives what it was."""

    @intrinsic
    def added_to(context: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))  # type: ignore[no-untyped-call]
            return builder.atomic_rmw("add", at, arguments[1], "monotonic")

        return types.int64(types.int64, types.int64), generate

    return added_to


added_to = _adder()


def part(function: Function) -> Function:
    """A part of a compiled function, compiled for itself."""
    return cast(Function, numba.njit(**_PART)(function))


def reordered(function: Function) -> Function:
    """A part whose sums may be taken in any order, which vectorises them; in compiled code the order is always the same."""
    return cast(Function, numba.njit(fastmath={"reassoc"}, **_PART)(function))


def inlined(function: Function) -> Function:
    """A part that is copied into its caller first: LLVM optimises what a function calls anew for every level of callers."""
    return cast(Function, numba.njit(inline="always", **_PART)(function))


def pointer_to(dtype: Any) -> Function:
    """A part that makes a pointer to `dtype` of an address in an int64."""

    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.int64), generate  # type: ignore[no-untyped-call]

    return at


_at_f32, _at_i16, _at_i8, _at_u8 = pointer_to(types.float32), pointer_to(types.int16), pointer_to(types.int8), pointer_to(types.uint8)
_at_i32, _at_u32, _at_u64 = pointer_to(types.int32), pointer_to(types.uint32), pointer_to(types.uint64)


@part
def floats(address, start, n):
    """Elements start .. start + n - 1 of the fp32 tensor at `address`."""
    return carray(_at_f32(address + np.int64(4) * start), (n,), np.float32)


@part
def halves(address, start, n):
    """The same of a tensor of 16 bits, as int16."""
    return carray(_at_i16(address + np.int64(2) * start), (n,), np.int16)


@part
def signed_bytes(address, start, n):
    """The same of an int8 tensor."""
    return carray(_at_i8(address + start), (n,), np.int8)


@part
def unsigned_bytes(address, start, n):
    """The same of a uint8 tensor."""
    return carray(_at_u8(address + start), (n,), np.uint8)


@part
def integers(address, start, n):
    """The same of an int32 tensor."""
    return carray(_at_i32(address + np.int64(4) * start), (n,), np.int32)


@part
def naturals(address, start, n):
    """The same of a uint32 array."""
    return carray(_at_u32(address + np.int64(4) * start), (n,), np.uint32)


@part
def pairs(address, start, n):
    """`n` pairs of neighbours of a uint32 array from element `start` on, each as one uint64."""
    return carray(_at_u64(address + np.int64(4) * start), (n,), np.uint64)
