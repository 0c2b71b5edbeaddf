"""Weights in 16 bits that are used otherwise than the first forward pass used them, and weights that several products share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lean_models import CPU, Net, X, gradients, masters, net
from torch import Tensor, nn

from halfstep import amp
from halfstep.policy import parse

LATER: dict[str, Callable[[Net], Any]] = {
    "norm": lambda m: m.one.weight.norm(),
    "masked": lambda m: F.linear(X, m.one.weight * (m.one.weight > 0)).sum(),
    "row": lambda m: m.one.weight[0].exp().sum(),
    "view-of-view": lambda m: m.one.weight.t()[1:].unsqueeze(0).pow(2).sum(),
    "chunk": lambda m: m.one.weight.chunk(2)[1].abs().sum(),
    "reshaped": lambda m: m.one.weight.t().reshape(-1).cumsum(0).mean(),
    "indexed": lambda m: m.one.weight[torch.tensor([0, 0, 3])].sum(),
    "stacked": lambda m: torch.stack([m.one.weight, m.two.weight.t().repeat(1, 2)]).square().mean(),
    "cast": lambda m: m.one.weight.float().sum() + m.one.weight.to(torch.float32).sum() + m.one.weight.double().mean().float(),
    "detached": lambda m: m.one.weight.detach().sum() * m.one.bias.sum(),
    "keyword": lambda m: torch.sum(input=m.one.bias),
    "operator": lambda m: (1 / (2 + m.one.bias) - m.one.bias**2).sum(),
    "embedding": lambda m: F.embedding(torch.tensor([1, 1]), m.one.weight).sum(),
    "product-of-products": lambda m: (m.one.weight @ m.one.weight.t() - torch.eye(8)).square().sum(),
    "as-the-dtype-says": lambda m: (torch.ones(4, dtype=m.two.weight.dtype) * 1.001).sum(),
    "as-the-tensor-is": lambda m: (torch.full_like(m.two.bias, 1.001) + X[0, :4].type_as(m.two.bias)).sum(),
}


@pytest.mark.parametrize("use", LATER.values(), ids=LATER)
def test_a_later_direct_use_sees_the_fp32_master_and_its_gradient_goes_to_the_weight(use: Callable[[Net], Any]) -> None:
    lean, mixed = net("bf16-lean"), net("bf16-mixed")
    lean(X)
    lean.extra = mixed.extra = use
    quiet = use in (LATER["as-the-dtype-says"], LATER["product-of-products"])
    with nullcontext() if quiet else pytest.warns(UserWarning, match="is kept in 16 bits"):
        outputs = lean(X)
    assert torch.equal(outputs, mixed(X))
    for name, ours, theirs in zip(dict(lean.named_parameters()), gradients(lean, X), gradients(mixed, X), strict=True):
        # the sum of a product's gradient and another is rounded to 16 bits
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * float(theirs.abs().max()), msg=name)


def test_a_direct_use_is_told_once_by_name() -> None:
    model = net("bf16-lean")
    model(X)
    model.extra = lambda m: m.one.weight.norm()
    with pytest.warns(UserWarning, match=r"one\.weight \(8, 8\) is kept in 16 bits, and norm uses it in fp32") as told:
        model(X)
    assert len(told) == 1
    model(X)  # warnings are errors here


def test_a_direct_use_on_an_fp32_island_and_in_products_there() -> None:
    def on_an_island(m: Net) -> Tensor:
        with amp.autocast("cpu", enabled=False):
            return F.linear(X, m.one.weight, m.one.bias).sum()

    lean, mixed = net("bf16-lean"), net("bf16-mixed", on_an_island)
    lean(X)
    lean.extra = on_an_island
    with pytest.warns(UserWarning, match="linear uses it in fp32"):
        assert torch.equal(lean(X), mixed(X))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.clamp_(-0.1, 0.1),
        lambda w: w.mul_(1.001),
        lambda w: w[0].add_(1e-4),
        lambda w: w.__setitem__(0, 0.3),
        lambda w: w.t().copy_(w.clone() * 0.999),
    ],
    ids=["clamp", "mul", "row", "setitem", "transposed"],
)
def test_a_write_in_the_forward_pass_is_done_to_the_master(write: Callable[[Tensor], Any]) -> None:
    def constrain(m: Net) -> float:
        with torch.no_grad():
            write(m.one.weight)
        return 0.0

    lean, mixed = net("bf16-lean"), net("bf16-mixed")
    lean(X)
    lean.extra = mixed.extra = constrain
    lean.one.weight.halfstep_told = True  # reads beside the write are told, too
    for _ in range(3):
        assert torch.equal(lean(X), mixed(X))
    torch.testing.assert_close(masters(lean)["one.weight"], mixed.one.weight.detach(), rtol=2**-22, atol=0)


class Twice(nn.Module):
    """One layer applied three times, and a cell over four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.cell, self.two = nn.Linear(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.one(x).tanh()
        state = torch.zeros_like(x)
        for _ in range(4):
            state = self.cell(x, state)
        return self.two(state)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_gradients_of_a_weight_that_several_products_share_are_summed_in_fp32(form: str) -> None:
    torch.manual_seed(0)
    lean = Twice()
    mixed = copy.deepcopy(lean)
    amp.bind(lean, parse(f"{form}-lean"), CPU)
    amp.bind(mixed, parse(f"{form}-mixed"), CPU)
    lean(X)
    twin = copy.deepcopy(lean)
    expected = gradients(mixed, X)
    for model in (lean, twin):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), expected, strict=True))
        assert {name for name, p in model.named_parameters() if p.grad.dtype != torch.float32} == {"two.weight", "two.bias"}
    assert len(amp.layout(lean)["16bit"]) == 8
