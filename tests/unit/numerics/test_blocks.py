"""Blockwise 8-bit states: every level, the error between them, the mean over all noise, and what happens to small second moments."""

import math

import pytest
import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.numerics import BLOCK, Noise, decode, encode, state_noise

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "not negative"])


def levels(signed: bool) -> Tensor:
    """The levels of scale 1 in fp64, from the formulas."""
    if signed:
        k = torch.arange(-127, 128, dtype=torch.float64) / 127
        return k.sign() * k**2
    return torch.cat([torch.zeros(1, dtype=torch.float64), (torch.arange(6, 256, dtype=torch.float64) / 255) ** 4])


def all_codes(signed: bool) -> Tensor:
    return torch.arange(-127, 128).to(torch.int8) if signed else torch.tensor([0, *range(6, 256)], dtype=torch.uint8)


def one_block(signed: bool, seed: int = 0, scale: float = 1.0) -> Tensor:
    """128 numbers over many magnitudes, the largest of which is `scale`."""
    generator = torch.Generator().manual_seed(seed)
    x = 10 ** (-6 * torch.rand(BLOCK, generator=generator)) * scale
    x[17] = scale
    return x * torch.randn(BLOCK, generator=generator).sign() if signed else x


def noise_for(x: Tensor, step: int) -> Tensor:
    return state_noise(Noise(0, 0, step).bits(x.numel())) & 0xFFFF


@SIGNED
@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-5, 1e-30, 1e30])
def test_codes_stand_for_the_levels_of_the_formulas(signed: bool, scale: float) -> None:
    codes = all_codes(signed)
    scales = torch.full((2,), scale)
    got = decode(codes, scales, signed, codes.shape).double()
    assert torch.allclose(got, levels(signed) * float(scales[0]), rtol=1e-6, atol=0)


@SIGNED
@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-5, 1e-30, 1e30])
def test_every_code_is_encoded_as_itself(signed: bool, scale: float) -> None:
    """With any noise: what a level holds exactly stays."""
    codes = all_codes(signed)
    scales = torch.full((2,), scale)
    top = codes.max()
    codes = torch.cat([codes[:127], top[None], codes[127:]])  # both blocks reach the scale
    x = decode(codes, scales, signed, codes.shape)
    for bits in (None, torch.zeros(codes.numel(), dtype=torch.int32), torch.full((codes.numel(),), 0xFFFF, dtype=torch.int32), noise_for(x, 1)):
        again, scales_again = encode(x, signed, bits)
        assert again.dtype == codes.dtype
        assert torch.equal(again, codes)
        assert torch.equal(scales_again, scales)


@SIGNED
def test_the_error_is_at_most_half_the_gap_or_all_of_it(signed: bool) -> None:
    grid = levels(signed)
    for seed in range(20):
        x = one_block(signed, seed, 10.0 ** (seed - 10))
        y = x.double() / float(x.abs().max())
        above = torch.searchsorted(grid, y).clamp(1, grid.numel() - 1)
        gap = grid[above] - grid[above - 1]
        nearest = decode(*encode(x, signed), signed, x.shape).double() / float(x.abs().max())
        normal = y.abs() > grid[grid > 0][0]  # smaller second moments go up to the lowest level
        assert bool(((nearest - y).abs()[normal] <= gap[normal] * 0.5 + 1e-6 * y.abs()[normal]).all())
        chance = decode(*encode(x, signed, noise_for(x, seed)), signed, x.shape).double() / float(x.abs().max())
        assert bool(((chance - y).abs()[normal] <= gap[normal] + 1e-6 * y.abs()[normal]).all())


@SIGNED
@pytest.mark.parametrize("seed", [0, 1])
def test_the_mean_over_all_noise_is_the_number(signed: bool, seed: int) -> None:
    """Within half of 2^-16 of the gap between the levels around it, and what fp32 rounds."""
    x = one_block(signed, seed, 0.37)
    noise = torch.arange(2**16, dtype=torch.int32)[:, None].expand(-1, BLOCK)
    codes, scales = encode(x.expand(2**16, -1), signed, noise)
    assert torch.equal(scales, torch.full((2**16,), 0.37))
    mean = decode(codes, scales, signed, (2**16, BLOCK)).double().mean(dim=0)
    grid = levels(signed) * float(scales[0])
    above = torch.searchsorted(grid, x.double()).clamp(1, grid.numel() - 1)
    gap = grid[above] - grid[above - 1]
    inside = x.double() > grid[1] if not signed else torch.ones(BLOCK, dtype=torch.bool)
    assert bool(((mean - x.double()).abs()[inside] <= 0.6 * 2.0**-16 * gap[inside] + 2.0**-23 * x.double().abs()[inside]).all())
    assert int(inside.sum()) > 100


def test_a_second_moment_that_is_not_zero_never_decodes_to_zero() -> None:
    x = torch.cat([torch.ones(1), 10.0 ** -torch.linspace(0, 38, 126), torch.zeros(1)])
    for bits in (None, torch.zeros(BLOCK, dtype=torch.int32), torch.full((BLOCK,), 0xFFFF, dtype=torch.int32)):
        codes, scales = encode(x, False, bits)
        got = decode(codes, scales, False, x.shape)
        assert bool((got[:-1] > 0).all())
        assert float(got[:-1].min()) == pytest.approx((6 / 255) ** 4, rel=1e-6)
        assert float(got[-1]) == 0.0


@SIGNED
@pytest.mark.parametrize("numel", [0, 1, 7, 127, 128, 129, 300, 2**18 + 1])
def test_sizes(signed: bool, numel: int) -> None:
    """A tensor's blocks do not know how many there are, and the last one may be short."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    x = x if signed else x * x
    noise = noise_for(x, 3)
    codes, scales = encode(x, signed, noise)
    assert codes.shape == (numel,)
    assert scales.shape == (math.ceil(numel / BLOCK),)
    assert decode(codes, scales, signed, x.shape).shape == x.shape
    for start in {0, max(0, numel - 1) // BLOCK * BLOCK}:
        part = slice(start, start + BLOCK)
        alone, scale = encode(x[part], signed, noise[part])
        assert torch.equal(alone, codes[part])
        assert torch.equal(scale, scales[start // BLOCK : start // BLOCK + 1])
        assert not numel or float(scale) == float(x[part].abs().max())


@SIGNED
def test_shapes_are_taken_flat(signed: bool) -> None:
    x = torch.rand(6, 50).t()
    codes, scales = encode(x, signed)
    flat = encode(x.contiguous().view(-1), signed)
    assert torch.equal(codes, flat[0])
    assert torch.equal(scales, flat[1])
    assert torch.equal(decode(codes, scales, signed, x.shape), decode(*flat, signed, (300,)).view(50, 6))
    assert encode(torch.tensor(2.0), signed)[0].tolist() == [127 if signed else 255]
    assert decode(*encode(torch.tensor(2.0), signed), signed, ()).item() == 2.0


@SIGNED
def test_zeros_stay_zero_whatever_the_noise(signed: bool) -> None:
    x = torch.zeros(2, BLOCK)
    x[1, 3] = 5.0
    codes, scales = encode(x, signed, torch.zeros(2, BLOCK, dtype=torch.int32))
    assert scales.tolist() == [0.0, 5.0]
    assert torch.equal(decode(codes, scales, signed, x.shape), x)


@SIGNED
def test_a_block_with_a_bad_element_shows_it_and_others_do_not(signed: bool) -> None:
    for bad in (math.inf, math.nan):
        x = torch.rand(3, BLOCK)
        x[1, 5] = bad
        codes, scales = encode(x, signed, noise_for(x, 0).view(3, BLOCK))
        got = decode(codes, scales, signed, x.shape)
        assert not got[1].isfinite().any()
        assert got[[0, 2]].isfinite().all()


@SIGNED
def test_columns_of_mixed_magnitude_keep_their_mean(signed: bool) -> None:
    """Columns of 1 and 1e-4 in every block: a first moment keeps the mean of both; a second moment of 1e-8 stops at its lowest level."""
    magnitude = torch.where(torch.arange(BLOCK * 200) % 2 == 0, 1.0, 1e-4)
    x = magnitude if signed else magnitude * magnitude
    got = decode(*encode(x, signed, noise_for(x, 2)), signed, x.shape)
    assert torch.equal(got[0::2], x[0::2])
    if signed:
        assert float(got[1::2].double().mean()) == pytest.approx(1e-4, rel=0.05)
    else:
        assert torch.equal(got[1::2], torch.full((BLOCK * 100,), float(got[1])))
        assert float(got[1]) == pytest.approx((6 / 255) ** 4, rel=1e-6)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp32 tensors"):
        encode(torch.ones(3, dtype=torch.bfloat16), True)


@SIGNED
@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-5, 1e-30])
def test_numbers_beside_a_level_stay_beside_it_whatever_the_noise(signed: bool, scale: float) -> None:
    """The level below is found by a root, which rounds: one too low takes numbers a few ulps above a level down to it, and no farther."""
    codes = all_codes(signed)[-120:]
    scales = torch.tensor([scale])
    level = decode(codes, scales, signed, codes.shape)[:-1]
    top = torch.tensor([scale])
    for ulps in (-3, -2, -1, 1, 2, 3):
        x = torch.cat([(level.view(torch.int32) + ulps).view(torch.float32), top])
        for noise in (0, 1, 0x7FFF, 0xFFFE, 0xFFFF):
            got, scales_again = encode(x, signed, torch.full((x.numel(),), noise, dtype=torch.int32))
            off = got[:-1].int() - codes[:-1].int()
            assert torch.equal(scales_again, scales)
            assert int(got[-1]) == int(codes[-1])
            assert set(off.tolist()) <= ({-1, 0} if ulps < 0 else {0, 1})
            rarely = (off != 0).sum() if 0 < noise < 0xFFFF else torch.tensor(0)
            assert int(rarely) == 0, "three ulps are less than 2^-16 of the distance of levels, but for the noise at either end"
