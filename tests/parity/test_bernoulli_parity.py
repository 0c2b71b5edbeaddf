"""Dropout drawn by compiled code: the numbers of torch's, and its generator in the same state."""

import threading

import pytest
import torch

from halfstep.kernels import bernoulli_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def kernels():
    pytest.importorskip("numba")
    found = bernoulli_kernels()
    assert found is not None
    if not found.is_torchs():
        pytest.skip("torch draws by MKL on this CPU")
    return found


def twins(seed=0, before=0):
    pair = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for generator in pair:
        torch.empty(before).uniform_(generator=generator)
    return pair


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", [0, 1, 2, 311, 312, 622, 623, 624, 625, 1000])
def test_numbers_and_state_wherever_the_generator_stands(kernels, dtype, before):
    for count in (0, 1, 2, 311, 312, 313, 624, 5000):
        ours, torchs = twins(count, before)
        found, expected = torch.full((count,), 7, dtype=dtype), torch.empty(count, dtype=dtype)
        for _ in range(3):
            kernels.fill(found, 0.7, torch.ones(1, dtype=dtype), ours)
            expected.bernoulli_(0.7, generator=torchs)
            assert torch.equal(found, expected)
            assert torch.equal(ours.get_state(), torchs.get_state())
        assert torch.equal(torch.randn(5, generator=ours), torch.randn(5, generator=torchs))


def test_probabilities_at_the_ends_of_what_fp64_tells_apart(kernels):
    shares = [2.0**-53, 3 * 2.0**-54, 1e-300, 5e-324, 2.0**-21, 2.0**-21 + 2.0**-53, 0.5 - 2.0**-54, 0.5, 1 - 2.0**-53, 1.0]
    shares += torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    for seed, share in enumerate(shares):
        ours, torchs = twins(seed)
        found = torch.empty(3000)
        kernels.fill(found, share, torch.ones(1), ours)
        assert torch.equal(found, torch.empty(3000).bernoulli_(share, generator=torchs)), share


def test_the_normal_number_that_waits_in_a_generator_stays_there(kernels):
    ours, torchs = twins()
    for generator in (ours, torchs):
        torch.randn(1, generator=generator)  # made in pairs: one is kept
    kernels.fill(torch.empty(700), 0.5, torch.ones(1), ours)
    torch.empty(700).bernoulli_(0.5, generator=torchs)
    assert torch.equal(torch.randn(3, generator=ours), torch.randn(3, generator=torchs))


def test_a_machine_on_which_torch_draws_otherwise_is_noticed(kernels, monkeypatch):
    kernels.is_torchs.cache_clear()
    draw = kernels.draw_numbers

    def other(state, limit, *about):
        draw(state, limit - 2**47, *about)

    monkeypatch.setattr(kernels, "draw_numbers", other)
    try:
        assert not kernels.is_torchs()
    finally:
        kernels.is_torchs.cache_clear()


def test_threads_that_draw_at_the_same_time_share_one_stream(kernels):
    """Each number takes two words of the generator, whoever draws it: at the end it has moved on by all of them, and no two masks are equal."""
    count, rounds, shared = 200_000, 25, torch.Generator().manual_seed(1)
    masks, barrier = [], threading.Barrier(3)

    def ours():
        barrier.wait()
        for _ in range(rounds):
            out = torch.empty(count)
            kernels.fill(out, 0.5, torch.ones(1), shared)
            masks.append(out)

    def torchs():
        barrier.wait()
        for _ in range(rounds):
            masks.append(torch.empty(count).bernoulli_(0.5, generator=shared))

    threads = [threading.Thread(target=target) for target in (ours, ours, torchs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len({mask.numpy().tobytes() for mask in masks}) == 3 * rounds
    alone = torch.Generator().manual_seed(1)
    torch.empty(3 * rounds * count).bernoulli_(0.5, generator=alone)
    assert torch.equal(shared.get_state(), alone.get_state())
