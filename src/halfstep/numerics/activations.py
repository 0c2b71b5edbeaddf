"""Activations in 8 bits for the backward pass: blocks of 128 elements along memory share a scale, their largest finite magnitude.

A code is a sign (128) and a magnitude m. m = 0 is zero, and with the sign set NaN; 1 .. top are levels, shares of the scale; 127 is infinity.

    int8   top 126   share 2^-14 for m = 1, then (m - 1) / 125
    fp8    top 125   e4m3(m) / 416, e4m3 being the number whose code m is (4 bits of exponent, 3 of mantissa)

Three laws that gradients need: the largest magnitude, zero, infinity and NaN come back as they were; what is not zero does not become zero, and signs
stay (the derivative of relu, divisions); between two levels an element goes up with the probability that makes its mean what it was. The value of a
level is a number of the format that the tensor had, so a block of two magnitudes (a dropout mask, 0 and 1/(1-p)) comes back exactly. Only what is
smaller than the lowest level has another mean, that level: 6.1e-5 of the scale in int8, 4.7e-6 in fp8.

The random bits are hashed from what the block holds and from its place. A forward pass that is run again on the same numbers (a replay, a resumed
run) is rounded alike without anything being counted or kept, and a step with other numbers is rounded anew. Unbiased rounding of saved activations:
Chen et al., ActNN, arXiv:2104.14129; Liu et al., GACT, arXiv:2206.11357.

Every operation is one fp32 or 32-bit operation in the order written here, none fused, so that a compiled twin gives equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics.blocks import BLOCK, _blocks
from halfstep.numerics.noise import GOLDEN, _signed, hashed_, mix
from halfstep.numerics.rounding import INF, MAGNITUDE, bits_of, nearest_bf16, nearest_fp16
from halfstep.numerics.slices import ranges

STEPS = 125  # of int8: level m is (m - 1) of them
LOWEST = 2.0**-14  # the share of int8's first level
FP8_LARGEST = 416.0
FP8_TOP, FP8_SHIFT = 125, 960  # code of 416; what fp32's exponent and first three bits of mantissa are above e4m3's
INFINITE, NEGATIVE = 127, 128
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}  # above zero, of each format
KINDS = ("int8", "fp8")


def pack(x: Tensor, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A flat fp32, bf16 or fp16 `x` as (codes, scales): uint8 [numel] and, in the format of `x`, [ceil(numel / 128)].

    kind: "int8" or "fp8". Bytes per element: 1.016 for a 16-bit `x`, 1.031 for fp32. Raises ConfigError for another format or kind.
    """
    if x.dtype not in SMALLEST or kind not in KINDS or x.dim() != 1:
        raise ConfigError(
            f"activations cannot be packed as {kind!r} from {x.dtype} with {x.dim()} dimensions", "Give a flat fp32, bf16 or fp16 tensor."
        )
    x = x.detach()
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-x.numel() // BLOCK), dtype=x.dtype, device=x.device)
    for part in ranges(x.numel(), x.device):
        first = part.start // BLOCK
        codes[part], scales[first : -(-part.stop // BLOCK)] = _pack(x[part].float(), x.dtype, kind, seed, first)
    return codes, scales


def unpack(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """The values of `pack`, flat, in the format of `scales`: a new tensor, the same each time."""
    found = torch.empty(codes.numel(), dtype=scales.dtype, device=codes.device)
    for part in ranges(codes.numel(), codes.device):
        m = _blocks((codes[part] & INFINITE).to(torch.int32))
        scale = scales[part.start // BLOCK : -(-part.stop // BLOCK), None].float()
        value = torch.where(m == 0, 0.0, _value(m, scale, scales.dtype, kind)).masked_fill_(m == INFINITE, torch.inf).view(-1)[: codes[part].numel()]
        negative = codes[part] >= NEGATIVE
        found[part] = torch.where(negative, -value, value).masked_fill_(codes[part] == NEGATIVE, torch.nan).to(scales.dtype)
    return found


def keys(seed: int) -> int:
    """The 32-bit word that a seed stands for in the noise of blocks."""
    return mix(seed ^ GOLDEN)


def _pack(x: Tensor, dtype: torch.dtype, kind: str, seed: int, first: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of the fp32 values of whole blocks, the first of them number `first`."""
    count, x = x.numel(), _blocks(x)
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    a = magnitude.view(torch.float32)
    finite = magnitude < INF
    scale = torch.where(finite, a, 0.0).amax(dim=1, keepdim=True)
    share = _random(bits, seed, first).bitwise_right_shift_(16).bitwise_and_(0xFFFF).float().add_(0.5).mul_(2.0**-16)
    m = _below(torch.where(finite, a, 0.0) / torch.where(scale > 0, scale, 1.0), kind)
    low, high = _value(m, scale, dtype, kind), _value(m + 1, scale, dtype, kind)
    m = m + ((a - low) > (high - low) * share)
    m = torch.where(finite, m, INFINITE).masked_fill_(magnitude == 0, 0)
    code = torch.where(bits < 0, m + NEGATIVE, m).masked_fill_(magnitude == 0, 0).masked_fill_(magnitude > INF, NEGATIVE)
    return code.view(-1)[:count].to(torch.uint8), scale[:, 0].to(dtype)


def _below(part: Tensor, kind: str) -> Tensor:
    """The highest level whose share of the scale is at most `part` (fp32, 0 .. 1), or one less where rounding has it so; int32 of 1 and more."""
    if kind == "int8":
        return (part * STEPS).floor_().to(torch.int32).add_(1)
    t = part * FP8_LARGEST
    normal = (t.view(torch.int32) >> 20) - FP8_SHIFT
    return torch.where(t < 2.0**-6, (t * 512).floor_().to(torch.int32), normal).clamp_(min=1)


def _value(m: Tensor, scale: Tensor, dtype: torch.dtype, kind: str) -> Tensor:
    """What level `m` (int32, 1 and more) is under a scale: a number of `dtype`, as fp32."""
    if kind == "int8":
        steps = (m - 1).float()
        share = torch.where(m == 1, LOWEST, steps / torch.full_like(steps, STEPS))  # a number would be made a factor
    else:
        normal = ((m + FP8_SHIFT) << 20).view(torch.float32)
        number = torch.where(m < 8, m.float() * 2.0**-9, normal)
        share = number / torch.full_like(number, FP8_LARGEST)
    return _rounded(share * scale, dtype).clamp_(min=SMALLEST[dtype])


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return x
    return (nearest_bf16(x) if dtype == torch.bfloat16 else nearest_fp16(x)).float()


def _random(bits: Tensor, seed: int, first: int) -> Tensor:
    """32 random bits for each element of blocks [n, 128], from the seed, the number of the block and the sum of all its bits."""
    whole = bits.sum(dim=1, keepdim=True).to(torch.int32)  # modulo 2^32
    number = torch.arange(first, first + bits.shape[0], device=bits.device).to(torch.int32)[:, None]
    one = hashed_(whole.bitwise_xor_(hashed_(number.bitwise_xor_(_signed(keys(seed))))))
    two = hashed_(one.bitwise_xor(_signed(GOLDEN)))
    place = torch.arange(BLOCK, dtype=torch.int32, device=bits.device)[None]
    return hashed_(place.bitwise_xor(one), two)
