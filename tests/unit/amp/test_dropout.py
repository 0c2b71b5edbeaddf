"""Dropout under autocast draws torch's numbers: results, gradients and the generator's state have torch's bits."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.amp import dropout
from halfstep.amp.whole import low_products
from halfstep.kernels import bernoulli_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each call of the compiled code has drawn."""
    pytest.importorskip("numba")
    kernels, counts = bernoulli_kernels(), []
    assert kernels is not None
    if not kernels.is_torchs():
        pytest.skip("torch draws by MKL on this CPU")
    fill = kernels.fill
    monkeypatch.setattr(kernels, "fill", lambda out, *about: (counts.append(out.numel()), fill(out, *about)))
    return counts


def results(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = call(leaf)
    (slope,) = torch.autograd.grad(out.float().sin().sum(), leaf)
    return [out.detach(), slope, torch.get_rng_state()]


def equal(call: Callable[[Tensor], Tensor], x: Tensor, **block: Any) -> None:
    with amp.autocast("cpu", torch.bfloat16, **block):
        ours = results(call, x)
    theirs = results(call, x)
    assert all(torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0)) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.37, 1e-7, 1 - 1e-7, 0.999])
def test_bits_are_torchs(dtype: torch.dtype, p: float, drawn: list[int]) -> None:
    x = torch.randn(3, 40, 50).to(dtype)
    x[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    for given in (x, x.mT, x[:, ::2], x[:, :1].expand(3, 40, 50), x.to(memory_format=torch.contiguous_format)):
        for call in (lambda t: F.dropout(t, p), lambda t: F.dropout(t, p=p, training=True), lambda t: torch.dropout(t, p, True), nn.Dropout(p)):
            drawn.clear()
            equal(call, given)
            assert drawn == [given.numel()]


def test_what_is_left_to_torch(drawn: list[int]) -> None:
    x = torch.randn(60, 50)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda t: F.dropout(t, 0.0),
        lambda t: F.dropout(t, 1.0),
        lambda t: F.dropout(t, 0.5, False),
        lambda t: F.dropout(t * 1, 0.5, inplace=True),
        lambda t: F.dropout(t[:5], 0.5),
        lambda t: F.dropout(t.double(), 0.5),
        lambda t: F.dropout1d(t[None], 0.5),
        lambda t: F.alpha_dropout(t, 0.5),
    ]
    for call in calls:
        equal(call, x)
    assert drawn == []
    with amp.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 1.5)


def test_without_compiled_code_the_bits_are_the_same(drawn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(60, 50)
    with amp.autocast("cpu", torch.bfloat16):
        ours = results(nn.Dropout(0.3), x)
        monkeypatch.setenv("HALFSTEP_KERNELS", "off")
        plain = results(nn.Dropout(0.3), x)
    assert drawn == [3000]
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_forward_pass_that_is_computed_again_draws_the_same(drawn: list[int]) -> None:
    layer = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.3), nn.Linear(50, 50), nn.Dropout(0.3))
    x = torch.randn(60, 50)
    found = []
    for again in (False, True):
        torch.manual_seed(2)
        leaf = x.clone().requires_grad_()
        with amp.autocast("cpu", torch.bfloat16):
            out = checkpoint(layer, leaf, use_reentrant=False) if again else layer(leaf)
        out.float().sum().backward()
        found.append((out, leaf.grad))
    assert len(drawn) == 6
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


MASKS = {"none": (False, None), "causal": (True, None), "booleans": (False, "bool"), "numbers": (False, "float")}


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_has_torchs_bits(dtype: torch.dtype, mask: str, drawn: list[int]) -> None:
    causal, kind = MASKS[mask]
    for p, scale, grouped in itertools.product((0.1, 0.37), (None, 0.3, -0.3), (False, True)):

        def call(ours: bool, p: float = p, scale: float | None = scale, grouped: bool = grouped) -> list[Tensor]:
            torch.manual_seed(3)
            keys = 33 if causal else 36
            q, k, v = (torch.randn(2, h, n, 16, dtype=dtype, requires_grad=True) for h, n in ((4, 33), *[(2 if grouped else 4, keys)] * 2))
            bias = None
            if kind == "bool":
                bias = torch.rand(33, keys) > 0.3
                bias[2] = False  # a row without a key
            elif kind == "float":
                bias = torch.randn(2, 1, 33, keys, dtype=dtype, requires_grad=True)
            given = [q, k, v] + ([bias] if kind == "float" and bias is not None else [])
            with amp.autocast("cpu", dtype, products="emulated", enabled=ours):
                out = F.scaled_dot_product_attention(q, k, v, bias, p, causal, scale=scale, enable_gqa=grouped)
            return [out, *torch.autograd.grad(out.float().sin().sum(), given), torch.get_rng_state()]

        drawn.clear()
        ours, torchs = call(True), call(False)
        assert drawn == [2 * 4 * 33 * (33 if causal else 36)]
        assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True)), (p, scale, grouped)


@pytest.mark.parametrize("products", ["emulated", "native"])
def test_models_in_16_bits_as_a_whole_draw_the_same_numbers(products: str, drawn: list[int]) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.3)).bfloat16()
    x = torch.randn(60, 50).bfloat16()
    found = []
    for block in (low_products("bf16", products), nullcontext()):
        torch.manual_seed(1)
        with block:
            found.append(model(x) == 0)
    assert drawn == [3000]
    assert torch.equal(*found)


def test_a_shape_without_numbers_draws_nothing(drawn: list[int]) -> None:
    x = torch.empty(60, 50, device="meta")
    assert not dropout.drawable(x, 0.5)
    assert dropout.drawable(torch.empty(60, 50), 0.5)
    assert drawn == []
