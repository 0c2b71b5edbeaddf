"""Compile the Triton kernels for a compute capability, with no such device at hand, and print their PTX as JSON: `python triton_ptx.py 90`."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfstep.kernels import codes, cuda

TABLES = dict(zip(("places", "sizes", "gradients"), ("*i64",) * 3, strict=True)) | {"keys": "*i32", "numbers": "*fp32", "chunks": "*i32"}
SQUARES = {"addresses": "*i64", "sizes": "*i64", "chunks": "*i32", "sums": "*fp64", "largest": "*i32"}
FORMS = {"fp32": codes.FP32, "bf16": codes.BF16, "fp16": codes.FP16}
KINDS = {
    "adamw, split bf16": ("adamw", codes.SPLIT, codes.BF16, codes.STATE_FP32, codes.STATE_FP32, codes.BF16),
    "sgd, split24 fp16": ("sgd", codes.SPLIT24, codes.FP16, codes.STATE_FP32, codes.STATE_NONE, codes.FP16),
    "lion, fp32": ("lion", codes.EXACT, codes.FP32, codes.STATE_FP32, codes.STATE_NONE, codes.FP32),
    "adamw, int8 states": ("adamw", codes.SPLIT24, codes.BF16, codes.STATE_INT8, codes.STATE_INT8, codes.BF16),
    "lion, bf16 states": ("lion", codes.KAHAN, codes.FP16, codes.STATE_BF16, codes.STATE_NONE, codes.FP32),
}


def ptx(kernel: Any, types: dict[str, str], flags: dict[str, int], capability: int) -> str:
    """The code of a kernel; the arguments of `types` are multiples of 16, as torch's tensors are."""
    names = list(kernel.arg_names)
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(flags, "constexpr"),
        constexprs=flags,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(cuda.OPTIONS)).asm["ptx"])


def main() -> None:
    """One line of JSON: the code of each kind."""
    capability, fixed, found = int(sys.argv[1]), {"ALIGNED": True, "BLOCKS": cuda.BLOCKS, "TURNS": cuda.TURNS}, {}
    for name, (rule, *kinds) in KINDS.items():
        flags = {"RULE": codes.RULES[rule], **dict(zip(("STORAGE", "FORM", "FIRST", "SECOND", "GRADIENT"), kinds, strict=True))}
        found[name] = ptx(cuda.step_chunks, TABLES, flags | fixed, capability)
    for name, form in FORMS.items():
        found[f"squares of {name}"] = ptx(cuda.square_chunks, SQUARES, {"FORM": form} | fixed, capability)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
