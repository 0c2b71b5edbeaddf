"""16-bit products on a CPU that has no 16-bit instructions, with the right numbers and at fp32's speed.

Such a CPU runs torch's bf16 and fp16 matrix products 30 to 60 times slower than fp32's. Here the operands are rounded
to 16 bits, multiplied in fp32 and the result is rounded to 16 bits: what a 16-bit product with fp32 accumulation is. Only
the order of the fp32 sums may differ from another implementation's.

`ROUTES` says which functions are rounded so; `Emulation` is a mode with these and nothing else. It acts inside one `with` block of one thread
and nowhere else, and it follows `torch.autocast` (nested blocks that switch autocast off, or to another dtype, are obeyed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.amp import dropout, products
from halfstep.amp.attention import attention
from halfstep.amp.contraction import einsum
from halfstep.amp.convolution import convolution
from halfstep.amp.mode import OpMode, Route, Tables, current
from halfstep.amp.ops import forms
from halfstep.amp.rounding import narrow, rounded

__all__ = ["FAMILIES", "ROUTES", "Emulation", "is_active", "narrow", "rounded"]

_MATMUL: dict[Any, Route] = {
    F.linear: products.linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), products.matmul),
    **dict.fromkeys((torch.mm, Tensor.mm), products.strict(2)),
    **dict.fromkeys((torch.bmm, Tensor.bmm), products.strict(3)),
    Tensor.__rmatmul__: products.rmatmul,
    torch.einsum: einsum,
    **dict.fromkeys((torch.addmm, Tensor.addmm), products.added("addmm")),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), products.added("baddbmm")),
    **dict.fromkeys((torch.addbmm, Tensor.addbmm), products.added("addbmm")),
    **dict.fromkeys(forms("multi_dot") + forms("vecdot"), rounded),
    torch.lstm: rounded,  # torch's autocast casts LSTMs on the CPU, and neither GRUs nor plain RNNs
}
_CONVOLUTION: dict[Any, Route] = {
    F.conv1d: convolution(1, transposed=False),
    F.conv2d: convolution(2, transposed=False),
    F.conv3d: convolution(3, transposed=False),
    F.conv_transpose1d: convolution(1, transposed=True),
    F.conv_transpose2d: convolution(2, transposed=True),
    F.conv_transpose3d: convolution(3, transposed=True),
}
_ATTENTION: dict[Any, Route] = {F.scaled_dot_product_attention: attention}

ROUTES: Mapping[Any, Route] = {**_MATMUL, **_CONVOLUTION, **_ATTENTION}
FAMILIES: Mapping[str, frozenset[Any]] = {  # functions whose 16-bit kernels are fast or slow together
    "matmul": frozenset(_MATMUL),
    "convolution": frozenset(_CONVOLUTION),
    "attention": frozenset(_ATTENTION),
}


def is_active() -> bool:
    """Whether products are emulated in this thread; a second emulation inside would only repeat the work."""
    mode = current("cpu")
    return mode is not None and (mode.tables.emulated or bool(mode.tables.low and mode.tables.low.keys() - dropout.ROUTE.keys()))


class Emulation(OpMode):
    """Inside this block, products that autocast would run in 16 bits on the CPU are rounded to 16 bits and run in fp32."""

    def __init__(self) -> None:
        super().__init__("cpu", Tables(on=ROUTES, emulated=True))
