"""The compiled AdamW against the plain definitions, bit for bit: every storage, codec and gradient format, sizes around the block, several steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from plain_step import CODECS, STORAGES, Weight, different
from torch import Tensor

pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'halfstep[cpu]'")
from halfstep.kernels import cpu

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
    return [
        Weight(storage, dtype, codecs, number).fill(weights_of(size, generator)) for number, (storage, dtype, codecs, size) in enumerate(kinds)
    ]


def check(weights: list[Weight], gradients: list[list[Tensor]], settings: list[list[cpu.Step]], factors: list[float]) -> list[cpu.Item]:
    """Take the same steps both ways; the items that the kernel changed."""
    items = [weight.item() for weight in weights]
    plan = cpu.Plan(items, SEED)
    for step, factor in enumerate(factors):
        plan.run(gradients[step], settings[step], factor)
        for weight, gradient, setting in zip(weights, gradients[step], settings[step], strict=True):
            weight.step(gradient, setting, factor, SEED)
        found = [line for line in map(different, items, weights) if line]
        assert not found, f"step {step + 1}: {found[0]} (and {len(found) - 1} other weights)"
    return items


@pytest.mark.parametrize("gradient", FORMATS)
@pytest.mark.parametrize(("storage", "dtype"), STORAGES)
def test_every_storage_and_codec_has_the_bits_of_the_plain_step(storage: str, dtype: torch.dtype, gradient: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = [(storage, dtype, codecs, size) for codecs in product(CODECS, CODECS) for size in SIZES]
    weights = make(kinds, generator)
    gradients = [[gradient_of(kind[3], gradient, generator) for kind in kinds] for _ in range(3)]
    settings = [[cpu.Step(3e-3, 0.9, 0.99, 1e-8, 0.1, step)] * len(kinds) for step in (1, 2, 3)]
    check(weights, gradients, settings, [2.0**-10, 1.0, 0.37 * 2.0**-10])
