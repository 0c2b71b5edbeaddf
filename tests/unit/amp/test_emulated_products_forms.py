"""Forms of the emulated products that models use: geometries of convolutions, masks of attention, sums, large matrices in pieces, what is saved."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.amp import attention, forward_context, pieces
from halfstep.amp.emulation import Emulation
from halfstep.policy import parse

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's own, which pads likewise
DTYPES = [torch.bfloat16, torch.float16]
Shapes = list[tuple[int, ...]]
Case = tuple[Callable[..., Tensor], Shapes]


@contextmanager
def emulated(dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast("cpu", dtype, cache_enabled=False), Emulation():
        yield


def whole(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """For operands that are 16-bit themselves: the block of a model that is so as a whole, without autocast."""
    return forward_context(parse(f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}-true,products=emulated"), torch.device("cpu"))


def operands(shapes: Shapes, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], output: Tensor, dtype: torch.dtype) -> list[Tensor]:
    above = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, above.to(output.dtype))]


def exact_and_got(case: Case, dtype: torch.dtype, block: Callable[[torch.dtype], Any] = emulated) -> tuple[list[Tensor], list[Tensor]]:
    """In fp64 from operands rounded to `dtype`, and emulated: the output and the gradients."""
    function, shapes = case
    inputs = [x if block is emulated else x.detach().to(dtype).requires_grad_() for x in operands(shapes)]
    with block(dtype):
        output = function(*inputs)
    assert output.dtype == dtype
    got = with_gradients(function, inputs, output, dtype)
    wide = [x.detach().to(dtype).double().requires_grad_() for x in inputs]
    return with_gradients(function, wide, function(*wide), dtype), got


def one_rounding(exact: list[Tensor], got: list[Tensor], dtype: torch.dtype) -> None:
    """Law: half a unit in the last place of `dtype`, and what sums of so many fp32 products may add."""
    for one, true in zip(got, exact, strict=True):
        assert one.shape == true.shape
        assert torch.equal(one, one.to(dtype).to(one.dtype)), "16-bit numbers"
        torch.testing.assert_close(one.double(), true, rtol=torch.finfo(dtype).eps / 2, atol=1e-5 * float(true.abs().max()))


def sdpa(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, mask=None: F.scaled_dot_product_attention(q, k, v, mask, **options)


def masked(mask: Tensor, **options: Any) -> Callable[..., Tensor]:
    """A mask that has no gradient."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask if mask.dtype == torch.bool else mask.to(q.dtype), **options)


QKV: Shapes = [(2, 4, 5, 8)] * 3
LOWER = torch.ones(5, 5).tril().bool()
FORMS: dict[str, Case] = {
    "linear of a vector and one row": (lambda x, w: F.linear(x, w), [(2, 3, 7), (7,)]),
    "linear in four dimensions": (F.linear, [(2, 3, 2, 7), (4, 7), (4,)]),
    "linear with a weight in columns": (lambda x, w, b: F.linear(x, w.mT, b), [(3, 7), (7, 4), (4,)]),
    "linear of one that is not contiguous": (lambda x, w: F.linear(x.mT, w), [(7, 3), (4, 7)]),
    "addmm of a full matrix": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(3, 4), (3, 5), (5, 4)]),
    "addmm of a column": (lambda c, a, b: torch.addmm(input=c, mat1=a, mat2=b), [(3, 1), (3, 5), (5, 4)]),
    "addmm of a number": (torch.addmm, [(), (3, 5), (5, 4)]),
    "baddbmm of a row": (lambda c, a, b: torch.baddbmm(c, a, b, beta=3, alpha=0.5), [(1, 4), (2, 3, 5), (2, 5, 4)]),
    "addbmm scaled": (lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=0.25), [(3, 4), (2, 3, 5), (2, 5, 4)]),
    "matmul in five dimensions": (torch.matmul, [(2, 1, 2, 3, 5), (2, 1, 2, 5, 4)]),
    "matmul of views": (lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).mT, [(2, 3, 4, 5), (2, 6, 4, 5)]),
    "einsum over two indices": (lambda a, b: torch.einsum("bij,kij->bk", a, b), [(2, 3, 4), (5, 3, 4)]),
    "einsum with a batch behind dots": (lambda a, b: torch.einsum("...ij,jk", a, b), [(2, 2, 3, 4), (4, 5)]),
    "einsum with two batches behind dots": (lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), [(2, 3, 4), (6, 2, 4, 5)]),
    "einsum that sums an index of one": (lambda a, b: torch.einsum("ijm,jk->ik", a, b), [(3, 4, 2), (4, 5)]),
    "einsum that broadcasts an index": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(1, 3, 4), (2, 4, 5)]),
    "conv1d, the same size, even kernel": (lambda x, w, b: F.conv1d(x, w, b, padding="same"), [(2, 4, 7), (3, 4, 4), (3,)]),
    "conv2d, the same size": (lambda x, w: F.conv2d(x, w, padding="same", dilation=2), [(2, 4, 6, 7), (3, 4, 3, 2)]),
    "conv2d, valid": (lambda x, w, b: F.conv2d(x, w, b, padding="valid", stride=(2, 1)), [(2, 4, 6, 7), (3, 4, 3, 2), (3,)]),
    "conv2d of each channel": (lambda x, w: F.conv2d(x, w, None, 1, (1, 0), 1, 4), [(2, 4, 6, 7), (8, 1, 3, 3)]),
    "conv2d of one image": (lambda x, w, b: F.conv2d(input=x, weight=w, bias=b), [(4, 6, 7), (3, 4, 3, 3), (3,)]),
    "conv2d of channels last": (lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w), [(2, 4, 6, 7), (3, 4, 3, 3)]),
    "conv3d in groups": (lambda x, w: F.conv3d(x, w, groups=2, padding=1), [(1, 4, 3, 4, 3), (6, 2, 2, 2, 2)]),
    "conv_transpose1d": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1), [(2, 4, 5), (4, 3, 3), (3,)]),
    "conv_transpose2d in groups": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(2, 1), padding=1, output_padding=(1, 0), groups=2, dilation=(1, 2)),
        [(2, 4, 4, 5), (4, 3, 3, 2), (6,)],
    ),
    "conv_transpose3d of one volume": (lambda x, w: F.conv_transpose3d(x, w, stride=2), [(2, 3, 3, 3), (2, 3, 2, 2, 2)]),
    "attention, causal": (sdpa(is_causal=True), QKV),
    "attention, scaled": (sdpa(scale=0.5), QKV),
    "attention, negative scale": (sdpa(scale=-0.5), QKV),
    "attention, booleans": (masked(LOWER), QKV),
    "attention, booleans and causal": (masked(torch.ones(5, 5).triu(-2).bool(), is_causal=True), QKV),
    "attention, numbers": (masked(torch.arange(25.0).view(5, 5) / 16), QKV),
    "attention, one mask for each head": (masked(torch.arange(100.0).view(4, 5, 5) / 64), QKV),
    "attention, learned mask": (sdpa(), [*QKV, (4, 5, 5)]),
    "attention, grouped queries": (sdpa(enable_gqa=True), [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)]),
    "attention, grouped queries, causal": (sdpa(enable_gqa=True, is_causal=True), [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)]),
    "attention, more keys": (sdpa(), [(2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8)]),
    "attention, other width of values": (sdpa(), [(2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 6)]),
    "attention, three dimensions": (sdpa(is_causal=True), [(4, 5, 8)] * 3),
    "attention, views": (lambda x: sdpa()(*x.view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)), [(2, 5, 96)]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("block", [emulated, whole], ids=lambda block: block.__name__)
def test_one_rounding_of_fp32_sums_forward_and_backward(block: Any, name: str, dtype: torch.dtype) -> None:
    one_rounding(*exact_and_got(FORMS[name], dtype, block), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(FORMS))
def test_torchs_own_16_bit_function_gives_the_same_within_its_roundings(name: str, dtype: torch.dtype) -> None:
    function, shapes = FORMS[name]
    _, got = exact_and_got(FORMS[name], dtype)
    inputs = operands(shapes)
    with torch.autocast("cpu", dtype, cache_enabled=False):
        output = function(*inputs)
    assert output.dtype == dtype
    assert output.stride() == got[0].stride() or "conv" not in name, "the order in memory is torch's"
    for one, theirs in zip(got, with_gradients(function, inputs, output, dtype), strict=True):  # which rounds more than once
        assert float((one.double() - theirs.double()).abs().max()) <= 3 * torch.finfo(dtype).eps * float(theirs.abs().max())


LARGE: dict[str, Case] = {  # the longest of n, k and m in turn, weights in rows and in columns
    "columns": (F.linear, [(3, 5), (200, 5), (200,)]),
    "columns of a weight in columns": (lambda c, x, w: torch.addmm(c, x, w, beta=2, alpha=0.5), [(200,), (3, 5), (5, 200)]),
    "columns and a full matrix": (torch.addmm, [(3, 200), (3, 5), (5, 200)]),
    "rows": (F.linear, [(2, 100, 5), (4, 5), (4,)]),
    "rows of a weight in columns": (lambda c, x, w: torch.addmm(c, x, w, alpha=0.5), [(200, 1), (200, 5), (5, 4)]),
    "sums": (F.linear, [(3, 200), (4, 200), (4,)]),
    "sums of a weight in columns": (lambda c, x, w: torch.addmm(c, x, w, alpha=0.5), [(4,), (3, 200), (200, 4)]),
    "a batch": (torch.matmul, [(5, 4, 9, 8), (5, 4, 8, 7)]),
    "a batch added": (lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5), [(9, 7), (20, 9, 8), (20, 8, 7)]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(LARGE))
@pytest.mark.parametrize("block", [emulated, whole], ids=lambda block: block.__name__)
def test_large_matrices_in_pieces_have_the_same_numbers(block: Any, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size of 64 elements stands for the 4 million from which on products are cut up."""
    exact, uncut = exact_and_got(LARGE[name], dtype, block)
    monkeypatch.setattr(pieces, "WHOLE", 64)
    monkeypatch.setattr(pieces, "PIECE", 320)
    cut: list[int] = []
    monkeypatch.setattr(pieces, "_pieces", lambda *a, inner=pieces._pieces: cut.append(len(made := inner(*a))) or made)
    monkeypatch.setattr(pieces, "_batch_pieces", lambda *a, inner=pieces._batch_pieces: cut.append(len(made := inner(*a) or [])) or made)
    _, got = exact_and_got(LARGE[name], dtype, block)
    assert min(cut) > 1
    assert len(cut) == 2, "forward and backward"
    one_rounding(exact, got, dtype)
    for one, other in zip(got, uncut, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("name", ["columns", "rows", "sums"])
def test_pieces_make_only_the_gradients_asked_for(name: str, needed: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = LARGE[name]
    _, uncut = exact_and_got(LARGE[name], torch.bfloat16)
    monkeypatch.setattr(pieces, "WHOLE", 64)
    monkeypatch.setattr(pieces, "PIECE", 320)
    inputs = [x.detach().requires_grad_(need) for x, need in zip(operands(shapes), needed, strict=True)]
    with emulated(torch.bfloat16):
        output = function(*inputs)
    torch.autograd.backward(output, torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype))
    for x, need, expected in zip(inputs, needed, uncut[1:], strict=True):
        assert (x.grad is not None) == need
        if x.grad is not None:
            torch.testing.assert_close(x.grad, expected, rtol=2**-7, atol=1e-5 * float(expected.abs().max()))


SAVING = [name for name in FORMS if name not in ("attention, one mask for each head",)]


@pytest.mark.parametrize("name", SAVING)
def test_nothing_but_16_bit_numbers_and_booleans_is_kept_for_the_backward_pass(name: str) -> None:
    function, shapes = FORMS[name]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), emulated(torch.bfloat16):  # type: ignore[func-returns-value]
        function(*operands(shapes))
    assert saved
    assert {t.dtype for t in saved} <= {torch.bfloat16, torch.bool}


def test_with_dropout_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for few scores, which torch keeps in fp32."""
    monkeypatch.setattr(attention, "KEPT", 199)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), emulated(torch.bfloat16):  # type: ignore[func-returns-value]
        sdpa(dropout_p=0.5)(*operands(QKV))
    assert {t.dtype for t in saved} == {torch.bfloat16, torch.bool}


@pytest.mark.parametrize("kept", [199, 200])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": -0.4}, {"enable_gqa": True}, {"attn_mask": LOWER}], ids=str)
def test_dropout_is_that_of_torch_with_the_same_seed(options: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KEPT", kept)  # there are 200 scores
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = operands([(2, 4, 5, 8), (2, heads, 5, 8), (2, heads, 5, 8)])
    torch.manual_seed(3)
    with emulated(torch.bfloat16):
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, **options)
        after = torch.rand(1)
    got = with_gradients(F.scaled_dot_product_attention, [q, k, v], output, torch.bfloat16)
    wide = [t.detach().bfloat16().float().requires_grad_() for t in (q, k, v)]
    torch.manual_seed(3)
    true = sdpa(dropout_p=0.4, **{k: v for k, v in options.items() if k != "attn_mask"})(*wide, options.get("attn_mask"))
    assert torch.equal(torch.rand(1), after), "as many random numbers are drawn"
    expected = with_gradients(F.scaled_dot_product_attention, wide, true, torch.bfloat16)
    one_rounding([t.double() for t in expected], got, torch.bfloat16)


def test_everything_dropped_is_zero() -> None:
    q, k, v = operands(QKV)
    with emulated(torch.bfloat16):
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    torch.autograd.backward(output.sum())
    assert not output.any()
    assert v.grad is not None
    assert not v.grad.any()


def test_a_backend_that_the_user_chose_is_obeyed() -> None:
    q, k, v = operands(QKV)
    results = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with emulated(torch.bfloat16), sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(q, k, v)
        assert output.grad_fn is not None
        results.append(output.grad_fn.name())
    assert results == ["_AgainBackward", "_FlashBackward"]


def test_a_mask_beside_causal_is_refused_where_torch_refuses_it() -> None:
    q, k, v = operands(QKV)
    with emulated(torch.bfloat16), pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=LOWER, dropout_p=0.5, is_causal=True)


TWICE = {name: FORMS[name] for name in ("addmm of a full matrix", "baddbmm of a row", "conv2d, the same size", "einsum over two indices")} | {
    "conv_transpose1d": FORMS["conv_transpose1d"],
    "attention, causal": FORMS["attention, causal"],
    "attention, learned mask": FORMS["attention, learned mask"],
    "attention, grouped queries": FORMS["attention, grouped queries"],
    "einsum that broadcasts an index": FORMS["einsum that broadcasts an index"],
    "large": LARGE["columns"],
}


@pytest.mark.parametrize("name", list(TWICE))
def test_gradients_of_gradients_are_those_of_fp32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = TWICE[name]
    monkeypatch.setattr(pieces, "WHOLE", 64)

    def second(low: bool) -> list[Tensor]:
        inputs = operands(shapes)
        if low:
            with emulated(torch.bfloat16):
                output = function(*inputs)
        else:
            with sdpa_kernel(SDPBackend.MATH):
                output = function(*inputs)
        first = torch.autograd.grad(output.float().pow(2).sum(), inputs, create_graph=True)
        penalty = torch.stack([g.float().pow(2).sum() for g in first]).sum()
        return list(torch.autograd.grad(penalty, inputs))

    for one, true in zip(second(True), second(False), strict=True):
        assert float(true.abs().max()) > 0
        assert float((one - true).abs().max()) <= 12 * 2**-8 * float(true.abs().max())


OTHERWISE = ["conv2d, the same size", "attention, causal", "einsum over two indices", "addmm of a full matrix"]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap over torch's flash kernel
@pytest.mark.parametrize("name", OTHERWISE)
def test_transforms_of_torch_func_have_the_same_numbers(name: str) -> None:
    function, shapes = FORMS[name]
    inputs = [x.detach() for x in operands(shapes)]
    _, (_, expected, *_) = exact_and_got(FORMS[name], torch.bfloat16)
    above = torch.randn(function(*inputs).shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    with emulated(torch.bfloat16):
        alone = function(*inputs)
        batched = torch.func.vmap(function)(*[x[None] for x in inputs])
        gradient = torch.func.grad(lambda *a: (function(*a).float() * above.float()).sum())(*inputs)
    torch.testing.assert_close(batched[0], alone, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow  # torch compiles its formulas at the first derivative in forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in OTHERWISE if "attention" not in name])
def test_derivatives_in_forward_mode(name: str) -> None:
    function, shapes = FORMS[name]
    inputs, slopes = ([x.detach() for x in operands(shapes, seed)] for seed in (0, 1))
    with emulated(torch.bfloat16):
        output, moved = torch.func.jvp(function, tuple(inputs), tuple(slopes))
        assert torch.equal(output, function(*inputs))
    exact = torch.func.jvp(function, tuple(x.bfloat16().double() for x in inputs), tuple(x.bfloat16().double() for x in slopes))[1]
    torch.testing.assert_close(moved.double(), exact, rtol=2**-8, atol=1e-5 * float(exact.abs().max()))


class Conv1D(nn.Module):
    """A linear layer by addmm, with its weight in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(x.detach()) for x in operands([(6, 4), (4,)]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], 4)


def test_gradients_lie_in_memory_as_their_weights_do() -> None:
    """Nobody has to turn the gradient of a weight, whichever way the weight lies."""
    for layer in (Conv1D(), nn.Linear(6, 4)):
        with emulated(torch.bfloat16):
            output = layer(operands([(2, 3, 6)])[0])
        torch.autograd.backward(output.float().square().sum())
        for p in layer.parameters():
            assert p.grad is not None
            assert p.grad.stride() == p.stride()
            assert p.grad.dtype == torch.float32
            assert p.grad._base is None


def test_a_weight_changed_after_the_forward_pass_does_not_change_its_gradients() -> None:
    """What was rounded is kept, as torch's autocast keeps it; only second derivatives, which are made of the weight itself, are refused then."""
    layer, (x,) = nn.Linear(6, 4), operands([(3, 6)])
    with emulated(torch.bfloat16):
        expected = torch.autograd.grad(layer(x).float().square().sum(), x)[0]
        output = layer(x)
    with torch.no_grad():
        layer.weight.zero_()
    loss = output.float().square().sum()
    assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), Conv1D()], ids=lambda layer: type(layer).__name__)
def test_second_derivatives_of_layers_are_those_of_fp32(layer: nn.Module) -> None:
    def second(low: bool) -> list[Tensor]:
        (x,) = operands([(3, 6)])
        with emulated(torch.float16) if low else nullcontext():
            output = layer(x)
        first = torch.autograd.grad(output.float().pow(3).mul(0.1).sum(), [x, *layer.parameters()], create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.pow(2).sum() for g in first]).sum(), [x, *layer.parameters()]))

    for one, true in zip(second(True), second(False), strict=True):
        assert float(true.abs().max()) > 0
        assert float((one - true).abs().max()) <= 24 * 2**-11 * float(true.abs().max())


def test_memory_that_is_used_again_is_used_by_one_product_at_a_time() -> None:
    """Results and saved tensors are never in it: products of other sizes, threads and inference blocks between change nothing."""
    sizes = [(64, 256, 320), (300, 256, 64), (256, 400, 256)]
    cases = [operands([(n, k), (m, k), (m,)]) for n, k, m in sizes]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        with emulated(torch.bfloat16):
            output = F.linear(*inputs)
        return with_gradients(F.linear, inputs, output, torch.bfloat16)

    alone = [run(inputs) for inputs in cases]
    with torch.inference_mode(), emulated(torch.bfloat16):
        F.linear(*operands([(600, 256), (600, 256)]))
    with ThreadPoolExecutor(3) as pool:
        for turn in pool.map(lambda i: (i % 3, run(cases[i % 3])), range(12)):
            assert all(torch.equal(a, b) for a, b in zip(alone[turn[0]], turn[1], strict=True))
    outputs = []
    for inputs in cases:
        with emulated(torch.bfloat16):
            outputs.append(F.linear(*inputs))
    for inputs, output, expected in zip(reversed(cases), reversed(outputs), reversed(alone), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(F.linear, inputs, output, torch.bfloat16), expected, strict=True))
