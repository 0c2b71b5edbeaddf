"""Storages: what each keeps of an fp32 number, over whole formats where that is possible."""

import pytest
import torch
from torch import Tensor

from halfstep.numerics import Noise
from halfstep.optim import HALF, STORAGES
from halfstep.optim.storage import draw

NARROW = [name for name in STORAGES if name != "fp32"]
BESIDE = {"split": 2, "split24": 1, "kahan": 2, "stochastic": 0, "plain": 0}  # bytes per weight


def every(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a 16-bit format."""
    found = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return found[found.isfinite()]


def spread(dtype: torch.dtype, count: int = 20_000) -> Tensor:
    """fp32 numbers over the range in which `dtype` is normal."""
    low, high = (-13.0, 14.0) if dtype == torch.float16 else (-100.0, 100.0)
    exponents = torch.empty(count).uniform_(low, high)
    return torch.exp2(exponents) * torch.where(torch.rand(count) < 0.5, -1.0, 1.0)


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours in `dtype` at normal numbers `x`."""
    return torch.exp2(x.abs().double().log2().floor() - (10 if dtype == torch.float16 else 7))


def test_a_storage_is_found_under_its_own_name() -> None:
    assert {name: storage.name for name, storage in STORAGES.items()} == {name: name for name in STORAGES}
    assert list(STORAGES) == ["fp32", "split", "split24", "kahan", "stochastic", "plain"]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NARROW)
def test_bytes_beside_a_weight_are_those_of_its_residual_dtype(name: str, dtype: torch.dtype) -> None:
    kept = STORAGES[name].residual_dtype(dtype)
    assert (kept.itemsize if kept is not None else 0) == BESIDE[name]
    weight, residual = STORAGES[name].parts(torch.randn(3, 5), dtype, None)
    assert weight.dtype == dtype
    assert weight.shape == (3, 5)
    assert (residual.dtype, residual.shape) == (kept, weight.shape) if residual is not None else kept is None


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NARROW)
def test_a_residual_of_zero_means_the_weight_itself_for_every_16_bit_number(name: str, dtype: torch.dtype) -> None:
    storage, weight = STORAGES[name], every(dtype)
    kept = storage.residual_dtype(dtype)
    master = storage.read(weight, None if kept is None else torch.zeros(weight.shape, dtype=kept))
    assert master.dtype == torch.float32
    assert torch.equal(master, weight.float())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NARROW)
def test_every_16_bit_number_is_kept_exactly(name: str, dtype: torch.dtype) -> None:
    storage, weight = STORAGES[name], every(dtype)
    bits = Noise(1, 2, 3).bits(weight.numel())
    for noise in (None, bits):
        new, residual = storage.parts(weight.float(), dtype, noise)
        assert torch.equal(new, weight)
        assert torch.equal(storage.read(new, residual), weight.float())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_what_a_storage_loses_of_a_normal_number_is_bounded(name: str, noisy: bool, dtype: torch.dtype) -> None:
    storage, x = STORAGES[name], spread(dtype)
    weight, residual = storage.parts(x, dtype, Noise(0, 0, 0).bits(x.numel()) if noisy else None)
    step = torch.maximum(ulp(x, dtype), ulp(weight.double(), dtype))  # below a power of two that x rounds to, residuals count in its ulp
    off = (storage.read(weight, residual).double() - x.double()).abs() / step
    whole = noisy and name == "stochastic"
    kahan = 2.0**-11 if dtype == torch.bfloat16 else 2.0**-10  # of an ulp: 2^-18 and 2^-24 of the number, in fp16 at least 2^-25
    if name == "kahan" and dtype == torch.float16:
        off = (off - 2.0**-25 / step).clamp(min=0)
    bound = {"split": 2.0**-16, "split24": 2.0**-8 if noisy else 2.0**-9, "kahan": 2 * kahan, "stochastic": 1.0 if whole else 0.5, "plain": 0.5}
    assert float(off.max()) <= bound[name]
    if name == "split":
        assert float((off == 0).double().mean()) > 0.999


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["split", "kahan", "plain"])
def test_the_weight_is_what_a_cast_gives(name: str, dtype: torch.dtype) -> None:
    x = torch.cat((spread(dtype), every(dtype).float() * 1.001))
    x = x[x.abs() < torch.finfo(dtype).max]
    assert torch.equal(STORAGES[name].parts(x, dtype, None)[0].view(torch.int16), x.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("name", "draws"), [("stochastic", 2**16), ("split24", 2**8)])
def test_over_all_noise_the_mean_is_the_number_itself(name: str, draws: int, dtype: torch.dtype) -> None:
    storage = STORAGES[name]
    for value in (0.3, -1.7, 1.0 + 2.0**-9 + 2.0**-20, -3.14159, 1.99999):
        x = torch.full((draws,), value)
        weight, residual = storage.parts(x, dtype, torch.arange(draws, dtype=torch.int32))
        mean = storage.read(weight, residual).double().mean()
        assert abs(float(mean) - float(x[0])) <= 2.0**-15 * float(ulp(x[:1], dtype)), (value, float(mean))


def test_only_the_storages_that_round_by_chance_draw_noise() -> None:
    x, noise = torch.randn(6, 4), Noise(3, 1, 2)
    drawn = {name: draw(storage, noise, x) for name, storage in STORAGES.items()}
    assert {name for name, bits in drawn.items() if bits is not None} == {"split24", "stochastic"}
    assert drawn["split24"] is not None
    assert torch.equal(drawn["split24"].reshape(-1), noise.bits(24))
    assert all(draw(storage, None, x) is None for storage in STORAGES.values())


@pytest.mark.parametrize("name", ["split24", "stochastic"])
def test_the_same_noise_gives_the_same_bits_and_another_step_others(name: str) -> None:
    storage, x = STORAGES[name], torch.randn(1000)

    def written(step: int) -> list[Tensor | None]:
        return list(storage.parts(x, torch.bfloat16, draw(storage, Noise(0, 0, step), x)))

    first, again, later = written(1), written(1), written(2)
    assert all(a is None or torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(a is not None and not torch.equal(a, b) for a, b in zip(first, later, strict=True))


@pytest.mark.parametrize("name", NARROW)
def test_what_is_read_shares_no_memory_with_the_weight(name: str) -> None:
    storage = STORAGES[name]
    weight, residual = storage.parts(torch.randn(5), torch.bfloat16, None)
    before = weight.clone()
    storage.read(weight, residual).zero_()
    assert torch.equal(weight, before)


def test_fp32_keeps_everything_and_reads_a_copy() -> None:
    x = torch.randn(7)
    weight, residual = STORAGES["fp32"].parts(x, torch.bfloat16, None)
    assert residual is None
    assert torch.equal(weight, x)
    STORAGES["fp32"].read(weight, None).zero_()
    assert bool(x.any())
