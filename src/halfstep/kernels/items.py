"""What a kernel is given of each weight: its tensors, checked, as addresses and codes. The same for every device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import ConfigError, suggest
from halfstep.kernels.codes import BLOCK, FORMATS, RESIDUALS, RULES, STATE_BF16, STATE_FP32, STATE_INT8, STATE_NONE, STORAGES

State = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Item:
    """One weight and what stands beside it.

    weight: fp32 (storage "fp32"), bf16 or fp16 (any other).  residual: int16 for split, int8 for split24, the weight's dtype for
    kahan, None for the others; in the weight's shape and strides.
    first, second: the moments that the rule has (of either sign; never negative), else None: an fp32 or bf16 tensor in the weight's shape and
    strides, or (codes, scales): int8 (first) or uint8 (second) codes, flat [numel] or like the weight, and fp32 scales [ceil(numel / 128)].
    parameter: what tells this weight's noise from that of others.
    All of them on the kernel's device. The weight is dense: its elements fill one piece of memory, in any order of dimensions, and everything
    else lies in the same order.
    """

    weight: Tensor
    storage: str
    residual: Tensor | None
    first: State | None
    second: State | None = None
    parameter: int = 0


def _codec(state: State | None) -> int:
    if state is None:
        return STATE_NONE
    if not isinstance(state, Tensor):
        return STATE_INT8
    return STATE_FP32 if state.dtype == torch.float32 else STATE_BF16


def kinds(item: Item) -> tuple[int, int, int, int]:
    """Codes: storage, format of the weight, codecs of the first and of the second moment."""
    return STORAGES[item.storage], FORMATS[item.weight.dtype], _codec(item.first), _codec(item.second)


def places(item: Item) -> tuple[int, ...]:
    """Addresses: weight, residual, first moment and its scales, second moment and its scales; 0 for what is not there."""
    tensors = (item.weight, item.residual, *_parts(item.first), *_parts(item.second))
    return tuple(0 if t is None else t.data_ptr() for t in tensors)


def _parts(state: State | None) -> tuple[Tensor | None, Tensor | None]:
    """A state's values or codes, and its scales."""
    return state if isinstance(state, tuple) else (state, None)


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill one piece of memory, each once, in any order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def lies_as(t: Tensor, weight: Tensor) -> bool:
    """Whether `t` has the shape of `weight` and its elements the same order in memory, given that `weight` is dense."""
    if t.shape != weight.shape or t.layout != torch.strided:
        return False
    if t.stride() == weight.stride() or not t.numel():
        return True
    return all(a == b for a, b, size in zip(t.stride(), weight.stride(), t.shape, strict=True) if size != 1)


def check_gradient(gradient: Tensor, item: Item, i: int) -> None:
    """Raise ConfigError for a gradient that does not lie as its weight does, on the same device."""
    if gradient.dtype in FORMATS and gradient.device == item.weight.device and lies_as(gradient, item.weight):
        return
    raise ConfigError(
        f"gradient {i} is {gradient.dtype} on {gradient.device} of shape {tuple(gradient.shape)} and strides {gradient.stride()}, its weight has "
        f"shape {tuple(item.weight.shape)} and strides {item.weight.stride()}",
        "Give fp32, bf16 or fp16 gradients that lie in memory as the weights do: torch.empty_like(weight).copy_(gradient).",
    )


def check(item: Item, i: int, rule: str, device: str = "cpu") -> None:
    """Raise ConfigError for an item whose tensors do not fit together: a kernel works on addresses and would write somewhere else.

    rule: that of its plan. device: the kind of device that all its tensors must be on.
    """
    if rule not in RULES:
        raise ConfigError(f"rule={rule!r} is not known", suggest(rule, RULES))
    weight, name = item.weight, f"item {i} ({item.storage}, shape {tuple(item.weight.shape)})"
    if item.storage not in STORAGES or (weight.dtype == torch.float32) != (item.storage == "fp32") or weight.dtype not in FORMATS:
        raise ConfigError(
            f"{name} has {weight.dtype} weights", f"Use fp32 weights with fp32, bf16 or fp16 weights with the others of {', '.join(STORAGES)}."
        )
    beside = {t.device for t in (item.residual, *_parts(item.first), *_parts(item.second)) if t is not None}
    if weight.device.type != device or weight.layout != torch.strided or not is_dense(weight) or beside - {weight.device}:
        raise ConfigError(
            f"{name} is not dense, or not on one {device} device with all that stands beside it",
            "Keep weights that are slices or expanded out of the kernels.",
        )
    expected = weight.dtype if item.storage == "kahan" else RESIDUALS.get(item.storage)
    found = None if item.residual is None else item.residual.dtype
    if found != expected or (item.residual is not None and not lies_as(item.residual, weight)):
        raise ConfigError(
            f"{name} has a residual of {found}, not of {expected}, or one that lies otherwise", "Make it with torch.empty_like(weight, dtype=...)."
        )
    if (item.second is not None) != (rule == "adamw") or (item.first is None and rule != "sgd"):
        raise ConfigError(
            f"{name} has {'a' if item.first is not None else 'no'} first and {'a' if item.second is not None else 'no'} second moment",
            "AdamW has both, Lion the first, SGD the first or none.",
        )
    for state, codes in ((item.first, torch.int8), (item.second, torch.uint8)):
        if state is None:
            continue
        if isinstance(state, Tensor):
            fits = state.dtype in (torch.float32, torch.bfloat16) and lies_as(state, weight)
        else:
            part, scales = state
            lies = lies_as(part, weight) or (part.dim() == 1 and part.is_contiguous() and part.numel() == weight.numel())
            fits = lies and part.dtype == codes and scales.dtype == torch.float32 and scales.is_contiguous()
            fits = fits and scales.numel() == -(-weight.numel() // BLOCK)
        if not fits:
            raise ConfigError(
                f"{name} has a moment that is not in one of the formats",
                f"Use fp32 or bf16 that lies as the weight does, or ({codes} codes, fp32 scales of blocks of {BLOCK}).",
            )
