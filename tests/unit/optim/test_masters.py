"""Masters: exact, in step with the weight, and true to what others write into it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.numerics import Noise
from halfstep.optim import HALF, AdamW, attach, detach, digest, full_values, keep, master_of

STORAGES = ["split", "split24", "kahan", "stochastic", "plain"]
HOLDING = ["split", "split24", "kahan"]  # those with something beside the weight


def weight(dtype: torch.dtype | None = torch.bfloat16, storage: str = "split", shape: tuple[int, ...] = (6, 5), seed: int = 0) -> nn.Parameter:
    p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    if dtype is not None:
        attach(p, storage, dtype)
    return p


def trained(dtype: torch.dtype = torch.bfloat16, storage: str = "split", shape: tuple[int, ...] = (6, 5)) -> nn.Parameter:
    """A weight whose master is between two 16-bit numbers, by steps."""
    p = weight(dtype, storage, shape)
    optimizer = AdamW([p], lr=1e-3)
    for seed in range(3):
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        optimizer.step()
    p.grad = None
    return p


def master(p: Tensor) -> Tensor:
    found = master_of(p)
    assert found is not None
    return found.read()


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.abs().double() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-11) + 2.0**-25


# --- making and taking off


@pytest.mark.parametrize("dtype", HALF)
def test_a_split_master_is_the_fp32_weight_exactly(dtype: torch.dtype) -> None:
    p = weight(None)
    before = p.detach().clone()
    made = attach(p, "split", dtype)
    assert p.dtype == dtype
    assert torch.equal(p.detach(), before.to(dtype))
    assert torch.equal(made.read(), before)
    assert master_of(p) is made
    assert p.halfstep_master is made
    detach(p)
    assert p.dtype == torch.float32
    assert torch.equal(p.detach(), before)
    assert master_of(p) is None


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", STORAGES)
def test_taking_a_master_off_leaves_exactly_its_value(storage: str, dtype: torch.dtype) -> None:
    p = trained(dtype, storage)
    expected = master(p)
    assert torch.equal(full_values(p), expected)
    detach(p)
    assert p.dtype == p.grad_dtype == torch.float32
    assert torch.equal(p.detach(), expected)
    detach(p)  # nothing to do
    assert torch.equal(p.detach(), expected)
    attach(p, storage, dtype)  # split24 rounds to nearest without noise, which is where it stands
    assert torch.equal(full_values(p), expected)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", STORAGES)
def test_16_bit_weights_keep_their_bits(storage: str, dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.randn(9).to(dtype))
    before, address = p.detach().clone(), p.data_ptr()
    made = attach(p, storage, torch.bfloat16 if dtype == torch.float16 else torch.float16)  # the dtype is for fp32 weights only
    assert p.dtype == dtype
    assert p.data_ptr() == address
    assert torch.equal(p.detach(), before)
    assert torch.equal(made.read(), before.float())


@pytest.mark.parametrize(("storage", "each"), [("split", 2), ("split24", 1), ("kahan", 2), ("stochastic", 0), ("plain", 0)])
def test_bytes_beside_a_weight(storage: str, each: int) -> None:
    made = attach(nn.Parameter(torch.randn(7, 3)), storage, torch.bfloat16)
    assert made.nbytes() == 21 * each


def test_a_gradient_at_hand_follows_its_weight() -> None:
    p = weight(None)
    (p * 2).sum().backward()
    attach(p, "split", torch.bfloat16)
    assert p.grad is not None
    assert p.grad.dtype == torch.bfloat16
    detach(p)
    assert p.grad.dtype == torch.float32
    assert torch.equal(p.grad, torch.full((6, 5), 2.0))
    (p * 1).sum().backward()
    assert torch.equal(p.grad, torch.full((6, 5), 3.0))


def test_gradients_of_an_attached_weight_are_16_bit() -> None:
    p = weight(torch.float16)
    (p.float() * 3).sum().backward()
    assert p.grad is not None
    assert p.grad.dtype == torch.float16


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_weights_stay_frozen(frozen: bool) -> None:
    p = nn.Parameter(torch.randn(4), requires_grad=not frozen)
    attach(p, "split", torch.bfloat16)
    assert p.requires_grad is not frozen
    detach(p)
    assert p.requires_grad is not frozen


@pytest.mark.parametrize(
    ("make", "storage", "dtype", "words"),
    [
        (lambda: nn.Parameter(torch.ones(3)), "splits", torch.bfloat16, "split"),
        (lambda: nn.Parameter(torch.ones(3)), "fp32", torch.bfloat16, "fp32 masters"),
        (lambda: nn.Parameter(torch.ones(3)), "split", None, "16-bit dtype"),
        (lambda: nn.Parameter(torch.ones(3)), "split", torch.float32, "16-bit dtype"),
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.float64)), "split", torch.bfloat16, "float64"),
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), "split", torch.bfloat16, "complex64"),
        (lambda: nn.Parameter(torch.tensor([1.0, 2.0**15 + 1])), "split", torch.float16, "2\\^15"),
        (lambda: nn.Parameter(torch.tensor([2.0**15 + 32]).half()), "kahan", None, "2\\^15"),
    ],
)
def test_what_cannot_have_a_master_is_refused_and_left_alone(make: Callable[[], nn.Parameter], storage: str, dtype: torch.dtype, words: str) -> None:
    p = make()
    before, version = p.detach().clone(), p._version
    with pytest.raises(ConfigError, match=words):
        attach(p, storage, dtype)
    assert p.dtype == before.dtype
    assert p._version == version
    assert torch.equal(p.detach(), before)
    assert not hasattr(p, "halfstep_master")


def test_the_largest_fp16_weight_that_is_taken_and_bf16_without_limit() -> None:
    assert torch.equal(attach(nn.Parameter(torch.tensor([2.0**15, -(2.0**15)])), "split", torch.float16).read(), torch.tensor([32768.0, -32768.0]))
    assert torch.equal(attach(nn.Parameter(torch.tensor([1e30])), "split", torch.bfloat16).read(), torch.tensor([1e30]))


def test_a_second_master_is_the_first_and_another_storage_is_refused() -> None:
    p = weight()
    assert attach(p, "split") is master_of(p)
    with pytest.raises(ConfigError, match="split master already"):
        attach(p, "kahan")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (2, 3, 4)])
@pytest.mark.parametrize("storage", STORAGES)
def test_any_shape_has_a_master(storage: str, shape: tuple[int, ...]) -> None:
    p = trained(torch.bfloat16, storage, shape)
    values = master(p)
    assert values.shape == shape
    detach(p)
    assert torch.equal(p.detach(), values)


def test_channels_last_and_sliced_weights() -> None:
    wide = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    before = wide.detach().clone()
    made = attach(wide, "split", torch.bfloat16)
    assert wide.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made.read(), before)
    detach(wide)
    assert wide.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(wide.detach(), before)
    base = torch.randn(6, 8).bfloat16()
    untouched = base[:, 1::2].clone()
    sliced = nn.Parameter(base[:, ::2])
    attach(sliced, "split").write(torch.full((6, 4), 1 / 3))
    assert sliced.data_ptr() == base.data_ptr()
    assert torch.equal(base[:, 1::2], untouched)
    assert torch.equal(full_values(sliced), torch.full((6, 4), 1 / 3))


def test_full_values_of_weights_without_a_master_are_their_own() -> None:
    for dtype, expected in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        p = nn.Parameter(torch.randn(5).to(dtype))
        found = full_values(p)
        assert found.dtype == expected
        assert torch.equal(found, p.detach().to(expected))
        found.zero_()
        assert bool(p.detach().any())


# --- writes of the master


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_write_is_read_back_and_bumps_the_version(storage: str, dtype: torch.dtype) -> None:
    p = weight(dtype, storage)
    made, values, version = attach(p, storage), torch.randn(6, 5), p._version
    made.write(values, Noise(1, 2, 3))
    assert p._version > version
    once = made.read()
    assert torch.equal(made.read(), once)  # reading changes nothing
    assert bool(((once - values).abs() <= 2 * half_ulp(values, dtype)).all())
    if storage == "split":
        assert torch.equal(once, values)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_step_is_an_in_place_change_to_an_old_graph(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", kernels)
    for dtype in (torch.bfloat16, None):
        p = weight(dtype)
        loss = (p * p).sum()
        optimizer = AdamW([p])
        p.grad = torch.ones_like(p.detach())
        optimizer.step()
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


# --- putting back


@pytest.mark.parametrize("storage", STORAGES)
def test_putting_back_restores_weight_and_residual_bit_for_bit(storage: str) -> None:
    p = trained(storage=storage)
    values, bits = master(p), p.detach().clone()
    undo = keep(p)
    optimizer = AdamW([p], lr=0.1)
    p.grad = torch.ones_like(p.detach())
    optimizer.step()
    assert not torch.equal(p.detach(), bits)
    version = p._version
    undo()
    assert p._version > version
    assert torch.equal(p.detach(), bits)
    assert torch.equal(master(p), values)
    assert torch.equal(master(p), values)  # and no later look takes it for a stranger's write


def test_putting_back_works_on_fp32_weights_and_on_those_that_got_a_master_since() -> None:
    wide, narrow = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4).bfloat16())
    before = wide.detach().clone(), narrow.detach().clone()
    undo = [keep(wide), keep(narrow)]
    optimizer = AdamW([wide, narrow], lr=0.1)
    for p in (wide, narrow):
        p.grad = torch.ones_like(p.detach())
    optimizer.step()
    for back in undo:
        back()
    assert torch.equal(wide.detach(), before[0])
    assert torch.equal(narrow.detach(), before[1])
    assert torch.equal(master(narrow), before[1].float())


# --- digests


def test_a_digest_tells_every_bit_and_its_place() -> None:
    x = torch.randn(300).bfloat16()
    own = digest(x)
    assert digest(x.clone()) == own
    seen = {own}
    for place in range(0, 300, 7):
        for bit in range(16):
            other = x.clone()
            other.view(torch.int16)[place] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
            seen.add(digest(other))
    assert len(seen) == 1 + 16 * len(range(0, 300, 7))
    swapped = x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    assert digest(swapped) != own
    assert digest(x.view(20, 15).t().contiguous().t()) == own  # whatever the strides
    assert digest(torch.empty(0).bfloat16()) == digest(torch.empty(0, 3).half())
