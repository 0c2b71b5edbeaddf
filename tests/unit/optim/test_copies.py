"""Copies of an optimizer that work on stand-ins, and the link between their hyper-parameters."""

from typing import Any

import pytest
import torch
from odd_optimizers import Counting, feed, tensors
from torch import optim

from halfstep.optim.copies import Link, bare_step, copied, same


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
