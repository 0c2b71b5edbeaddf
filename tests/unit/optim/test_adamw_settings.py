"""AdamW's settings: formats by name or by policy, and what cannot work is refused before anything moves."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError
from halfstep.optim import AdamW, Lion, attach, master_of, wrap
from halfstep.policy import parse


def test_masters_that_are_there_are_used_as_they_are() -> None:
    params = [nn.Parameter(torch.randn(5)) for _ in range(3)]
    for p, storage in zip(params, ("kahan", "split24"), strict=False):
        attach(p, storage, torch.bfloat16)
    masters = [master_of(p) for p in params]
    optimizer = AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p.detach())
    optimizer.step()
    assert [master_of(p) for p in params] == masters


def test_a_policy_names_both_formats_and_contradictions_are_refused() -> None:
    p = nn.Parameter(torch.randn(5).bfloat16())
    optimizer = AdamW([p], policy="bf16-lean,weights=split24")
    p.grad = torch.ones(5).bfloat16()
    optimizer.step()
    made = master_of(p)
    assert made is not None
    assert made.storage.name == "split24"
    assert "exp_avg_scale" in optimizer.state[p]
    with pytest.raises(ConfigError, match="kahan"):
        AdamW([p], policy="bf16-lean", weights="kahan")
    with pytest.raises(ConfigError, match="bf16"):
        AdamW([p], policy="bf16-lean", states="bf16")
    AdamW([p], policy="bf16-lean", states="int8", weights="split")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"states": "int4"}, "int8"),
        ({"weights": "spilt"}, "split"),
        ({"policy": "bf16-leen"}, "bf16-lean"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AdamW([nn.Parameter(torch.ones(2))], **settings)


def unchanged(params: list[nn.Parameter]) -> Iterator[bool]:
    for p in params:
        yield p._version == 0


def test_a_storage_that_would_have_no_effect_is_refused_at_the_first_step() -> None:
    params = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = AdamW(params, weights="split")
    params[0].grad = torch.ones(3)
    with pytest.raises(ConfigError, match=r"no effect.*bind|no effect.*Leave"):
        optimizer.step()
    assert all(unchanged(params))


def test_a_policy_that_is_followed_may_leave_an_optimizer_no_16_bit_weight() -> None:
    """Adapters, prompts and norms are trained in fp32 beside a base in 16 bits."""
    for make in (AdamW, Lion, lambda ps, **settings: wrap(torch.optim.SGD(ps, **settings))):
        p = nn.Parameter(torch.ones(3))
        optimizer = make([p], lr=0.25, weight_decay=0.0)
        optimizer.follow(parse("bf16-lean"))
        p.grad = torch.full((3,), 1.0)
        optimizer.step()
        assert p.detach() == pytest.approx(0.75)
        assert master_of(p) is None


def test_fp32_weights_are_not_promised_for_16_bit_ones() -> None:
    p = nn.Parameter(torch.randn(3).half())
    optimizer = AdamW([p], weights="fp32")
    p.grad = torch.ones(3).half()
    with pytest.raises(ConfigError, match=r"weights=fp32.*float16"):
        optimizer.step()
    assert all(unchanged([p]))


def test_another_storage_than_that_of_a_master_is_refused() -> None:
    p = nn.Parameter(torch.randn(3))
    attach(p, "kahan", torch.bfloat16)
    optimizer = AdamW([p], weights="split")
    p.grad = torch.ones(3).bfloat16()
    before = p.detach().clone()
    with pytest.raises(ConfigError, match="weights=kahan"):
        optimizer.step()
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_are_refused_before_anything_moves(dtype: torch.dtype) -> None:
    dense, table = nn.Parameter(torch.ones(3).to(dtype)), nn.Embedding(5, 3, sparse=True).to(dtype)
    optimizer = AdamW([dense, table.weight])
    dense.grad = torch.ones(3).to(dtype)
    table(torch.tensor([1, 1])).sum().backward()
    before = dense.detach().clone(), table.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"sparse.*SparseAdam"):
        optimizer.step()
    assert torch.equal(dense.detach(), before[0])
    assert torch.equal(table.weight.detach(), before[1])
    assert optimizer.steps == 0


def test_fresh_masters_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    p = nn.Parameter(torch.randn(3).bfloat16())
    optimizer = AdamW([p])
    with caplog.at_level(logging.INFO, "halfstep"):
        for _ in range(3):
            p.grad = torch.ones(3).bfloat16()
            optimizer.step()
    assert [r.message for r in caplog.records if "master" in r.message] == ["1 16-bit parameters had no master weights and get split ones"]


def test_a_weight_turned_in_its_own_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transpose of a square weight has the same address and shape, and another order."""
    results = []
    for switch in ("on", "off"):
        monkeypatch.setenv("HALFSTEP_KERNELS", switch)
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(16, 16))
        optimizer = AdamW([p], lr=1e-2)
        for step in range(4):
            if step == 2:
                p.data = p.data.t()
            p.grad = torch.randn(16, 16)
            optimizer.step()
        results.append(p.detach().clone())
    assert torch.equal(*results)


def test_another_seed_gives_other_noise_in_the_same_memory() -> None:
    results = []
    for seeds in ((1, 1), (1, 2), (1, 2)):
        torch.manual_seed(0)
        p = nn.Parameter(torch.ones(4096).bfloat16())
        optimizer = AdamW([p], lr=1e-3, weights="stochastic")
        for optimizer.seed in seeds:
            p.grad = torch.ones(4096).bfloat16()
            optimizer.step()
        results.append(p.detach().clone())
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
