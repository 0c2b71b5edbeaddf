"""The emulation where it must step aside, and under torch's other machinery: double backward, recomputation, transforms, threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.amp.emulation import Emulation, is_active

BF16 = torch.bfloat16


@contextmanager
def emulated(dtype: torch.dtype = BF16) -> Iterator[None]:
    with torch.autocast("cpu", dtype, cache_enabled=False), Emulation():
        yield


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(3, 5), (5, 4)]),
    "batched matmul": (torch.matmul, [(2, 3, 5), (2, 5, 4)]),
    "broadcast matmul": (torch.matmul, [(2, 3, 5), (5, 4)]),
    "linear": (F.linear, [(3, 5), (4, 5), (4,)]),
    "linear without bias": (F.linear, [(2, 3, 5), (4, 5)]),
    "addmm": (torch.addmm, [(4,), (3, 5), (5, 4)]),
}


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_the_gradient_of_a_gradient_is_torchs(name: str) -> None:
    function, shapes = PRODUCTS[name]

    def second(context: Any) -> list[Tensor]:
        inputs = randoms(*shapes)
        with context:
            output = function(*inputs).float()
        first = torch.autograd.grad(output.pow(3).sum(), inputs, create_graph=True)
        penalty = sum(g.pow(2).sum() for g in first)
        assert isinstance(penalty, Tensor)
        return list(torch.autograd.grad(penalty, inputs))

    got, expected, exact = second(emulated()), second(torch.autocast("cpu", BF16)), second(torch.autocast("cpu", enabled=False))
    for one, theirs, true in zip(got, expected, exact, strict=True):
        scale = float(true.abs().max())
        assert scale > 0
        assert float((one - theirs).abs().max()) <= 4 * 2**-7 * scale
        assert float((one - true).abs().max()) <= 8 * 2**-7 * scale


def test_without_autocast_the_emulation_does_nothing() -> None:
    a, b = randoms((3, 5), (5, 4))
    with Emulation():
        assert torch.equal(a @ b, torch.matmul(a, b))
        assert (a @ b).dtype == torch.float32


@pytest.mark.parametrize("inner", ["off", "fp16"])
def test_blocks_inside_are_obeyed_and_end(inner: str) -> None:
    a, b = randoms((3, 5), (5, 4))
    with emulated():
        with torch.autocast("cpu", torch.float16, enabled=inner != "off"):
            got = a @ b
        assert (a @ b).dtype == BF16
    if inner == "off":
        assert torch.equal(got, a @ b)
    else:
        assert got.dtype == torch.float16
        assert torch.equal(got, (a.half().float() @ b.half().float()).half())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.complex64])
def test_formats_that_autocast_skips_are_untouched(dtype: torch.dtype) -> None:
    a, b = (torch.arange(1, 7).reshape(2, 3).to(dtype), torch.arange(1, 13).reshape(3, 4).to(dtype))
    exact = a @ b
    with emulated():
        for got in (a @ b, torch.mm(a, b), torch.einsum("ij,jk->ik", a, b), torch.matmul(a, b), F.linear(a, b.mT)):
            assert got.dtype == dtype
            assert torch.equal(got, exact)


def test_fp64_convolution_and_attention_are_untouched() -> None:
    x, w, q = randoms((1, 2, 6), (3, 2, 3), (1, 2, 4, 8), dtype=torch.float64)
    expected = F.conv1d(x, w), F.scaled_dot_product_attention(q, q, q), torch.addmm(x[0], x[0], x[0].mT @ x[0])
    with emulated():
        got = F.conv1d(x, w), F.scaled_dot_product_attention(q, q, q), torch.addmm(x[0], x[0], x[0].mT @ x[0])
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float64
        assert torch.equal(one, other)


def test_operands_that_are_16_bit_already_are_used_as_they_are() -> None:
    a, b = (t.detach().half() for t in randoms((3, 5), (5, 4)))
    with emulated(torch.float16):
        assert torch.equal(a @ b, (a.float() @ b.float()).half())


def test_what_the_user_asks_for_with_out_is_done() -> None:
    a, b = (t.detach().to(BF16) for t in randoms((3, 5), (5, 4)))
    target = torch.empty(3, 4, dtype=BF16)
    with emulated():
        assert torch.mm(a, b, out=target) is target
    assert torch.equal(target, (a.float() @ b.float()).to(BF16))


@pytest.mark.parametrize("shapes", [((0, 5), (5, 4)), ((2, 0, 5), (5, 4)), ((3, 0), (0, 4)), ((2, 3, 0), (0, 4))], ids=str)
def test_empty_operands_have_gradients(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = randoms(*shapes)
    with emulated():
        output = a @ b
    assert output.dtype == BF16
    assert output.shape == (*a.shape[:-1], b.shape[-1])
    output.float().sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)
    assert not b.grad.any()


def test_a_shape_that_does_not_fit_is_told_as_torch_tells_it() -> None:
    a, b = randoms((3, 5), (4, 4))
    with emulated():
        for call in (lambda: a @ b, lambda: torch.mm(a, b), lambda: F.linear(a, b)):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                call()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch says that CSR is new
@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_matrices_are_multiplied_in_fp32_whatever_their_size(layout: torch.layout, size: int) -> None:
    dense = torch.randn(size, size, generator=torch.Generator().manual_seed(1)) * torch.eye(size)
    (x,) = randoms((size, 3))
    with emulated():
        output = torch.mm(dense.to_sparse(layout=layout), x)
    output.float().sum().backward()
    assert torch.equal(output, (dense.to(BF16).float() @ x.to(BF16).float()).to(BF16))
    assert torch.equal(x.grad, dense.to(BF16).float().sum(0)[:, None].expand(size, 3))  # type: ignore[arg-type]


def test_only_the_gradients_asked_for_are_made() -> None:
    a, b = randoms((3, 5), (5, 4))
    a.requires_grad_(False)
    with emulated():
        output = a @ b
    output.float().sum().backward()
    assert a.grad is None
    assert b.grad is not None


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_the_numbers_are_the_same(guard: Callable[[], Any]) -> None:
    a, b = randoms((3, 5), (5, 4))
    with emulated():
        expected = (a @ b).detach()
        with guard():
            got = a @ b
    assert not got.requires_grad
    assert torch.equal(got, expected)


def test_saved_operands_are_16_bit() -> None:
    """A product keeps 2 bytes per element for its backward pass, as a native one does."""
    saved: list[Tensor] = []
    a, b = randoms((3, 5), (5, 4))
    w, bias = randoms((4, 5), (4,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), emulated():  # type: ignore[func-returns-value]
        torch.matmul(a, b)
        F.linear(a, w, bias)
    assert len(saved) == 4
    assert {t.dtype for t in saved} == {BF16}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(use_reentrant: bool) -> None:
    """Gradient checkpointing runs the forward pass again during backward, outside the block, under the autocast it remembers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    gradients = []
    for recompute in (False, True):
        (x,) = randoms((3, 4))
        model.zero_grad()
        with emulated():
            output = checkpoint(model, x, use_reentrant=use_reentrant) if recompute else model(x)
        output.float().square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for kept, made_again in zip(*gradients, strict=True):
        torch.testing.assert_close(made_again, kept, rtol=2**-7, atol=2**-7)


def test_functional_transforms_work_as_under_torchs_autocast() -> None:
    w, x = (t.detach() for t in randoms((5, 4), (3, 5)))

    def loss(weight: Tensor) -> Tensor:
        return (x @ weight).float().square().sum()

    with torch.autocast("cpu", BF16):
        expected = torch.func.grad(loss)(w)
    with emulated():
        got = torch.func.grad(loss)(w)
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6)


def test_another_thread_is_not_emulated() -> None:
    seen: list[Any] = []
    a, b = randoms((3, 5), (5, 4))
    with emulated():
        thread = threading.Thread(target=lambda: seen.extend([is_active(), torch.is_autocast_enabled("cpu"), (a @ b).dtype]))
        thread.start()
        thread.join()
        assert is_active()
    assert seen == [False, False, torch.float32]
    assert not is_active()


def test_an_exception_ends_the_block() -> None:
    with pytest.raises(ZeroDivisionError), emulated():
        raise ZeroDivisionError
    assert not is_active()
    assert not torch.is_autocast_enabled("cpu")


def test_products_that_are_not_routed_still_follow_autocast() -> None:
    a, b, c = randoms((3, 5), (5, 4), (4, 2))
    with emulated():
        assert torch.tensordot(a, b, dims=1).dtype == BF16
        assert torch.linalg.multi_dot([a, b, c]).dtype == BF16
        assert torch.linalg.matmul(a, b).dtype == BF16
        assert torch.sum(a).dtype == torch.float32
        assert (a * a).dtype == torch.float32


def test_weights_changed_inside_the_block_are_used_fresh() -> None:
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad(), emulated():
        for value, expected in ((1.0, 2.0), (5.0, 10.0)):
            layer.weight.fill_(value)
            assert float(layer(torch.tensor([[2.0]]))) == expected
