"""Split and join over every exponent and sign: what is exact, and what moves by how much."""

import math

import pytest
import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics import FORMATS, Noise, join, split, ulp

BF16, FP16 = torch.bfloat16, torch.float16
EDGES = (-0x8000, -0x7FFF, -0x7F81, -0x7F80, -0x100, -1, 0, 1, 0x7F, 0x80, 0xFF, 0x100, 0x7EFF, 0x7F00, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x8000)


def codes(dtype: torch.dtype) -> Tensor:
    """Every finite number of a 16-bit format, of both signs."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def around_bf16(residuals: Tensor) -> Tensor:
    """fp32 numbers whose bits are off by `residuals` from those of every finite bf16 number, as they are in memory."""
    x = ((codes(BF16).view(torch.int16).to(torch.int32) << 16)[:, None] + residuals).unique().view(torch.float32)
    return x[x.isfinite()]


def around_fp16(parts: Tensor) -> Tensor:
    """Numbers that are off by `parts` of 2^-16 of an ulp from every fp16 number, where they are fp32 numbers and do not round to inf."""
    hi = codes(FP16).double()[:, None]
    wide = (hi + parts * 2.0**-16 * ulp(hi, FORMATS["fp16"])).reshape(-1)
    x = wide.float()
    return x[(x.double() == wide) & (x.abs() < 65520)]


def bits_apart(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) - b.view(torch.int32)


def check_bf16(x: Tensor) -> Tensor:
    """The law of 16 bits beside bf16; returns which of `x` moved."""
    hi, lo = split(x, BF16)
    assert lo.dtype == torch.int16
    assert torch.equal(hi.view(torch.int16), x.to(BF16).view(torch.int16))
    joined = join(hi, lo)
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    above_even = tie & (((x.view(torch.int32) >> 16) & 1) == 0)
    assert torch.equal(bits_apart(joined, x), -above_even.to(torch.int32))  # one fp32 ulp towards zero, and nothing else
    assert torch.equal(joined.to(BF16).view(torch.int16), hi.view(torch.int16))
    return above_even


def check_fp16(x: Tensor) -> None:
    """The law of 16 bits beside fp16, for magnitudes below 65520."""
    hi, lo = split(x, FP16)
    assert lo.dtype == torch.int16
    assert torch.equal(hi.view(torch.int16), x.to(FP16).view(torch.int16))
    joined = join(hi, lo)
    normal = hi.abs() >= 2.0**-14
    assert torch.equal(joined[normal], x[normal])
    assert torch.equal(joined.to(FP16)[normal], hi[normal])
    lost = (joined[~normal].double() - x[~normal].double()).abs()
    assert float(lost.max() if lost.numel() else 0.0) <= 2.0**-40


def test_bf16_around_every_code() -> None:
    moved = check_bf16(around_bf16(torch.tensor(EDGES, dtype=torch.int32)))
    assert int(moved.sum()) == 2 * 255 * 64  # one above each even code of either sign


def test_bf16_random_numbers() -> None:
    x = Noise(0, 0, 1).bits(2**20).view(torch.float32)
    check_bf16(x[x.isfinite()])


def test_bf16_loses_one_of_the_65537_values_of_an_even_code() -> None:
    """All the fp32 numbers from 1 to 2, of both signs."""
    x = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    for numbers in (x, -x):
        moved = check_bf16(numbers)
        hi = numbers.to(BF16).view(torch.int16).to(torch.int32) & 0x7FFF
        sharing = torch.bincount(hi - hi.min())[1:-1]
        losing = torch.bincount((hi - hi.min())[moved], minlength=sharing.numel() + 2)[1:-1]
        assert sharing.tolist() == [65_535, 65_537] * 63 + [65_535]
        assert losing.tolist() == [0, 1] * 63 + [0]


def test_fp16_around_every_code() -> None:
    multiples = torch.cat([torch.arange(-0x8000, 0x8001, 0x400), torch.tensor(EDGES)])
    check_fp16(around_fp16(multiples))


@pytest.mark.parametrize("exponent", [-14, 0, 14])
def test_fp16_is_exact_for_every_number_of_a_power_of_two(exponent: int) -> None:
    x = (torch.arange(2**23, dtype=torch.int32) + ((127 + exponent) << 23)).view(torch.float32)
    check_fp16(x)
    check_fp16(-x)


def test_fp16_subnormals_are_exact_from_2_to_the_minus_17_but_for_ties() -> None:
    """Residuals count 2^-40 there, which is fp32's own distance at 2^-17."""
    x = (Noise(0, 4, 0).bits(2**20) & 0x7FFFFF | ((127 - 17) << 23)).view(torch.float32)
    x = torch.cat([x, x * 2, x * 4, -x])
    hi, lo = split(x, FP16)
    ties = (x.double() - hi.double()) == 2.0**-25
    assert torch.equal(join(hi, lo)[~ties], x[~ties])
    assert bool(ties.any())


def test_fp16_below_2_to_the_minus_17_keeps_2_to_the_minus_40() -> None:
    bits = Noise(0, 5, 0).bits(2**20)
    exponent = ((bits >> 23) & 0xFF) % (127 - 17)
    x = ((bits & -0x7F800001) | (exponent << 23)).view(torch.float32)
    joined = join(*split(x, FP16)).double()
    lost = x.double() - joined
    assert float(lost.min()) >= 0  # rounded down
    assert float(lost.max()) <= 2.0**-40
    assert bool((lost > 0).any())


def test_fp16_saturates() -> None:
    x = torch.tensor([65504.0, 65510.0, 65519.0, 65520.0, 70000.0, 3e38])
    hi, lo = split(x, FP16)
    assert hi.tolist() == [65504.0] * 6
    assert join(hi, lo).tolist() == [65504.0, 65510.0, 65519.0] + [65520.0] * 3
    negative = join(*split(-x, FP16)).tolist()
    assert negative == [-65504.0, -65510.0, -65519.0] + [-65520.0] * 3


@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, width: int) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan])
    hi, lo = split(x, dtype, width, torch.full((3,), 0xFF, dtype=torch.int32))
    assert hi[:2].tolist() == [math.inf, -math.inf]
    assert join(hi, lo)[:2].tolist() == [math.inf, -math.inf]
    assert hi[2].isnan()
    assert join(hi, lo)[2].isnan()


def eight_bits(dtype: torch.dtype) -> Tensor:
    """Numbers around every code at the edges of residuals, and a few thousand others: of ordinary sizes, of both signs."""
    edges = torch.tensor(EDGES, dtype=torch.int32)
    x = around_bf16(edges) if dtype == BF16 else around_fp16(edges)
    others = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.linspace(-4, 4, 4000)
    fmt = FORMATS["bf16" if dtype == BF16 else "fp16"]
    powers = 2.0 ** torch.arange(-13.0, 15.0)  # the tie below a power of two, where an ulp becomes another, and the numbers before it
    before = (powers[:, None] * (1 - fmt.epsilon / 4 * (1 + torch.tensor([0.0, 1.0, 2.0, 4.0]) / 512))).reshape(-1)
    return torch.cat([x[:: 1 + x.numel() // 30_000], before, -before, others])


def stored_with_all_noise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """hi and the joined numbers for each of the 256 noise values: [256, numel]. The other 24 bits are set, and must not matter."""
    noise = torch.arange(256, dtype=torch.int32)[:, None].expand(-1, x.numel()) | 0x7FFFFF00
    hi, lo = split(x.expand(256, -1), dtype, 8, noise)
    assert lo.dtype == torch.int8
    return hi, join(hi, lo)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_eight_bits_are_unbiased_and_within_their_last_one(dtype: torch.dtype) -> None:
    x = eight_bits(dtype)
    x = x[(x.abs() < 2.0**15) & (x.abs() > 2.0**-100)]
    near, wide = x.to(dtype).double(), x.double()
    if dtype == FP16:
        parts = 2.0**-16 * ulp(near, FORMATS["fp16"])
        wide = near + ((wide - near) / parts).floor() * parts  # a residual in whole parts: only subnormal numbers have others
        assert torch.equal(wide[near.abs() >= 2.0**-14].float(), x[near.abs() >= 2.0**-14])
    distance = ulp(near, FORMATS["bf16" if dtype == BF16 else "fp16"])
    for part in range(0, x.numel(), 4096):
        some = slice(part, part + 4096)
        _, joined = stored_with_all_noise(x[some], dtype)
        assert torch.equal(joined.double().mean(dim=0), wide[some])
        assert bool(((joined.double() - wide[some]).abs() < 2.0**-8 * distance[some]).all())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_hi_is_a_nearest_number_of_what_is_stored(dtype: torch.dtype) -> None:
    x = eight_bits(dtype)
    x = x[x.abs() < 2.0**15]
    nearest = x.to(dtype)
    tie = (nearest.double() - x.double()).abs() * 2 == ulp(x, FORMATS["bf16" if dtype == BF16 else "fp16"]).double()
    assert bool(tie.any())
    for part in range(0, x.numel(), 4096):
        some = slice(part, part + 4096)
        hi, joined = stored_with_all_noise(x[some], dtype)
        assert torch.equal((joined.double() - hi.double()).abs(), (joined.double() - joined.to(dtype).double()).abs())
        assert torch.equal(hi[0][~tie[some]], nearest[some][~tie[some]])  # the noise that adds nothing
    share = float((stored_with_all_noise(x[-1000:], dtype)[0] != nearest[-1000:]).double().mean())
    assert 0 < share < 0.01  # of ordinary numbers: one in 512


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_eight_bits_without_noise_round_to_the_nearest(dtype: torch.dtype) -> None:
    x = eight_bits(dtype)
    x = x[(x.abs() < 2.0**15) & (x.abs() > 2.0**-100)]
    joined = join(*split(x, dtype, 8)).double()
    distance = ulp(x.to(dtype).double(), FORMATS["bf16" if dtype == BF16 else "fp16"])
    assert bool(((joined - x.double()).abs() <= 2.0**-9 * distance + 2.0**-40).all())
    again = join(*split(joined.float(), dtype, 8)).double()
    assert torch.equal(again, joined)


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_small_steps_move_a_weight_across_ties(dtype: torch.dtype, direction: int) -> None:
    """Steps of a sixteenth of the last bit that is kept, from 8 such bits before a tie to 8 behind it: over even and odd codes, of both signs."""
    fmt = FORMATS["bf16" if dtype == BF16 else "fp16"]
    near = torch.tensor([1.25, 1.25 + fmt.epsilon, -1.25, -1.25 - fmt.epsilon, 0.01]).to(dtype).float()
    last = ulp(near, fmt) * 2.0**-8
    first = (near + direction * 120 * last)[:, None].expand(-1, 1000)
    step = (direction * last / 16)[:, None]
    hi, lo = split(first, dtype, 8)
    for k in range(256):
        hi, lo = split(join(hi, lo) + step, dtype, 8, Noise(0, 0, k).bits(5000))
    moved = (join(hi, lo) - first).double() / (256 * step)
    assert float((moved.mean(dim=1) - 1).abs().max()) < 0.03  # five standard deviations
    assert float(moved.min()) > 0


def test_sixteen_bits_of_fp16_saturated_weights_never_carry_into_inf() -> None:
    x = torch.tensor([65504.0 + 15.99, 65519.9, 1e6, -65519.9, -1e6])
    hi, lo = split(x, FP16, 8, torch.full((5,), 0xFF, dtype=torch.int32))
    assert hi.abs().tolist() == [65504.0] * 5
    assert bool((join(hi, lo).abs() < 65520.01).all())


@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_shapes_strides_and_large_tensors(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(3, 2**17, generator=torch.Generator().manual_seed(0)).t()
    bits = Noise(0, 0, 0).bits(x.numel()).view(x.shape)
    hi, lo = split(x, dtype, width, bits)
    assert hi.shape == lo.shape == x.shape
    assert join(hi, lo).shape == x.shape
    row = split(x[2**17 - 1], dtype, width, bits[2**17 - 1])
    assert torch.equal(hi[2**17 - 1], row[0])
    assert torch.equal(lo[2**17 - 1], row[1])
    for empty in (torch.zeros(0), torch.zeros(0, 3)):
        assert join(*split(empty, dtype, width)).shape == empty.shape


def test_other_widths_and_dtypes_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ConfigError, match="12 bits"):
        split(x, BF16, 12)
    with pytest.raises(ConfigError, match="16-bit format"):
        split(x, torch.float32)
    with pytest.raises(ConfigError, match="fp32 tensors"):
        split(x.double(), BF16)
    with pytest.raises(ConfigError, match="residual in"):
        join(x.bfloat16(), torch.zeros(2, dtype=torch.int32))
