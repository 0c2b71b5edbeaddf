"""Masters: exact, in step with the weight, and true to what others write into it."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.numerics import Noise
from halfstep.optim import HALF, AdamW, attach, detach, digest, full_values, keep, master_of, refresh

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


# --- writes of others


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "fill_": lambda p: p.fill_(0.3),
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p)),
    "mul_": lambda p: p.mul_(0.5),
    "zero_": lambda p: p.zero_(),
    "clamp_": lambda p: p.clamp_(-0.4, 0.4),
    "row": lambda p: p[1].fill_(7.0),
    "detached": lambda p: p.detach().add_(1.0),
    "init": lambda p: nn.init.normal_(p),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.5),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", WRITES)
def test_what_others_write_is_the_master_from_then_on(way: str, storage: str, dtype: torch.dtype) -> None:
    p = trained(dtype, storage)
    with torch.no_grad():
        WRITES[way](p)
    assert torch.equal(master(p), p.detach().float())
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0)
    written = p.detach().float()
    p.grad = torch.ones_like(p.detach())
    optimizer.step()
    moved = written - master(p)  # by lr, up to what the storage rounds: an ulp with chance, half an ulp without a residual
    coarse = 2 * half_ulp(written.abs() + 1e-3, dtype)
    assert bool(((moved - 1e-3).abs() <= (coarse if storage in ("stochastic", "plain") else coarse / 128 + 2.0**-23)).all())


@pytest.mark.parametrize("storage", HOLDING)
def test_from_the_second_write_on_only_what_changed_loses_its_residual(storage: str) -> None:
    p = trained(storage=storage, shape=(40, 5))
    made = attach(p, storage)
    alone = made.nbytes()
    with torch.no_grad():
        p[0].fill_(0.5)
    made.read()
    assert made.nbytes() == alone + 2 * p.numel()
    optimizer = AdamW([p], lr=1e-3)
    p.grad = torch.ones_like(p.detach())
    optimizer.step()
    before = master(p)
    assert not torch.equal(before, p.detach().float())
    with torch.no_grad():
        p[1].fill_(0.25)
    after = master(p)
    others = torch.arange(40) != 1
    assert torch.equal(after[others], before[others])
    assert torch.equal(after[1], torch.full((5,), 0.25))
    with torch.no_grad():
        p.copy_(p.detach().clone())  # a write of the same values
    assert torch.equal(master(p), after)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("storage", HOLDING)
def test_weights_that_are_clamped_after_every_step_move_as_fp32_weights_do(storage: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", kernels)
    start = torch.linspace(-0.5, 0.5, 400).bfloat16()
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    attach(narrow, storage)
    ours, theirs = AdamW([narrow], lr=2e-5, weight_decay=0.0), AdamW([wide], lr=2e-5, weight_decay=0.0)
    for step in range(60):
        gradient = torch.randn(400, generator=torch.Generator().manual_seed(step)) * 0.1 + 1.0
        narrow.grad, wide.grad = gradient.bfloat16(), gradient.bfloat16().float()
        ours.step()
        theirs.step()
        with torch.no_grad():
            narrow.clamp_(-0.45, 0.45)
            wide.clamp_(-0.45, 0.45)
    inside = start.float().abs() < 0.44
    moved, expected = (master(narrow) - start.float())[inside], (wide.detach() - start.float())[inside]
    # the first write clears all residuals: of one step. Afterwards they are kept
    assert float((moved - expected).abs().mean()) < 0.1 * float(expected.abs().mean())
    assert float(narrow.detach().float().abs().max()) <= 0.4501


def test_a_loaded_state_is_the_master() -> None:
    net = nn.Linear(4, 3)
    for p in net.parameters():
        attach(p, "split", torch.bfloat16)
    other = nn.Linear(4, 3).bfloat16()
    net.load_state_dict(other.state_dict())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(master(p), q.detach().float())


def test_writes_through_data_are_seen_when_refreshed() -> None:
    net = nn.Linear(4, 3)
    for p in net.parameters():
        attach(p, "split", torch.bfloat16)
    for p in net.parameters():
        p.data.fill_(1.0)
    stale = master(net.weight)
    assert bool(((stale - 1.0).abs() <= 2.0**-8).all())  # half an ulp at the most, as documented
    assert not torch.equal(stale, torch.ones(3, 4))
    assert refresh(net) == 2
    assert torch.equal(master(net.weight), torch.ones(3, 4))
    assert torch.equal(master(net.bias), torch.ones(3))
    assert refresh([nn.Parameter(torch.ones(2))]) == 0


def test_tied_weights_have_one_master() -> None:
    embedding = nn.Embedding(5, 4)
    head = nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    attach(embedding.weight, "split", torch.bfloat16)
    assert master_of(head.weight) is master_of(embedding.weight)
    optimizer = AdamW(nn.ModuleList((embedding, head)).parameters(), lr=1e-3)
    assert len(optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize("written", [False, True])
def test_a_compensation_that_is_nan_goes_with_the_write_that_mends_the_weight(written: bool) -> None:
    p = weight(torch.bfloat16, "kahan")
    made = attach(p, "kahan")
    if written:
        with torch.no_grad():
            p.mul_(1.0)
        made.read()
    made.write(torch.full((6, 5), math.nan))
    with torch.no_grad():
        p.fill_(1.0)
    assert torch.equal(made.read(), torch.ones(6, 5))


# --- other dtypes and memory formats


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_model_cast_up_has_the_masters_exactly(wide: torch.dtype, storage: str, dtype: torch.dtype) -> None:
    net = nn.Linear(5, 4)
    for p in net.parameters():
        attach(p, storage, dtype)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    for p in net.parameters():
        p.grad = torch.randn(p.shape).to(dtype)
    optimizer.step()
    optimizer.zero_grad()
    expected = [full_values(p) for p in net.parameters()]
    net.to(wide)
    for p, values in zip(net.parameters(), expected, strict=True):
        assert master_of(p) is None
        assert p.dtype == wide
        assert torch.equal(p.detach(), values.to(wide))
        assert not hasattr(p, "halfstep_master")


def test_a_model_cast_up_after_its_weights_were_written_has_what_was_written() -> None:
    p = trained()
    with torch.no_grad():
        p.fill_(0.3)
    p.data = p.data.float()
    assert master_of(p) is None
    assert torch.equal(p.detach(), torch.full((6, 5), 0.3).bfloat16().float())


def test_gradients_of_a_model_cast_up_are_fp32() -> None:
    net = nn.Linear(5, 4)
    for p in net.parameters():
        attach(p, "split", torch.bfloat16)
    net.float()
    assert all(master_of(p) is None for p in net.parameters())
    net(torch.full((1, 5), 1 / 3)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.float32
    assert torch.equal(net.weight.grad, torch.full((4, 5), 1 / 3))


def test_a_model_cast_to_another_16_bit_format_begins_with_its_weights() -> None:
    p = trained()
    p.data = p.data.half()
    assert master_of(p) is None
    made = attach(p, "split")
    assert torch.equal(made.read(), p.detach().float())
    (p * 1).sum().backward()
    assert p.grad is not None
    assert p.grad.dtype == torch.float16


def test_a_model_cast_to_another_16_bit_format_trains_on() -> None:
    p = trained(torch.bfloat16)
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0)
    p.data = p.data.half()
    before = p.detach().float()
    p.grad = None
    assert master_of(p) is None
    p.grad = torch.ones_like(p.detach())
    optimizer.step()
    assert p.dtype == torch.float16
    torch.testing.assert_close(before - master(p), torch.full((6, 5), 1e-3), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("storage", HOLDING)
def test_another_memory_format_moves_the_residual_along(storage: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", kernels)
    p = trained(storage=storage, shape=(4, 3, 2, 2))
    twin = copy.deepcopy((p, optimizer := AdamW([p], lr=1e-3)))[0]
    other = AdamW([twin], lr=1e-3)
    for step in range(4):
        before = master(p)
        p.data = p.data.to(memory_format=torch.channels_last if step % 2 == 0 else torch.contiguous_format)
        assert torch.equal(master(p), before)
        p.grad, twin.grad = torch.full((4, 3, 2, 2), 0.1 * step).bfloat16(), torch.full((4, 3, 2, 2), 0.1 * step).bfloat16()
        optimizer.step()
        other.step()
    assert torch.equal(master(p), master(twin))  # noise too is by place in the tensor, not in memory


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
