"""Gradients of 16-bit embedding tables are summed in fp32 and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.policy import parse

CPU = torch.device("cpu")
HALF = [torch.bfloat16, torch.float16]
FREQUENT = torch.tensor([[1, 1, 1, 2], [0, 1, 5, 5]]).repeat(1, 200)  # hundreds of times in one batch


class Table(nn.Module):
    def __init__(self, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, dtype=dtype, **settings)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out


def table(dtype: torch.dtype, precision: str | None = None, **settings: Any) -> Table:
    torch.manual_seed(0)
    made = Table(dtype, **settings)
    amp.bind(made, parse(precision or f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}-true,weights=plain,output=compute"), CPU)
    return made


def grads_in(dtype: torch.dtype) -> Tensor:
    return torch.rand(*FREQUENT.shape, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


def exact(rows: Tensor, settings: dict[str, Any]) -> Tensor:
    """The gradient that torch gives an fp64 table for the same gradients of the rows."""
    weight = torch.zeros(6, 4, dtype=torch.float64, requires_grad=True)
    names = {k: v for k, v in settings.items() if k in ("padding_idx", "scale_grad_by_freq")}
    F.embedding(FREQUENT, weight, **names).backward(rows.double())
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_the_sum_is_rounded_once(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    model, rows = table(dtype, **settings), grads_in(dtype)
    model(FREQUENT).backward(rows)
    grad, right = model.table.weight.grad, exact(rows, settings)
    assert grad is not None
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), right, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_torch_itself_sums_in_16_bits(dtype: torch.dtype) -> None:
    """What this is for: should torch come to sum in fp32, the function can go."""
    weight, rows = torch.zeros(6, 4, dtype=dtype, requires_grad=True), grads_in(dtype)
    F.embedding(FREQUENT, weight).backward(rows)
    assert weight.grad is not None
    assert (weight.grad.double() / exact(rows, {}).clamp(min=1) - 1).abs().max() > 4 * torch.finfo(dtype).eps


def test_a_table_that_takes_fp32_gradients_gets_the_fp32_sum() -> None:
    model, rows = table(torch.bfloat16), grads_in(torch.bfloat16)
    model.table.weight.grad_dtype = torch.float32
    model(FREQUENT).backward(rows)
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.dtype == torch.float32
    torch.testing.assert_close(model.table.weight.grad.double(), exact(rows, {}), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 2}, {"max_norm": 0.5}, {"max_norm": 0.5, "norm_type": 1.0}], ids=str)
def test_the_rows_are_those_of_torch_and_max_norm_is_applied(settings: dict[str, Any]) -> None:
    ours, theirs = table(torch.bfloat16, **settings), Table(torch.bfloat16, **settings)
    with torch.no_grad():
        theirs.table.weight.copy_(ours.table.weight)
    assert torch.equal(ours(FREQUENT), theirs(FREQUENT))
    assert torch.equal(ours.table.weight, theirs.table.weight)


@pytest.mark.parametrize("precision", ["bf16-true,output=compute", "bf16-mixed,weights=plain,output=compute"])
def test_it_acts_under_every_policy_that_holds_tables_in_16_bits(precision: str) -> None:
    model, rows = table(torch.bfloat16, precision), grads_in(torch.bfloat16)
    for call in (model, model.table):  # a part called alone too
        model.zero_grad()
        call(FREQUENT).backward(rows)
        assert model.table.weight.grad is not None
        torch.testing.assert_close(model.table.weight.grad.double(), exact(rows, {}), rtol=2**-8, atol=1e-6)


def test_what_is_left_to_torch() -> None:
    sparse = table(torch.bfloat16, sparse=True)
    sparse(torch.tensor([1, 2])).sum().backward()
    assert sparse.table.weight.grad is not None
    assert sparse.table.weight.grad.is_sparse
    with torch.no_grad():
        assert not table(torch.bfloat16)(torch.tensor([1])).requires_grad
    wrong = table(torch.bfloat16)
    wrong.table.padding_idx = 7
    with pytest.raises(AssertionError, match="Padding_idx"):
        wrong(torch.tensor([1]))


def test_a_derivative_of_the_gradient() -> None:
    model = table(torch.bfloat16)
    out = model(torch.tensor([1, 1, 2]))
    seed = torch.ones_like(out, requires_grad=True)
    (grad,) = torch.autograd.grad(out, model.table.weight, seed, create_graph=True)
    (second,) = torch.autograd.grad(grad[1].sum(), seed)
    assert torch.equal(second, torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4]).bfloat16())
