"""A block in which autocast is switched off, inside one where it is on: fp32, also for operands that are 16-bit already."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp import ops

DTYPES = [torch.bfloat16, torch.float16]
OUTSIDE: dict[str, Callable[[torch.dtype], AbstractContextManager[Any]]] = {
    "ours": lambda dtype: amp.autocast("cpu", dtype),
    "ours, device": lambda dtype: amp.autocast("cpu", dtype, ops="device"),
    "torch's": lambda dtype: torch.autocast("cpu", dtype),
}


def matrix(dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.1, 0.9, 16, dtype=dtype).reshape(4, 4)


@pytest.mark.parametrize("outside", list(OUTSIDE))
def test_the_square_of_large_values_is_finite(outside: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(2, 64)
    with OUTSIDE[outside](torch.float16):
        h = layer(x) * 600
        assert h.dtype == torch.float16
        with amp.autocast("cpu", enabled=False):
            got = h.pow(2).mean(-1)
            assert not torch.is_autocast_enabled("cpu")
        assert (layer(x) @ layer.weight).dtype == torch.float16, "16 bits again after it"
    assert got.dtype == torch.float32
    assert torch.equal(got, h.float().pow(2).mean(-1))
    assert bool(got.isfinite().all())
    assert not bool(h.pow(2).isfinite().all())


INEXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "x + x": lambda x: x + x,
    "1 + x": lambda x: 1 + x,
    "x - x.T": lambda x: x - x.mT,
    "1 - x": lambda x: 1 - x,
    "x * 600": lambda x: x * 600,
    "2 * x": lambda x: 2 * x,
    "x / 3": lambda x: x / 3,
    "1 / x": lambda x: 1 / x,
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "x @ x": lambda x: x @ x,
    "x % 0.3": lambda x: x % 0.3,
    "x // 0.3": lambda x: x // 0.3,
    "linear": lambda x: F.linear(x, x, x[0]),
    "linear by fp32": lambda x: F.linear(x, torch.eye(4), torch.zeros(4)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "conv": lambda x: F.conv1d(x[None], x[:, :, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(),
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "linalg.norm": torch.linalg.norm,
    "linalg.inv": lambda x: torch.linalg.inv(x + torch.eye(4)),
    "special.i1": torch.special.i1,
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros(1, 4, dtype=torch.int64), x),
    "mse_loss": lambda x: F.mse_loss(x, x.mT),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, x),
    "cumsum": lambda x: x.cumsum(0),
    "interpolate": lambda x: F.interpolate(x[None], 8, mode="linear"),
    "avg_pool": lambda x: F.avg_pool1d(x, 2),
    "module": lambda x: nn.GELU()(x),
    "dropout": lambda x: F.dropout(x, 0.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(INEXACT))
def test_what_rounds_runs_in_fp32_on_an_island(name: str, dtype: torch.dtype) -> None:
    x = matrix(dtype)
    expected = INEXACT[name](x.float())
    with amp.autocast("cpu", dtype), amp.autocast("cpu", enabled=False):
        got = INEXACT[name](x)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


def test_every_function_that_is_listed_exists_once() -> None:
    listed = (*ops.FP32, *ops.WIDEST, *ops.LOW, *ops.UNSAFE, *ops.INEXACT)
    assert all(ops.forms(name) for name in listed)
    assert len(set(listed)) == len(listed)
    assert not any(form.__name__.endswith("_") and not form.__name__.endswith("__") for form in ops.inexact()), "no in-place form"


EXACT: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(16),
    "mT": lambda x: x.mT,
    "index": lambda x: x[0],
    "chunk": lambda x: x.chunk(2)[0],
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "relu": F.relu,
    "neg": lambda x: -x,
    "abs": torch.abs,
    "max": lambda x: x.max(),
    "sort": lambda x: x.sort().values,
    "where": lambda x: torch.where(x > 0.5, x, x),
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.mT.contiguous(),
    "zeros_like": torch.zeros_like,
    "embedding": lambda x: F.embedding(torch.tensor([0, 1]), x),
    "expand": lambda x: x[:1].expand(4, 4),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_what_is_exact_stays_in_its_format(name: str) -> None:
    x = matrix(torch.float16)
    with amp.autocast("cpu", torch.float16), amp.autocast("cpu", enabled=False):
        got = EXACT[name](x)
    assert got.dtype == torch.float16
    assert torch.equal(got, EXACT[name](x))


def test_conversions_attributes_and_in_place_forms_are_left_alone() -> None:
    x = matrix(torch.float16)
    with amp.autocast("cpu", torch.float16), amp.autocast("cpu", enabled=False):
        assert x.to(torch.bfloat16).dtype == x.bfloat16().dtype == torch.bfloat16
        assert x.float().half().dtype == torch.float16
        assert (x.dtype, x.shape, x.requires_grad) == (torch.float16, (4, 4), False)
        y = x.clone()
        y += 1
        y.mul_(2).add_(x)
        assert y.dtype == torch.float16
        z = x.clone()
        assert F.dropout(z, 0.5, True, True) is z
        assert F.dropout(z, p=0.5, training=True, inplace=True) is z
        assert F.silu(z, inplace=True) is z
        assert nn.Dropout(0.5, inplace=True)(z) is z
        assert z.dtype == torch.float16
        assert torch.add(x, x, out=torch.empty(4, 4, dtype=torch.float16)).dtype == torch.float16


def normalised(x: Tensor, block: AbstractContextManager[Any], form: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    layer = nn.BatchNorm1d(4).to(form)
    with block:
        found = layer(x), F.batch_norm(x, running_mean=layer.running_mean, running_var=layer.running_var, training=True)
        third = torch.batch_norm(x, layer.weight, layer.bias, layer.running_mean, layer.running_var, True, 0.1, 1e-5, False)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], third)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return found[0].detach(), layer.running_mean, layer.running_var


@pytest.mark.parametrize("where", ["island", "fp32_ops", "half_ops"])
@pytest.mark.parametrize("form", [torch.float32, torch.float16], ids=str)
def test_running_statistics_are_written_and_not_a_copy_of_them(where: str, form: torch.dtype) -> None:
    def block() -> AbstractContextManager[Any]:
        if where == "island":
            outer = amp.autocast("cpu", torch.float16)
            outer.__enter__()
            stack.callback(outer.__exit__, None, None, None)
            return amp.autocast("cpu", enabled=False)
        return amp.autocast("cpu", torch.float16, **{where: ("batch_norm",)})

    x = matrix(torch.float16) * 3
    with ExitStack() as stack:
        output, mean, variance = normalised(x, block(), form)
    assert output.dtype == (torch.float32 if where != "half_ops" and form == torch.float32 else torch.float16)
    assert (mean.dtype, variance.dtype) == (form, form)
    _, expected_mean, expected_variance = normalised(x.float(), nullcontext(), torch.float32)
    torch.testing.assert_close(mean.float(), expected_mean, rtol=2**-9, atol=2**-9)
    torch.testing.assert_close(variance.float(), expected_variance, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_other_formats_are_as_ever(dtype: torch.dtype) -> None:
    x = torch.arange(1, 5).to(dtype)
    with amp.autocast("cpu", torch.float16), amp.autocast("cpu", enabled=False):
        assert torch.equal(x + x, 2 * x)
        assert (x + x).dtype == x.sum().dtype == dtype


def test_at_top_level_it_changes_nothing() -> None:
    x = matrix(torch.float16)
    with amp.autocast("cpu", enabled=False):
        assert (x * 600).dtype == torch.float16
        assert (x @ x).dtype == torch.float16
        assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("inner", ["ours", "torch's"])
def test_switched_on_again_on_the_island(inner: str) -> None:
    x = matrix(torch.float16)
    with amp.autocast("cpu", torch.float16), amp.autocast("cpu", enabled=False):
        with OUTSIDE[inner](torch.float16):
            assert (x * x).dtype == torch.float16
            assert (x.float() @ x.float()).dtype == torch.float16
            assert x.softmax(-1).dtype == torch.float32, "the outer block's op policy holds again"
            with amp.autocast("cpu", enabled=False):
                assert (x * x).dtype == torch.float32
        assert (x * x).dtype == torch.float32
        with amp.autocast("cpu", enabled=False):
            assert (x * x).dtype == torch.float32


def test_torchs_own_block_switched_off_is_obeyed_as_torch_means_it() -> None:
    x = matrix(torch.float16)
    with amp.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False):
        assert (x * x).dtype == torch.float16
        assert x.softmax(-1).dtype == torch.float16


def test_gradients_cross_the_shore() -> None:
    x = matrix(torch.float16).requires_grad_()
    with amp.autocast("cpu", torch.float16), amp.autocast("cpu", enabled=False):
        loss = (x * 600).pow(2).mean()
    (loss / 2**16).backward()
    wide = x.detach().float().requires_grad_()
    ((wide * 600).pow(2).mean() / 2**16).backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.half())


def test_a_function_can_be_decorated_with_it() -> None:
    @amp.autocast("cpu", enabled=False)
    def energy(h: Tensor) -> Tensor:
        return h.pow(2).sum()

    h = torch.full((4,), 300.0, dtype=torch.float16)
    with amp.autocast("cpu", torch.float16, ops="device"):
        assert float(energy(h)) == 360000.0
    assert energy(h).dtype == torch.float16
