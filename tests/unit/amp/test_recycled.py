"""Memory of large gradients that is used again, and gradients of tied tables that are added to what the backward pass has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.amp import autocast, recycled

WORDS, WIDTH = 40, 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled, "LEAST", 1)
    recycled.clear()


class Tied(nn.Module):
    """A table that is the last layer's weight too, and by choice is used once more in fp32."""

    def __init__(self, padding: int | None = None, twice: bool = False, penalty: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.twice, self.penalty, self.again = twice, penalty, False

    def forward(self, ids: Tensor) -> Tensor:
        before = self.table.weight.square().mean() if self.penalty == "before" else 0.0
        h = self.table(ids)
        body = self.body(h)
        if self.twice:
            body = F.linear(F.linear(body, self.table.weight), self.table.weight.t())
        logits = checkpoint(self.head, body, use_reentrant=True) if self.again else self.head(body)
        after = self.table.weight.square().mean() if self.penalty == "after" else 0.0
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) + before + after

    def head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.table.weight)


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS // 2, (3, 7), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, passes: int = 1, call: Callable[[Tensor], None] = torch.Tensor.backward) -> dict[str, Tensor]:
    for i in range(passes):
        with autocast("cpu", torch.bfloat16, products="emulated"):
            loss = model(ids(i))
        call(loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled, "LEAST", 1 << 60)


KINDS = {
    "tied": {},
    "padding": {"padding": 3},
    "padding from the end": {"padding": -1},
    "products twice": {"twice": True},
    "fp32 use first": {"penalty": "before"},
    "fp32 use last": {"penalty": "after"},
    "everything": {"padding": 0, "twice": True, "penalty": "after"},
}


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_memory_to_the_bit(kind: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied(**KINDS[kind])  # type: ignore[arg-type]
    found = gradients(copy.deepcopy(model), passes)
    off(monkeypatch)
    for name, right in gradients(copy.deepcopy(model), passes).items():
        assert torch.equal(found[name], right), name
        assert right.any()


def test_a_node_hook_that_keeps_the_gradient_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = Tied(penalty="after"), []

    def watched(loss: Tensor) -> None:
        todo, seen = [loss.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_hook(lambda given, _: kept.append(given))
            todo += [n for n, _ in node.next_functions]
        loss.backward()  # type: ignore[no-untyped-call]

    found = gradients(copy.deepcopy(model), call=watched)
    off(monkeypatch)
    right = gradients(copy.deepcopy(model))
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert kept


def test_the_memory_of_the_step_before_is_used_again_and_no_other() -> None:
    model = Tied()
    weight = model.table.weight
    gradients(model)
    assert weight.grad is not None
    place = weight.grad.data_ptr()
    weight.grad = None
    gradients(model)
    assert weight.grad.data_ptr() == place, "it was free"
    held, values = weight.grad, weight.grad.clone()
    weight.grad = None
    gradients(model, 2)
    assert weight.grad.data_ptr() != place, "somebody holds it"
    assert torch.equal(held, values)


def test_a_graph_keeps_its_16_bit_copy_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forward passes with an update between them, then both backward passes: each with the weight that it saw."""

    def both(model: Tied) -> dict[str, Tensor]:
        with autocast("cpu", torch.bfloat16, products="emulated"):
            first = model(ids(0))
            model.table.weight.data.mul_(1.5)
            second = model(ids(1))
        first.backward()
        second.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model = Tied()
    found = both(copy.deepcopy(model))
    off(monkeypatch)
    right = both(copy.deepcopy(model))
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_a_backward_pass_inside_another_has_gradients_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    model.again = True
    found = gradients(copy.deepcopy(model), 2)
    off(monkeypatch)
    right = gradients(copy.deepcopy(model), 2)
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_gradients_that_are_asked_for_and_differentiated_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(model: Tied) -> tuple[Tensor, Tensor]:
        with autocast("cpu", torch.bfloat16, products="emulated"):
            loss = model(ids())
        (plain,) = torch.autograd.grad(loss, [model.table.weight], retain_graph=True)
        (once,) = torch.autograd.grad(loss, [model.table.weight], create_graph=True)
        (twice,) = torch.autograd.grad(once.square().sum(), [model.table.weight])
        return plain, twice

    model = Tied()
    found = second(copy.deepcopy(model))
    off(monkeypatch)
    for one, right in zip(found, second(copy.deepcopy(model)), strict=True):
        assert torch.equal(one, right)
        assert right.any()


def test_memory_goes_with_its_weight() -> None:
    model = Tied()
    gradients(model)
    assert recycled._spare.blocks
    del model
    assert not recycled._spare.blocks
