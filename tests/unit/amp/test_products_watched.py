"""Emulated products where their memory, that is used again, might be seen: batches of gradients, expanded operands, another default dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from halfstep.amp import autocast


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (F.linear, ((256, 512), (512, 512), (512,))),
        (lambda a, b: torch.bmm(a * 1, b * 1), ((8, 128, 128), (8, 128, 128))),
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((8, 128, 128), (8, 128, 128))),
        (F.scaled_dot_product_attention, ((2, 4, 64, 64),) * 3),
    ],
)
def test_a_batch_of_gradients_is_each_of_them(call: Any, shapes: Any) -> None:
    torch.manual_seed(0)
    given = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    with autocast("cpu", torch.bfloat16, products="emulated"):
        y = call(*given)
    above = torch.randn(3, *y.shape).to(y.dtype)
    each = [torch.autograd.grad(y, given, g, retain_graph=True) for g in above]
    for found, wanted in zip(torch.autograd.grad(y, given, above, is_grads_batched=True), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_attention_over_expanded_operands(place: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 1 if i == place else 64, 64).bfloat16().requires_grad_() for i in range(3)]
    wide = [t.detach().float().requires_grad_() for t in given]
    with autocast("cpu", torch.bfloat16, products="emulated"):
        y = F.scaled_dot_product_attention(*[t.expand(2, 4, 64, 64) for t in given])
    expected = F.scaled_dot_product_attention(*[t.expand(2, 4, 64, 64) for t in wide])
    above = torch.randn_like(expected).bfloat16()
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    found, wanted = torch.autograd.grad(y, given, above), torch.autograd.grad(expected, wide, above.float())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=5e-2)


def test_the_default_dtype_of_the_moment_is_not_remembered() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(256, 512), torch.randn(512, 512)
    with autocast("cpu", torch.bfloat16, products="emulated"):
        before = F.linear(x, w)
        torch.set_default_dtype(torch.float64)
        try:
            inside = F.linear(x, w)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(before, inside)
        assert torch.equal(before, F.linear(x, w))
