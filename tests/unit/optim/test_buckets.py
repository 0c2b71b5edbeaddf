"""The step of an optimizer in buckets: memory, counters, strides, and what is written back."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_optimizers import Counting, close, feed, tensors
from torch import Tensor, nn, optim

from halfstep.errors import ConfigError
from halfstep.optim import attach, full_values, master_of
from halfstep.optim.buckets import Buckets, cost, signature
from halfstep.optim.wrap import wrap


def test_costs_count_copies_that_a_bucket_may_hold() -> None:
    wide, narrow = tensors()[0], tensors(torch.bfloat16)[0]
    assert cost(wide, 0) == 4 * 20
    assert cost(narrow, 0) == 8 * 20
    assert cost(narrow, 2) == 16 * 20


def test_temporary_bytes_are_those_of_one_bucket() -> None:
    """Counted from outside: the fp32 copies that are alive while a bucket steps."""
    alive: list[int] = []
    everyone: list[list[Tensor]] = []

    class Watched(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            there = [t for other in everyone for t in other]
            alive.append(sum(t.nbytes for t in there) + sum(t.grad.nbytes for t in there if t.grad is not None))
            return super().step(closure)

    shapes = [(10, 10)] * 12
    held = tensors(torch.bfloat16, shapes)
    optimizer = Watched(held)
    limit = 3 * 800  # three weights with their gradients
    wrapped = wrap(optimizer, weights="split", bucket_bytes=limit)
    everyone += [[m.tensor for m in b.members] for b in wrapped._made().buckets]
    for step in range(2):
        feed(held, step)
        wrapped.step()
    alive = alive[-8:]
    assert wrapped.buckets == 4
    assert alive == [limit] * 8
    assert wrapped.temporary_bytes == limit
    assert sum(t.nbytes for other in everyone for t in other) == 0
    assert all(t.grad is None for other in everyone for t in other)


def test_decoded_states_count_as_temporary_bytes() -> None:
    held = tensors(torch.bfloat16, [(10, 10)] * 6)
    wrapped = wrap(optim.AdamW(held), weights="split", states="int8", bucket_bytes=2 * 1600)
    for step in range(2):
        feed(held, step)
        wrapped.step()
    assert wrapped.buckets == 3
    assert wrapped.temporary_bytes == 2 * 1600


def test_fp32_weights_share_their_memory() -> None:
    held = tensors()
    optimizer = optim.SGD(held, lr=0.1)
    wrapped = wrap(optimizer)
    feed(held)
    before = [(p.data_ptr(), p._version) for p in held]
    wrapped.step(factor=0.5)
    assert wrapped.buckets == 1
    assert wrapped.temporary_bytes == sum(p.nbytes for p in held)  # gradients only
    assert [p.data_ptr() for p in held] == [address for address, _ in before]
    assert all(p._version > version for p, (_, version) in zip(held, before, strict=True))


def test_a_tensor_larger_than_a_bucket_is_a_bucket() -> None:
    held = tensors(torch.bfloat16)
    wrapped = wrap(optim.SGD(held, lr=0.1), bucket_bytes=1)
    feed(held)
    wrapped.step()
    assert wrapped.buckets == len(held)


@pytest.mark.parametrize("limit", [1, 2**20])
def test_counters_go_on_in_the_users_optimizer(limit: int) -> None:
    one, other = tensors(), tensors(torch.bfloat16)
    plain, inner = (
        Counting([{"params": held[:2], "total": torch.zeros(())}, {"params": held[2:], "total": torch.zeros(())}]) for held in (one, other)
    )
    total = inner.param_groups[0]["total"]
    wrapped = wrap(inner, weights="split", bucket_bytes=limit)
    for step in range(3):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert wrapped.buckets == (1 if limit > 1 else 4)
    for a, b in zip(plain.param_groups, inner.param_groups, strict=True):
        assert (a["steps"], a["seen"]) == (b["steps"], b["seen"]) == (3, [1, 2, 3])
        assert float(a["total"]) == float(b["total"])
    assert inner.calls == 3
    assert inner.state["loose"] == {"calls": 3}  # type: ignore[index]
    assert inner.param_groups[0]["total"] is total
    for p, q in zip(one, other, strict=True):
        assert close(p, q)


def test_a_step_that_fails_leaves_no_copy_behind() -> None:
    class Failing(optim.SGD):
        failing = False

        def step(self, closure: Any = None) -> Any:
            if Failing.failing:
                raise RuntimeError("broken")
            return super().step(closure)

    held = tensors(torch.bfloat16)
    wrapped = wrap(Failing(held, lr=0.1), bucket_bytes=1)
    feed(held)
    before = [p.detach().clone() for p in held]
    Failing.failing = True
    with pytest.raises(RuntimeError, match="broken"):
        wrapped.step()
    assert all(m.tensor.numel() == 0 and m.tensor.grad is None for b in wrapped._made().buckets for m in b.members)
    assert all(torch.equal(p, q) for p, q in zip(held, before, strict=True))
    Failing.failing = False
    wrapped.step()
    assert not torch.equal(held[0], before[0])


def test_strides_of_weights_reach_copies_gradients_and_states() -> None:
    """A fused kernel walks weight, gradient and states side by side."""
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, 2, 2, generator=draws).bfloat16().contiguous(memory_format=torch.channels_last)
    turned = torch.randn(4, 6, generator=draws).bfloat16().t()
    one = [nn.Parameter(values.float()), nn.Parameter(turned.float())]
    other = [nn.Parameter(values.clone(memory_format=torch.preserve_format)), nn.Parameter(turned)]
    plain = optim.AdamW(one, lr=0.01, fused=True)
    wrapped = wrap(optim.AdamW(other, lr=0.01, fused=True), weights="split")
    coded = [nn.Parameter(values.clone(memory_format=torch.preserve_format)), nn.Parameter(turned.clone())]
    encoded = wrap(optim.AdamW(coded, lr=0.01, fused=True), weights="split", states="bf16")
    for step in range(3):
        for held in (one, other, coded):
            feed(held, step)
            for p in held:
                p.grad = torch.empty_like(p).copy_(p.grad)
        plain.step()
        wrapped.step()
        encoded.step()
    for p, q, r in zip(one, other, coded, strict=True):
        assert q.stride() == p.stride()
        assert close(p, q)
        assert float((p - full_values(r)).detach().abs().max()) < 0.002


def test_weights_move_and_change_their_dtype_under_way() -> None:
    held = tensors()
    wrapped = wrap(optim.AdamW(held, lr=0.01))
    feed(held)
    wrapped.step()
    assert wrapped.buckets == 0
    was = full_values(held[0]).clone()
    attach(held[0], "kahan", torch.bfloat16)
    first = signature(wrapped.optimizer)
    feed(held, 1)
    wrapped.step()
    assert wrapped.buckets == 1
    assert wrapped.state[held[0]]["exp_avg"].dtype == torch.float32
    assert int(wrapped.state[held[0]]["step"]) == 2
    assert not torch.equal(full_values(held[0]), was)
    held[0].grad, held[0].data = None, held[0].data.float()
    assert signature(wrapped.optimizer) != first
    held[0].grad_dtype = torch.float32
    feed(held, 2)
    wrapped.step()
    assert master_of(held[0]) is None
    assert int(wrapped.state[held[0]]["step"]) == 3


def test_hyper_parameters_that_come_out_different_end_in_one_bucket(caplog: pytest.LogCaptureFixture) -> None:
    """A dependence that the trial cannot show: it begins at the fourth step."""

    class Late(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "count": 0, "largest": 0.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] += 1
                for p in group["params"]:
                    if group["count"] > 3:
                        group["largest"] = max(group["largest"], float(p.grad.abs().max()))
                    p.sub_(p.grad * group["lr"])

    held = tensors(torch.bfloat16)
    wrapped = wrap(Late(held), bucket_bytes=1)
    for step in range(6):
        feed(held, step)
        with caplog.at_level(logging.WARNING, "halfstep"):
            wrapped.step()
        assert wrapped.buckets == (4 if step < 3 else 0 if step == 3 else 1)
    assert "set largest otherwise in each bucket" in caplog.text
    assert wrapped.param_groups[0]["count"] == 6


def test_sparse_gradients_of_16_bit_weights_are_refused() -> None:
    weight = nn.Parameter(torch.randn(5, 2).bfloat16())
    optimizer = optim.SGD([weight], lr=0.1)
    wrapped = wrap(optimizer)
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2, dtype=torch.bfloat16), (5, 2), check_invariants=True)
    with pytest.raises(ConfigError, match=r"sparse gradient.*sparse=False"):
        wrapped.step()


@pytest.mark.parametrize("make", [lambda ps: optim.SparseAdam(ps, lr=0.1), lambda ps: optim.SGD(ps, lr=0.1)])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_sparse_gradients_of_fp32_weights_pass(make: Callable[[Any], optim.Optimizer], factor: float) -> None:
    def run(wrapped: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True)
        optimizer = make(table.parameters())
        step: Any = wrap(optimizer).step if wrapped else optimizer.step
        for k in range(3):
            table.weight.grad = None
            (table(torch.tensor([1, 2, 2, k])).square().sum() * (1.0 if wrapped else factor)).backward()
            step(factor=factor) if wrapped else step()
        return table.weight.detach()

    assert torch.equal(run(True), run(False))


def test_a_tensor_that_groups_share_is_written_once_a_group() -> None:
    """Both groups count in the same tensor, which no bucket with one of them can know."""
    one, other = tensors(), tensors(torch.bfloat16)
    plain, inner = (Counting([{"params": held[:2]}, {"params": held[2:]}]) for held in (one, other))
    wrapped = wrap(inner, bucket_bytes=1)
    for step in range(2):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert wrapped.buckets == 1
    assert float(inner.param_groups[1]["total"]) == float(plain.param_groups[0]["total"]) == 8.0


def test_buckets_end_where_they_are_told_to() -> None:
    class Roleless:
        roles: Any = {}  # noqa: RUF012

        def noise(self, number: int) -> Any:
            return None

    held = tensors()
    optimizer = optim.SGD(held, lr=0.1)
    made = Buckets(optimizer, Roleless(), {}, None, [1, 4])  # type: ignore[arg-type]
    assert [[m.number for m in b.members] for b in made.buckets] == [[0], [1, 2, 3]]
