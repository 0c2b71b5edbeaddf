"""The compiled AdamW against the plain definitions, bit for bit: every storage, codec and gradient format, sizes around the block, several steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from plain_step import CODECS, STORAGES, Weight, different, raw
from torch import Tensor

pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'halfstep[cpu]'")
from halfstep.kernels import cpu
from halfstep.kernels.items import Item
from halfstep.numerics import AdamWStep

SIZES = (0, 1, 7, 127, 128, 129, 5000)
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
SEED = 7


def weights_of(size: int, generator: torch.Generator) -> Tensor:
    """fp32 weights over many magnitudes, with zeros of both signs among them."""
    values = torch.randn(size, generator=generator) * 2.0 ** torch.randint(-20, 3, (size,), generator=generator)
    values[::17] = 0.0
    values[5::17] = -0.0
    return values


def gradient_of(size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Gradients over many magnitudes, as a loss scale of 1024 leaves them, with zeros; the first block of some is 0 altogether."""
    values = torch.randn(size, generator=generator) * 2.0 ** torch.randint(-14, 8, (size,), generator=generator)
    values[3::5] = 0.0
    values[: 128 if size > 128 and torch.rand((), generator=generator) < 0.5 else 0] = 0.0
    return values.to(dtype)


def make(kinds: list[tuple[str, torch.dtype, tuple[str, str], int]], generator: torch.Generator) -> list[Weight]:
    """Weights of these storages, dtypes, codecs and sizes."""
    return [Weight(storage, dtype, codecs, number).fill(weights_of(size, generator)) for number, (storage, dtype, codecs, size) in enumerate(kinds)]


def check(weights: list[Weight], gradients: list[list[Tensor]], settings: list[list[AdamWStep]], factors: list[float]) -> list[Item]:
    """Take the same steps both ways; the items that the kernel changed."""
    items = [weight.item() for weight in weights]
    plan = cpu.Plan(items, SEED)
    for step, factor in enumerate(factors):
        plan.run(gradients[step], settings[step], factor, step)
        for weight, gradient, setting in zip(weights, gradients[step], settings[step], strict=True):
            weight.step(gradient, setting, factor, SEED, step)
        found = [line for line in map(different, items, weights) if line]
        assert not found, f"step {step + 1}: {found[0]} (and {len(found) - 1} other weights)"
    return items


@pytest.mark.parametrize("gradient", FORMATS)
@pytest.mark.parametrize(("storage", "dtype"), STORAGES)
def test_every_storage_and_codec_has_the_bits_of_the_plain_step(storage: str, dtype: torch.dtype, gradient: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = [(storage, dtype, codecs, size) for codecs in product(CODECS, CODECS) for size in SIZES]
    weights = make(kinds, generator)
    gradients = [[gradient_of(kind[3], gradient, generator) for kind in kinds] for _ in range(4)]
    settings = [[AdamWStep(3e-3, 0.9, 0.99, 1e-8, 0.1, step)] * len(kinds) for step in (1, 2, 3, 4)]
    check(weights, gradients, settings, [2.0**-10, 1.0, 0.37 * 2.0**-10, 0.37])  # a scale alone, neither, a scale and a clip, a clip alone


def mixed() -> list[tuple[str, torch.dtype, tuple[str, str], int]]:
    """Weights of every storage in one call, of sizes from 0 to more than a chunk."""
    sizes = (0, 70000, 1, 4096, 129, 66000, 513, 128, 8191, 3, 65537)
    codecs = (*product(CODECS, CODECS), ("int8", "int8"), ("bf16", "int8"))
    return [(storage, dtype, codec, size) for (storage, dtype), codec, size in zip(STORAGES, codecs, sizes, strict=True)]


def mixed_run(threads: int) -> tuple[list[Weight], list[Item]]:
    """Four steps of `mixed()`: settings and gradient formats differ from weight to weight, and one step goes without some gradients."""
    generator = torch.Generator().manual_seed(3)
    weights = make(mixed(), generator)
    items = [weight.item() for weight in weights]
    plan, before = cpu.Plan(items, SEED), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(1, 5):
            gradients = [gradient_of(kind[3], FORMATS[(number + step) % 3], generator) for number, kind in enumerate(mixed())]
            given = [None if step == 3 and number % 3 == 1 else gradient for number, gradient in enumerate(gradients)]
            settings = [AdamWStep(1e-3 * (1 + number), 0.9, 0.95 + 0.004 * number, 1e-6, 0.01, step, number % 2 == 1) for number in range(len(items))]
            plan.run(given, settings, 0.25, noise_step=100 + step)
            for weight, gradient, setting in zip(weights, given, settings, strict=True):
                if gradient is not None:
                    weight.step(gradient, setting, 0.25, SEED, 100 + step)
    finally:
        torch.set_num_threads(before)
    return weights, items


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_weights_in_one_call_have_the_bits_of_the_plain_steps_on_any_number_of_threads(threads: int) -> None:
    weights, items = mixed_run(threads)
    assert [line for line in map(different, items, weights) if line] == []


def test_two_runs_have_the_same_bits() -> None:
    one, other = (mixed_run(2)[1] for _ in range(2))
    assert all(torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(raw(left), raw(right), strict=True))


@pytest.mark.parametrize(("storage", "dtype"), STORAGES[1:])
def test_every_finite_weight_with_every_kind_of_residual_is_read_and_written_alike(storage: str, dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    codes = codes[codes.view(dtype).isfinite()]
    generator = torch.Generator().manual_seed(5)
    weights = []
    for number, edge in enumerate((-(2**15), -1, 0, 1, 2**15 - 1, None, None)):
        weight = Weight(storage, dtype, ("fp32", "fp32"), number).fill(torch.zeros(len(codes)))
        weight.weight = codes.view(dtype).clone()
        low = torch.randint(-(2**15), 2**15, codes.shape, generator=generator) if edge is None else torch.full(codes.shape, edge)
        if storage == "split":
            weight.residual = low.to(torch.int16)
        elif storage == "split24":
            weight.residual = (low >> 8).to(torch.int8)
        elif storage == "kahan":  # a compensation is at most half an ulp: zero where its code would be no number
            weight.residual = low.to(torch.int16).view(dtype).nan_to_num(0.0, 0.0, 0.0)
        weights.append(weight)
    gradient = torch.zeros(len(codes))
    check(weights, [[gradient] * len(weights)], [[AdamWStep(0.0, 0.9, 0.999, 1e-8, 0.0, 1)] * len(weights)], [1.0])


@pytest.mark.parametrize("codecs", list(product(CODECS, CODECS)))
def test_moments_of_all_magnitudes_are_encoded_alike(codecs: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(11)
    magnitudes = 2.0 ** torch.randint(-120, 60, (64, 1), generator=generator).float()
    rows = torch.randn(64, 160, generator=generator) * magnitudes * 2.0 ** torch.randint(-30, 1, (64, 160), generator=generator).float()
    rows[5], rows[6] = 0.0, magnitudes[6]
    gradient = rows.reshape(-1)
    weights = [Weight("fp32", torch.float32, codecs, number).fill(torch.zeros_like(gradient)) for number in range(4)]
    steps = [[AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, step)] * 4 for step in range(1, 5)]
    check(weights, [[gradient * sign] * 4 for sign in (1, 0.5, 0, -1)], steps, [1.0] * 4)


def test_codes_of_a_moment_between_two_levels_follow_the_noise_of_every_value() -> None:
    gradient = torch.full((2**16,), 0.3).index_fill(0, torch.arange(0, 2**16, 128), 1.0)
    weights = [Weight("fp32", torch.float32, ("int8", "int8"), number).fill(torch.zeros_like(gradient)) for number in range(3)]
    items = check(weights, [[gradient] * 3], [[AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 1)] * 3], [1.0])
    for item in items:
        for state in (item.first, item.second):
            assert len(set(state[0].tolist())) == 3, "the block's largest, and two levels that the others are spread over"
