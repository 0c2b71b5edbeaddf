"""Laws of the formats that weights and optimizer states are kept in: everything enumerated, and what repeated steps make of the rounding."""

import math

import pytest
import torch
from torch import Tensor

from halfstep.numerics import FORMATS, Format, Noise, adamw_, cast, decode, encode, join, nearest, split, state_noise, stochastic

ENUMERATED = [f for f in FORMATS.values() if f.dtype is not None and f.dtype.itemsize <= 2]
HALVES = [FORMATS["bf16"], FORMATS["fp16"]]


def every_code(fmt: Format) -> Tensor:
    """Every code of an 8- or 16-bit format as fp32: NaN and inf too, in order of the codes of each sign."""
    assert fmt.dtype is not None
    width = 8 * fmt.dtype.itemsize
    codes = torch.arange(2**width).to(torch.uint8 if width == 8 else torch.int32)
    return (codes if width == 8 else codes.to(torch.int16)).view(fmt.dtype).float()


def positive(fmt: Format) -> Tensor:
    """The finite numbers from zero up."""
    values = every_code(fmt)
    values = values[: values.numel() // 2]
    return values[values.isfinite()]


@pytest.mark.parametrize("fmt", ENUMERATED, ids=lambda f: f.name)
def test_every_number_of_a_format_is_its_own_nearest(fmt: Format) -> None:
    values = every_code(fmt)
    got = nearest(values, fmt)
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got.view(torch.int32)[~values.isnan()], values.view(torch.int32)[~values.isnan()])


@pytest.mark.parametrize("fmt", ENUMERATED, ids=lambda f: f.name)
def test_between_any_two_neighbours_the_nearer_wins_and_a_tie_goes_to_the_even_code(fmt: Format) -> None:
    """All neighbours: just below the middle, the middle, just above it. A middle of bf16's subnormals is an fp32 number, as all others are."""
    values = positive(fmt)
    low, high = values[:-1], values[1:]
    middle = ((low.double() + high.double()) / 2).float()
    assert torch.equal(middle.double(), (low.double() + high.double()) / 2)
    even = torch.arange(low.numel()) % 2 == 0
    word = middle.view(torch.int32)
    for sign in (1, -1):
        assert torch.equal(nearest(sign * middle, fmt), sign * torch.where(even, low, high))
        assert torch.equal(nearest(sign * (word - 1).view(torch.float32), fmt), sign * low)
        assert torch.equal(nearest(sign * (word + 1).view(torch.float32), fmt), sign * high)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_rounding_is_monotone(fmt: Format) -> None:
    x = Noise(0, 0, 0).bits(2**18).view(torch.float32)
    x = x[~x.isnan()].sort().values
    assert bool((nearest(x, fmt).diff().nan_to_num(0.0) >= 0).all())  # inf - inf is no fall


@pytest.mark.parametrize("fmt", HALVES, ids=lambda f: f.name)
def test_three_ways_to_a_16_bit_number_agree(fmt: Format) -> None:
    """The cast, the nearest number as fp32, and the hi of a split; rounding by chance takes it or its neighbour."""
    assert fmt.dtype is not None
    x = Noise(0, 0, 1).bits(2**20).view(torch.float32)
    x = x[x.abs() < fmt.largest]
    assert torch.equal(cast(x, fmt.dtype).float(), nearest(x, fmt))
    assert torch.equal(split(x, fmt.dtype)[0].float(), nearest(x, fmt))
    code, other = cast(x, fmt.dtype), stochastic(x, fmt.dtype, Noise(0, 0, 2).bits(x.numel()))
    apart = (code.view(torch.int16).to(torch.int32) - other.view(torch.int16).to(torch.int32)).abs()
    assert int(apart.max()) == 1
    assert bool((apart == 0).any())


@pytest.mark.slow
@pytest.mark.parametrize("fmt", HALVES, ids=lambda f: f.name)
def test_split_and_join_over_all_fp32_numbers(fmt: Format) -> None:
    """All 2^32: what moves is one fp32 ulp above the ties of even bf16 numbers, and in fp16 what is below 2^-17 and ties below 2^-14."""
    assert fmt.dtype is not None
    moved_bf16 = 0
    for start in range(-(2**31), 2**31, 2**24):
        word = torch.arange(start, start + 2**24).to(torch.int32)
        x = word.view(torch.float32)
        if not bool(x.isfinite().any()):
            continue
        word, x = word[x.isfinite()], x[x.isfinite()]
        hi, lo = split(x, fmt.dtype)
        joined = join(hi, lo)
        if fmt.name == "bf16":
            assert torch.equal(hi.view(torch.int16), x.bfloat16().view(torch.int16))
            tie = ((word & 0x1FFFF) == 0x8000).to(torch.int32)
            assert torch.equal(joined.view(torch.int32), word - tie)
            moved_bf16 += int(tie.sum())
            continue
        inside = x.abs() < 65520
        assert torch.equal(hi[inside].view(torch.int16), x[inside].half().view(torch.int16))
        assert bool((hi[~inside].abs() == 65504).all())
        normal = inside & (hi.abs() >= 2.0**-14)
        assert torch.equal(joined[normal], x[normal])
        small = inside & ~normal
        lost = x[small].double() - joined[small].double()
        assert not lost.numel() or (float(lost.min()) >= 0 and float(lost.max()) <= 2.0**-40)
    assert moved_bf16 == (2 * 255 * 64 if fmt.name == "bf16" else 0)  # of 4,278,190,080 finite numbers


def mixed_columns(blocks: int, ratio: float) -> Tensor:
    """Gradients whose columns are 1 and `ratio` in turn, so that every block of 128 holds both."""
    return torch.where(torch.arange(128 * blocks) % 2 == 0, 1.0, ratio)


def largest_update(gradients: Tensor, kind: str, states: str, steps: int = 200) -> float:
    """The largest |update| / lr of AdamW in `steps` steps with its states in `states` between them."""
    n, lr = gradients.numel(), 1e-3
    generator = torch.Generator().manual_seed(0)
    p, m, v = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    worst = 0.0
    for step in range(1, steps + 1):
        g = gradients
        if kind == "normal":
            g = gradients * torch.randn(n, generator=generator)
        elif kind == "rare":
            g = gradients * (torch.rand(n, generator=generator) < 0.05)
        before = p.clone()
        adamw_(p, g, m, v, lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=step)
        worst = max(worst, float((p - before).abs().max()) / lr)
        if states == "int8":
            noise = state_noise(Noise(0, 0, step).bits(n))
            m = decode(*encode(m, True, noise & 0xFFFF), True, m.shape)
            v = decode(*encode(v, False, (noise >> 16) & 0xFFFF), False, v.shape)
    return worst


@pytest.mark.parametrize("kind", ["constant", "normal", "rare"])
@pytest.mark.parametrize("ratio", [1.0, 2e-3, 1e-3, 5e-4, 1e-4, 1e-5])
def test_int8_states_make_no_update_above_four_times_that_of_fp32(ratio: float, kind: str) -> None:
    gradients = mixed_columns(8, ratio)
    assert largest_update(gradients, kind, "int8") <= 4 * largest_update(gradients, kind, "fp32")


def test_a_second_moment_without_gradients_decays_as_in_fp32() -> None:
    """0.999^2000 = 0.135 in the mean over 4,064 elements; rounded to nearest it does not move at all. One element a block stays the largest."""
    start = torch.rand(32, 128, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.01
    start[:, 0] = 1.0
    chance, frozen = start.clone(), decode(*encode(start, False), False, start.shape)
    first = frozen.clone()
    for step in range(2000):
        for v in (chance, frozen):
            v.mul_(0.999)[:, 0] = 1.0
        noise = state_noise(Noise(0, 0, step).bits(start.numel())) >> 16 & 0xFFFF
        chance = decode(*encode(chance, False, noise), False, start.shape)
        frozen = decode(*encode(frozen, False), False, start.shape)
    wanted = math.pow(0.999, 2000)
    assert float(chance[:, 1:].double().mean() / start[:, 1:].double().mean()) == pytest.approx(wanted, rel=0.03)
    assert torch.equal(frozen, first)


def test_a_first_moment_forgets_as_in_fp32() -> None:
    """After a burst of gradients the mean over 12,700 first moments decays by 0.9 a step, of both signs, until the smallest level."""
    m = torch.rand(100, 128, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.1
    m[:, 1::2] *= -1
    m[:, 0] = 1.0
    start = m.clone()
    for step in range(30):
        m.mul_(0.9)[:, 0] = 1.0
        m = decode(*encode(m, True, state_noise(Noise(0, 0, step).bits(m.numel())) & 0xFFFF), True, m.shape)
    for sign in (0, 1):
        column = slice(2 + sign, None, 2)
        assert float(m[:, column].double().mean() / start[:, column].double().mean()) == pytest.approx(0.9**30, rel=0.03)
