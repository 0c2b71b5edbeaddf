"""Hashed noise: its definition in plain integers, its distribution, its independence of order and of other streams."""

import pytest
import torch

from halfstep.numerics import Noise, state_noise

WORD = 2**32


def scramble(x: int) -> int:
    """The hash in Python's integers, one operation at a time."""
    x = x % WORD
    x = x ^ (x // 2**16)
    x = (x * 2146121005) % WORD
    x = x ^ (x // 2**15)
    x = (x * 2221713035) % WORD
    return x ^ (x // 2**16)


def element(seed: int, parameter: int, step: int, i: int) -> int:
    first = scramble((seed % WORD) ^ scramble((parameter % WORD) ^ scramble(step)))
    second = scramble(first ^ 0x9E3779B9)
    x = (i % WORD) ^ first
    x = x ^ (x // 2**16)
    x = (x * 2146121005) % WORD
    x = x ^ second
    x = x ^ (x // 2**15)
    x = (x * 2221713035) % WORD
    return x ^ (x // 2**16)


def unsigned(bits: torch.Tensor) -> list[int]:
    return [b % WORD for b in bits.tolist()]


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Numbers of mean 0 and standard deviation 1 from 32 random bits."""
    return bits.double() * (12**0.5 / WORD)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In its own standard deviations: below 4 for all but one in 16,000 independent pairs."""
    return float((uniform(a) * uniform(b)).mean()) * a.numel() ** 0.5


@pytest.mark.parametrize(
    ("key", "start", "wanted"),
    [
        ((0, 0, 0), 0, [2382933713, 1863352416, 3449896158]),
        ((1, 2, 3), 0, [4206914286, 3607988511, 1361186179]),
        ((2**32 - 1, 77, 100_000), 2**31 - 1, [3055242301, 73297558, 2307786435]),
    ],
)
def test_values_are_pinned(key: tuple[int, int, int], start: int, wanted: list[int]) -> None:
    assert unsigned(Noise(*key).bits(3, start=start)) == wanted


@pytest.mark.parametrize("key", [(0, 0, 0), (1, 2, 3), (-5, 9, 12), (2**40 + 3, 2**33, 7), (123_456_789, 4_000_000_000, 1_000_000)])
@pytest.mark.parametrize("start", [0, 1, 300_000, 2**31 - 3, 2**31, 2**32 - 3])
def test_bits_are_those_of_the_definition(key: tuple[int, int, int], start: int) -> None:
    assert unsigned(Noise(*key).bits(7, start=start)) == [element(*key, start + i) for i in range(7)]


def test_state_noise_is_that_of_the_definition() -> None:
    bits = Noise(4, 5, 6).bits(1000)
    products = [(b * 0x2C1B3C6D) % WORD for b in unsigned(bits)]
    assert unsigned(state_noise(bits)) == [p ^ (p // 2**15) for p in products]


def test_state_noise_leaves_its_argument_alone() -> None:
    bits = Noise(4, 5, 6).bits(10)
    kept = bits.clone()
    state_noise(bits)
    assert torch.equal(bits, kept)


@pytest.mark.parametrize("cut", [1, 127, 262_144, 299_999])
def test_a_tensor_cut_in_two_has_the_same_bits(cut: int) -> None:
    noise = Noise(8, 1, 2)
    whole = noise.bits(300_000)
    assert whole.dtype == torch.int32
    assert torch.equal(torch.cat([noise.bits(cut), noise.bits(300_000 - cut, start=cut)]), whole)


def test_no_elements() -> None:
    assert Noise(0, 0, 0).bits(0).shape == (0,)


@pytest.mark.parametrize("make", [lambda b: b, state_noise], ids=["bits", "state noise"])
@pytest.mark.parametrize("key", [(0, 0, 0), (0, 0, 1), (3, 1, 4), (1, 5, 9)])
def test_bytes_are_uniform(make, key: tuple[int, int, int]) -> None:
    """Chi-square of 256 values: 255 degrees of freedom, a standard deviation of 22.6; 345 is four of them above the mean."""
    bits = make(Noise(*key).bits(2**19))
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((bits >> shift) & 0xFF, minlength=256).double()
        expected = 2**19 / 256
        assert 165 < float(((counts - expected) ** 2 / expected).sum()) < 345


def test_pairs_of_neighbours_are_uniform() -> None:
    """The upper four bits of an element beside those of the next, and the lower ones: 256 kinds of pairs."""
    bits = Noise(2, 7, 1).bits(2**20)
    for shift in (0, 28):
        nibble = (bits >> shift) & 0xF
        counts = torch.bincount(nibble[0::2] * 16 + nibble[1::2], minlength=256).double()
        expected = 2**19 / 256
        assert 165 < float(((counts - expected) ** 2 / expected).sum()) < 345


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 64, 128, 1024, 65536])
def test_no_correlation_with_a_later_element(lag: int) -> None:
    bits = Noise(0, 3, 10).bits(2**20 + lag)
    assert abs(correlation(bits[lag:], bits[:-lag])) < 4


@pytest.mark.parametrize(
    "other",
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2**31, 0, 0), (0, 2**31, 0), (0, 0, 2**31), (1, 1, 0), (0, 1, 1), (1, 0, 1), (3, 3, 3), (0, 0, 1000)],
)
def test_streams_are_independent(other: tuple[int, int, int]) -> None:
    """Neither the numbers of two streams nor any of their 32 bits go together."""
    n = 2**18
    a, b = Noise(0, 0, 0).bits(n), Noise(*other).bits(n)
    assert abs(correlation(a, b)) < 4
    differing = torch.stack([((a ^ b) >> i) & 1 for i in range(32)]).double().mean(dim=1)
    assert float((differing - 0.5).abs().max()) < 4.5 * 0.5 / n**0.5


def test_seed_parameter_and_step_do_not_stand_for_each_other() -> None:
    keys = {Noise(seed, parameter, step).keys for seed in range(12) for parameter in range(12) for step in range(12)}
    assert len(keys) == 12**3


def test_the_noise_of_weights_and_of_both_moments_is_independent() -> None:
    bits = Noise(5, 5, 5).bits(2**20)
    mixed = state_noise(bits)
    weights, first, second = bits & 0xFFFF, mixed & 0xFFFF, (mixed >> 16) & 0xFFFF
    spread = [(t << 16) for t in (weights, first, second)]  # sixteen bits as the upper ones of 32
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(correlation(spread[a], spread[b])) < 4
    byte = (bits & 0xFF) << 24
    assert abs(correlation(byte, spread[1])) < 4
    assert abs(correlation(byte, spread[2])) < 4


def test_state_noise_maps_different_bits_to_different_ones() -> None:
    bits = torch.arange(-(2**19), 2**19, dtype=torch.int32) * 4096 + 5
    assert state_noise(bits).unique().numel() == bits.unique().numel()
