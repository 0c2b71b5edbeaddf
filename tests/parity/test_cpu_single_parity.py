"""The compiled SGD and Lion against the plain definitions, bit for bit: every storage, codec and gradient format, sizes around the block."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from plain_step import CODECS, HALF, STORAGES, Weight, different, raw
from torch import Tensor

pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'halfstep[cpu]'")
from halfstep.kernels import cpu
from halfstep.kernels.items import Item
from halfstep.numerics import LionStep, SGDStep
from halfstep.numerics.updates import Settings

SIZES = (0, 1, 127, 128, 129, 1000)
GRADIENTS = (torch.float32, *HALF)
SEED = 7
Kind = tuple[str, torch.dtype, tuple[str, ...], int]


def rule_at(rule: str, step: int, turned: bool = False) -> Settings:
    """The settings of step 1, 2, ... under each rule."""
    if rule == "lion":
        return LionStep(3e-3, 0.9, 0.99, 0.1, turned)
    if rule == "plain sgd":
        return SGDStep(1e-2, weight_decay=0.1, maximize=turned)
    return SGDStep(1e-2, 0.9, 0.0 if rule == "nesterov" else 0.25, 0.1, rule == "nesterov", step == 1, turned)


def drawn(size: int, generator: torch.Generator, low: int, high: int) -> Tensor:
    """Numbers over many magnitudes, with zeros of both signs among them."""
    values = torch.randn(size, generator=generator) * 2.0 ** torch.randint(low, high, (size,), generator=generator)
    values[::17] = 0.0
    values[5::17] = -0.0
    return values


def make(kinds: list[Kind], generator: torch.Generator) -> list[Weight]:
    return [Weight(storage, dtype, codecs, n).fill(drawn(size, generator, -20, 3)) for n, (storage, dtype, codecs, size) in enumerate(kinds)]


def check(rule: str, weights: list[Weight], gradients: list[list[Tensor]], factors: list[float], turned: bool = False) -> list[Item]:
    """Take the same steps both ways; the items that the kernel changed."""
    items = [weight.item() for weight in weights]
    plan = cpu.Plan(items, SEED, "lion" if rule == "lion" else "sgd")
    for step, factor in enumerate(factors):
        settings = rule_at(rule, step + 1, turned)
        plan.run(gradients[step], [settings] * len(items), factor, step)
        for weight, gradient in zip(weights, gradients[step], strict=True):
            weight.step(gradient, settings, factor, SEED, step)
        found = [line for line in map(different, items, weights) if line]
        assert not found, f"step {step + 1}: {found[0]} (and {len(found) - 1} other weights)"
    return items


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(("storage", "dtype"), STORAGES)
@pytest.mark.parametrize("rule", ["plain sgd", "momentum", "nesterov", "lion"])
def test_every_storage_and_codec_has_the_bits_of_the_plain_step(rule: str, storage: str, dtype: torch.dtype, gradient: torch.dtype) -> None:
    """Steps with a loss scale alone, with neither scale nor clip, with both, and with a clip alone."""
    generator = torch.Generator().manual_seed(1)
    codecs = [()] if rule == "plain sgd" else [(codec,) for codec in CODECS]
    kinds = [(storage, dtype, codec, size) for codec in codecs for size in SIZES]
    gradients = [[drawn(kind[3], generator, -14, 8).to(gradient) for kind in kinds] for _ in range(4)]
    check(rule, make(kinds, generator), gradients, [2.0**-10, 1.0, 0.37 * 2.0**-10, 0.37], turned=gradient == torch.float32)


def mixed() -> list[Kind]:
    """Weights of every storage in one call, of sizes from 0 to more than a chunk."""
    sizes = (0, 70000, 1, 4096, 129, 66000, 513, 128, 8191, 3, 65537)
    codecs = (*product(CODECS),) * 4
    return [(storage, dtype, codec, size) for (storage, dtype), codec, size in zip(STORAGES, codecs, sizes, strict=False)]


@pytest.mark.parametrize("rule", ["momentum", "lion"])
def test_many_weights_in_one_call_have_the_bits_of_the_plain_steps_on_any_number_of_threads(rule: str) -> None:
    found = []
    for threads in (1, 3):
        generator, before = torch.Generator().manual_seed(3), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            weights = make(mixed(), generator)
            gradients = [[drawn(kind[3], generator, -14, 8).to(GRADIENTS[(n + s) % 3]) for n, kind in enumerate(mixed())] for s in range(2)]
            found.append([t for item in check(rule, weights, gradients, [0.25, 0.5]) for t in raw(item)])
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("codec", CODECS)
def test_a_signed_state_of_all_magnitudes_is_encoded_alike(codec: str) -> None:
    generator = torch.Generator().manual_seed(11)
    magnitudes = 2.0 ** torch.randint(-120, 60, (64, 1), generator=generator).float()
    rows = torch.randn(64, 160, generator=generator) * magnitudes * 2.0 ** torch.randint(-30, 1, (64, 160), generator=generator).float()
    rows[5], rows[6] = 0.0, magnitudes[6]
    gradient = rows.reshape(-1)
    weights = [Weight("fp32", torch.float32, (codec,), number).fill(torch.zeros_like(gradient)) for number in range(4)]
    check("momentum", weights, [[gradient * sign] * 4 for sign in (1, 0.5, 0, -1)], [1.0] * 4)


@pytest.mark.parametrize("rule", ["momentum", "nesterov", "plain sgd", "lion"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_makes_the_weight_none(rule: str, bad: float) -> None:
    """The verdict keeps it away; a bare step hides nothing."""
    item = Item(torch.ones(3), "fp32", None, None if rule == "plain sgd" else torch.zeros(3))
    cpu.Plan([item], rule="lion" if rule == "lion" else "sgd").run([torch.tensor([bad, 1.0, bad])], [rule_at(rule, 2)])
    stays = rule == "lion" and bad == float("inf")  # an infinite gradient has a sign
    assert item.weight.isfinite().tolist() == [stays, True, stays]
    assert item.first is None or item.first.isfinite().tolist() == [False, True, False]  # type: ignore[union-attr]
