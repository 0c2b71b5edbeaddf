"""What torch's fake implementations do not know, or have otherwise than its kernels: a few ops, one function each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from halfstep.amp.ops import HALF
from halfstep.numerics.standins import is_shape

aten = torch.ops.aten
PROBED = 32  # steps of a recurrent network up to which it is asked what it takes; for more the numbers of these are carried on


def grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """The shape of products in groups (experts), of which torch's fake implementation refuses formats that its CPU kernel takes."""
    shape: tuple[int, ...] = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (a.shape[1], b.shape[1])
    if a.dim() == b.dim():
        shape = (a.shape[0] if offs is None or a.dim() == 3 else offs.shape[0], a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def attention_choice(*args: Any, **kwargs: Any) -> Any:
    """Which kernel of attention runs: asked with tensors of the same shapes, expanded from one row, for fake ones are told that there is none."""

    def real(t: Any) -> Any:
        if not isinstance(t, Tensor) or not is_shape(t):
            return t
        row = torch.empty(t.shape[-1:] if t.stride(-1) == 1 else (1,), dtype=t.dtype, device=t.device)
        return row.expand(t.shape).requires_grad_(t.requires_grad)

    with unset_fake_temporarily():
        return aten._fused_sdp_choice.default(*map(real, args), **{k: real(v) for k, v in kwargs.items()})


INSTEAD: dict[Any, Callable[..., Any]] = {aten._fused_sdp_choice.default: attention_choice}
if hasattr(aten, "_grouped_mm"):
    INSTEAD[aten._grouped_mm.default] = grouped


def workspace(func: Any, args: Any) -> int:
    """Bytes that a kernel takes for itself while it runs, where they are many: oneDNN adds up gradients of 16-bit convolutions' weights in fp32."""
    if func is not aten.convolution_backward.default or args[2].device.type != "cpu" or args[2].dtype not in HALF:
        return 0
    return 4 * int(args[2].numel())


def kept_inside(func: Any, args: Any, result: Any) -> tuple[Tensor, int] | None:
    """A result whose bytes only its kernel knows, and how many: what oneDNN's LSTM keeps for its backward pass."""
    if func is not aten.mkldnn_rnn_layer.default or not args[15]:  # not in training
        return None
    steps, batch, inputs = args[0].shape  # in this order whatever the module was given
    return result[3], _recurrent(steps, batch, inputs, args[10], args[0].dtype)


def _recurrent(steps: int, batch: int, inputs: int, width: int, dtype: torch.dtype) -> int:
    if steps <= PROBED:
        return _probed(steps, batch, inputs, width, dtype)
    half, whole = (_probed(n, batch, inputs, width, dtype) for n in (PROBED // 2, PROBED))
    return whole + (steps - PROBED) * (whole - half) // (PROBED - PROBED // 2)


@functools.lru_cache(maxsize=64)
def _probed(steps: int, batch: int, inputs: int, width: int, dtype: torch.dtype) -> int:
    """Run so many steps on zeros. Memory: the weights of the layer, for a moment."""
    with unset_fake_temporarily(), torch.enable_grad():  # without gradients it keeps nothing
        x, h = torch.zeros(steps, batch, inputs, dtype=dtype), torch.zeros(batch, width, dtype=dtype)
        weights = [torch.zeros(4 * width, n, dtype=dtype) for n in (inputs, width)]
        bias = torch.zeros(4 * width, dtype=dtype)
        found = aten.mkldnn_rnn_layer.default(x, *weights, bias, bias, h, h, False, [], 2, width, 1, True, False, False, True)[3]
    return 0 if found is None else int(found.untyped_storage().nbytes())
