"""Optimizer states in 8 bits: blocks of 128 elements share an fp32 scale, their largest magnitude, and levels lie denser towards zero.

    signed         d(k) = sign(k) * (k / 127)^2 * scale    levels -127 .. 127 of int8; the smallest is 6.2e-5 of the block's largest magnitude
    not negative   d(k) = (k / 255)^4 * scale              levels 0 and 6 .. 255 of uint8; the smallest is 3.1e-7, with a root of 5.5e-4

A first moment is so kept by its square root, a second moment by its fourth root: AdamW divides by the root of the second moment, which
these levels space as the first moment's are. What is not zero gets level 6 at least. Below it neighbours differ by factors up to 16, a
second moment forgets so slowly that chance takes it far down among them, and AdamW's updates, divided by its root, grew to 37 times
those of fp32 where gradients of one block differ by 1:10^4. From level 6 on they stay below 4 times; smaller elements make smaller
updates instead. Blockwise states: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.

The level below a number is found by its root, times the number of levels over the root of the scale: no division per element, and AdamW has
taken the second moment's root already. Up or down is then decided between the values of two levels, so that what a level holds stays.
Every operation is one fp32 operation in the order written here, none fused, so that a compiled twin gives equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics.slices import ranges
from halfstep.numerics.updates import square_root

BLOCK = 128
SIGNED_LEVELS, POSITIVE_LEVELS = 127, 255
LEAST = 6  # the lowest level of a second moment that is not zero
SHORT = 1 - 2.0**-22  # so that rounding never takes a root up to the last level; a level itself may be seen as just above the one below


def encode(x: Tensor, signed: bool, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 `x` of any shape, taken flat, as (codes, scales): int8 (signed) or uint8 [numel] and fp32 [ceil(numel / 128)].

    bits: int32 of 0 .. 65535 in the shape of `x` or flat: an element between two levels goes up with the probability that makes the mean `x`; without
    them it goes to the nearer one. Not signed: `x` must not be negative, and what is not zero gets level 6 at least, so that it
    does not decode to zero (unless the scale is below 3e-39, where fp32 ends). `x` must be finite: one inf or NaN makes its whole block
    decode to inf or NaN.
    Memory: 1.03 bytes per element.
    """
    if x.dtype != torch.float32:
        raise ConfigError(f"encode takes fp32 tensors, and this one is {x.dtype}", "Convert it with .float() first.")
    flat, noise = x.detach().reshape(-1), None if bits is None else bits.reshape(-1)
    codes = torch.empty(flat.numel(), dtype=torch.int8 if signed else torch.uint8, device=x.device)
    scales = torch.empty(-(-flat.numel() // BLOCK), device=x.device, dtype=torch.float32)
    for part in ranges(flat.numel(), x.device):
        codes[part], scales[_scales_of(part)] = _encode(flat[part], signed, None if noise is None else noise[part])
    return codes, scales


def decode(codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The fp32 values of `codes` [numel] and `scales` [ceil(numel / 128)] in `shape`, a new tensor."""
    values = torch.empty(codes.numel(), device=codes.device, dtype=torch.float32)
    for part in ranges(codes.numel(), codes.device):
        values[part] = _decode(codes[part], scales[_scales_of(part)], signed)
    return values.reshape(shape)


def _encode(flat: Tensor, signed: bool, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    magnitude = _blocks(flat.abs())
    scales = magnitude.amax(dim=1)
    scale = scales[:, None]
    reach = scales.new_tensor(
        (SIGNED_LEVELS if signed else POSITIVE_LEVELS) * SHORT
    )  # a tensor: a number divided by one is multiplied by its reciprocal
    k = _root(magnitude, signed).mul_(reach / _root(torch.where(scale == 0, 1.0, scale), signed)).floor_()
    low, high = _level(k, signed).mul_(scale), _level(k + 1, signed).mul_(scale)
    share = 0.5 if noise is None else _blocks(noise.float().add_(0.5).mul_(2.0**-16))
    k.add_((magnitude - low) > high.sub_(low).mul_(share))
    if not signed:
        k = torch.where(magnitude > 0, k.clamp(min=LEAST), k)
    code = k.view(-1)[: flat.numel()].to(torch.uint8)
    return (torch.where(flat < 0, -code.view(torch.int8), code.view(torch.int8)) if signed else code), scales


def _root(x: Tensor, signed: bool) -> Tensor:
    """What levels are even in: the square root, or the fourth root as the root of the square root, which AdamW needs as well."""
    root = square_root(x)
    return root if signed else square_root(root)


def _decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    k = codes.abs().view(torch.uint8) if signed else codes  # torch converts uint8 three times as fast as int8
    values = _level(_blocks(k.float()), signed).mul_(scales[:, None]).view(-1)[: codes.numel()]
    return torch.where(codes < 0, -values, values) if signed else values


def _scales_of(part: slice) -> slice:
    """The scales of the blocks of a slice of elements that begins with a block."""
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _level(k: Tensor, signed: bool) -> Tensor:
    """The magnitude of level k (whole fp32 numbers) where the scale is 1."""
    if signed:
        part = k * (1 / SIGNED_LEVELS)
        return part * part
    part = k * (1 / POSITIVE_LEVELS)
    part = part * part
    return part * part


def _blocks(flat: Tensor) -> Tensor:
    """A flat tensor as [blocks, 128], the last one filled up with zeros."""
    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
