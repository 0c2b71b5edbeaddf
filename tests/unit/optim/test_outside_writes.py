"""Masters follow what others do to their weights: values written, states loaded, other dtypes and memory formats."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.optim import HALF, AdamW, attach, full_values, master_of, refresh, wrap

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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_stock_optimizer_does_not_step_past_a_master(kind: type[torch.optim.Optimizer]) -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    attach(p, "split")
    stock = kind([p], lr=1e-3)
    p.grad = torch.ones(4).bfloat16()
    with pytest.raises(ConfigError, match=r"bfloat16 weight of shape \(4,\), past its split master.*halfstep.optim.wrap"):
        stock.step()
    assert torch.equal(p.detach(), torch.ones(4).bfloat16())
    wrap(stock).step()
    assert bool((full_values(p) < 1).all())


class Every(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_around_one_of_ours_may_step() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    around = Every(AdamW([p], lr=1e-5))
    p.grad = torch.ones(4).bfloat16()
    around.step()
    with pytest.warns(UserWarning, match="a Every steps around an optimizer of halfstep's"):
        around.step()
    around.step()  # said once
    assert bool((full_values(p) < 1 - 2e-5).all())


def test_a_stock_optimizer_may_step_weights_that_were_asked_to_be_plain() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    attach(p, "plain")
    p.grad = torch.ones(4).bfloat16()
    torch.optim.SGD([p], lr=0.5).step()
    assert torch.equal(p.detach(), torch.full((4,), 0.5).bfloat16())
