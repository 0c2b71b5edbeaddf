"""Copies of an optimizer, buckets of them, and the trial that says whether buckets will do."""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from halfstep.errors import ConfigError
from halfstep.optim import attach, full_values, master_of
from halfstep.optim.buckets import Buckets, cost, signature
from halfstep.optim.copies import Link, bare_step, copied, same
from halfstep.optim.trial import tried
from halfstep.optim.wrap import wrap


class Counting(optim.Optimizer):
    """SGD that counts in its group, in an attribute, in a tensor of its group and in a state of no parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0, "total": torch.zeros(()), "seen": []})
        self.calls = 0
        self.first = self.param_groups[0]["params"][0]
        self.state["loose"] = {"calls": 0}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls += 1
        self.state["loose"]["calls"] += 1  # type: ignore[index]
        for group in self.param_groups:
            group["steps"] += 1
            group["total"] += 2
            group["seen"] = [*group["seen"], group["steps"]]
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["steps"])


class NormOfAll(optim.Optimizer):
    """SGD with all gradients divided by the norm of all of them, where that is above a bound."""

    def __init__(self, params: Any, bound: float = 1.0, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "bound": bound})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in held]))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / max(1.0, float(norm) / group["bound"]) * group["lr"])


class Picky(NormOfAll):
    """Only takes tensors of more than 8 elements."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() <= 9 < p.grad.numel() + 1:
                    raise ValueError("too small to be cut in blocks")
                p.sub_(p.grad * group["lr"])


class ById(optim.Optimizer):
    """Finds what it keeps by the id of a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rates = {id(p): 0.1 for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * self.rates[id(p)])


class Views(optim.Optimizer):
    """Holds the memory of its parameters, which a stand-in does not share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.views = [p.detach().view(-1) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for p, view in zip([p for group in self.param_groups for p in group["params"]], self.views, strict=False):
            if p.grad is not None:
                view[: p.grad.numel()] -= p.grad.reshape(-1) * self.defaults["lr"]


class Noisy(optim.Optimizer):
    """Draws from every random state there is."""

    def __init__(self, params: Any, generator: torch.Generator | None = None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    drawn = torch.randn(p.shape) + torch.randn(p.shape, generator=self.generator) + random.random() + np.random.random()
                    p.sub_(drawn * group["lr"])


def tensors(dtype: torch.dtype = torch.float32, shapes: Any = ((4, 5), (6,), (2, 2, 3), (7, 8))) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=draws).bfloat16().to(dtype)) for s in shapes]


def feed(held: list[nn.Parameter], step: int = 0) -> None:
    draws = torch.Generator().manual_seed(step)
    for p in held:
        p.grad = torch.randn(p.shape, generator=draws).bfloat16().to(p.dtype)


def close(p: Tensor, q: Tensor) -> bool:
    """Within what split masters lose: an fp32 ulp where a value lies halfway between two 16-bit ones."""
    return float((p - full_values(q)).detach().abs().max()) <= 2.0**-22 * float(p.detach().abs().max())


# copies


def test_a_copy_refers_to_stand_ins_wherever_the_optimizer_refers_to_a_parameter() -> None:
    held = tensors()
    optimizer = Counting([{"params": held[:2]}, {"params": held[2:], "lr": 0.5}])
    optimizer.table = {held[0]: "first", "list": [held[3]]}  # type: ignore[attr-defined]
    optimizer.state[held[0]]["big"] = torch.zeros(3)
    stand_ins = {id(p): torch.zeros(2) for p in held}
    twin = copied(optimizer, stand_ins, {id(held[0]), id(held[3])})
    assert twin.param_groups[0]["params"] == [stand_ins[id(held[0])]]
    assert [g["lr"] for g in twin.param_groups] == [0.1, 0.5]
    assert twin.first is stand_ins[id(held[0])]  # type: ignore[attr-defined]
    assert twin.table[stand_ins[id(held[0])]] == "first"  # type: ignore[attr-defined]
    assert twin.table["list"][0] is stand_ins[id(held[3])]  # type: ignore[attr-defined]
    assert not twin.state
    only = copied(optimizer, stand_ins, {id(held[3])})
    assert len(only.param_groups) == 1


def test_names_of_parameters_are_cut_with_them() -> None:
    held = tensors()
    optimizer = optim.AdamW([(f"w{i}", p) for i, p in enumerate(held)])
    twin = copied(optimizer, {id(p): torch.zeros(2) for p in held}, {id(held[1]), id(held[2])})
    assert twin.param_groups[0]["param_names"] == ["w1", "w2"]


def test_the_bare_step_runs_no_hooks_and_no_scheduler_patch() -> None:
    held = tensors()
    optimizer = optim.SGD(held, lr=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    called = []
    optimizer.register_step_pre_hook(lambda *a: called.append("hook"))
    feed(held)
    before = held[0].detach().clone()
    bare_step(optimizer)(optimizer)
    assert not called
    assert not torch.equal(before, held[0])


def test_a_link_hands_over_and_takes_back_what_changed() -> None:
    rate = torch.tensor(0.5)
    source: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.99), "count": 1, "names": ["a"], "params": [1], "hook": print}
    twin: dict[str, Any] = {"params": [2], "gone": 3}
    link = Link(twin, ("params",), tensors=True)
    link.push(source, {}, {})
    assert twin["params"] == [2]
    assert "gone" not in twin
    assert twin["lr"] is not rate
    assert link.changes(source, {}) == {}
    twin["lr"].mul_(2)
    twin["count"] += 1
    twin["names"].append("b")
    twin["new"] = "x"
    changes = link.changes(source, {})
    assert set(changes) == {"lr", "count", "names", "new"}
    assert float(changes["lr"]) == 1.0


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
        ([1, (2, {"x": torch.ones(2)})], [1, (2, {"x": torch.ones(2)})], True),
        ([1, (2, {"x": torch.ones(2)})], [1, (2, {"x": torch.zeros(2)})], False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0]), False),
        (torch.tensor([float("inf")]), torch.tensor([torch.finfo(torch.float32).max]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        ({1}, {1}, True),
    ],
)
def test_same(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal


# buckets


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


# the trial


@pytest.mark.parametrize("make", [optim.AdamW, Counting, lambda ps: NormOfAll(ps, bound=0.0 + 1e9)])
def test_optimizers_that_go_by_element_split(make: Callable[[Any], optim.Optimizer]) -> None:
    assert tried(make(tensors())).splits


@pytest.mark.parametrize("bound", [1.0, 100.0])
@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_a_norm_of_all_gradients_is_found_out(bound: float, lr: float) -> None:
    """Also one that only bounds large ones, and under a learning rate that a warm-up has set to 0."""
    trial = tried(NormOfAll(tensors(), bound, lr))
    assert not trial.splits
    assert trial.copies
    assert "act on each other" in trial.reason


def test_one_bucket_is_said_with_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    one, other = tensors(), tensors(torch.bfloat16)
    plain = NormOfAll(one)
    with caplog.at_level(logging.INFO, "halfstep"):
        wrapped = wrap(NormOfAll(other), weights="split", bucket_bytes=10)
    said = [r.getMessage() for r in caplog.records if "at once" in r.getMessage()]
    assert len(said) == 1
    assert f"{sum(p.numel() for p in other) * 8 / 2**20:.1f} MiB" in said[0]
    for step in range(3):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert wrapped.buckets == 1
    for p, q in zip(one, other, strict=True):
        assert close(p, q)
    assert len([r for r in caplog.records if "at once" in r.getMessage()]) == 1


def test_an_optimizer_that_fails_on_small_tensors_gets_one_bucket(caplog: pytest.LogCaptureFixture) -> None:
    held = tensors(torch.bfloat16, [(40, 5), (50,)])
    with caplog.at_level(logging.INFO, "halfstep"):
        wrapped = wrap(Picky(held), bucket_bytes=10)
    assert "could not be tried on small tensors: ValueError: too small to be cut in blocks" in caplog.text
    feed(held)
    before = [p.detach().clone() for p in held]
    wrapped.step()
    assert wrapped.buckets == 1
    assert not torch.equal(held[0], before[0])


def test_one_that_a_copy_cannot_stand_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="Views did not do what it does itself: its weights stay where they are"):
        wrap(Views(tensors(torch.bfloat16)))
    held = tensors()
    feed(held)
    wrapped = wrap(Views(held))  # nothing needs a copy
    before = held[0].detach().clone()
    wrapped.step()
    assert not torch.equal(held[0], before)
    with pytest.raises(ConfigError, match="did not do what it does itself"):
        wrapped.step(factor=0.5)


def test_tables_by_the_id_of_a_parameter_find_its_stand_in() -> None:
    one, other = tensors(), tensors(torch.bfloat16)
    plain, wrapped = ById(one), wrap(ById(other), bucket_bytes=1)
    for step in range(2):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    for p, q in zip(one, other, strict=True):
        assert close(p, q)


def test_the_trial_leaves_no_trace() -> None:
    held = tensors(torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    noisy = Noisy(held, generator)
    feed(held)
    before = ([p.detach().clone() for p in held], [p.grad for p in held], torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    drawn = generator.get_state()
    assert tried(noisy).splits
    assert all(torch.equal(p, q) for p, q in zip(held, before[0], strict=True))
    assert all(p.grad is g for p, g in zip(held, before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])
    assert random.getstate() == before[3]
    assert np.array_equal(np.random.get_state()[1], before[4])
    assert torch.equal(generator.get_state(), drawn)
    assert not noisy.state
    assert noisy.param_groups[0].keys() == {"params", "lr"}


def test_a_trial_begins_at_the_states_there_are() -> None:
    held = tensors()
    optimizer = optim.Adagrad(held, lr=0.1)  # makes its states with itself
    assert tried(optimizer).splits
    assert tried(optimizer).keys == ("sum",)
    feed(held)
    optimizer.step()
    kept = {k: v.clone() for k, v in optimizer.state[held[0]].items()}
    assert tried(optimizer).splits
    assert all(torch.equal(v, optimizer.state[held[0]][k]) for k, v in kept.items())


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
