"""Weights and states to fp32 and back: the compiled twins give the bits of the plain definitions."""

import pytest
import torch

from halfstep.kernels import weight_kernels
from halfstep.numerics import Noise
from halfstep.optim.codec import CODECS, SCALE, noise_of
from halfstep.optim.storage import STORAGES, draw

SIZES = (0, 1, 127, 128, 129, 5000, 70000)
NOISE = Noise(3, 5, 7)


def numbers(count: int) -> torch.Tensor:
    """Of every size that fp16 knows, with zeros of both signs."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-26, 9, (count,), generator=generator)
    x[::17] = 0.0
    x[1::17] = -0.0
    return x


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.fixture
def kernels():
    found = weight_kernels(torch.zeros(()))
    assert found is not None, "numba is among the requirements of the tests"
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [s for s in STORAGES if s != "fp32"])
def test_weights(kernels, name, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in SIZES:
            x, storage = numbers(count), STORAGES[name]
            weight, residual = storage.parts(x, dtype, draw(storage, NOISE, x))
            twin, beside = torch.empty_like(weight), None if residual is None else torch.empty_like(residual)
            kernels.write_weight(x, twin, name, beside, NOISE.keys)
            assert torch.equal(bits(twin), bits(weight)), count
            assert residual is None or torch.equal(bits(beside), bits(residual)), count
            assert torch.equal(bits(kernels.read_weight(weight, name, residual)), bits(storage.read(weight, residual))), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("role", ["first", "second"])
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_states(kernels, name, role):
    for count in SIZES:
        values = numbers(count) if role == "first" else numbers(count).square()
        parts = CODECS[name].encode(values, role, noise_of(NOISE.bits(count, "cpu"), role))
        codes, scales = kernels.encode_state(values, role, name, NOISE.keys)
        assert torch.equal(bits(codes), bits(parts[""])), count
        assert (scales is None) == (SCALE not in parts)
        assert scales is None or torch.equal(bits(scales), bits(parts[SCALE])), count
        assert torch.equal(kernels.decode_state(codes, scales, role, values.shape), CODECS[name].decode(parts, role, values.shape)), count


def test_what_lies_otherwise_in_memory_is_left_to_the_definitions(kernels):
    plain = torch.zeros(4, 6)
    assert kernels.takes(plain, None)
    assert not kernels.takes(plain.t())
    assert not kernels.takes(plain[:, ::2])
    assert not kernels.takes(torch.zeros(4, device="meta"))
