"""Every routed product against torch.autocast on the same operands, and against fp64 with rounded operands.

The emulation is opened explicitly, so that these tests say the same on any CPU. There are two ways into it: of fp32 operands under autocast, and of
operands that are 16-bit themselves in the block of a `*-true` policy, in which nothing is cast.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.amp import forward_context
from halfstep.amp.emulation import FAMILIES, ROUTES, Emulation
from halfstep.policy import parse

FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = [torch.bfloat16, torch.float16]
Shapes = list[tuple[int, ...]]
Case = tuple[Callable[..., Tensor], Shapes]

CASES: dict[Any, list[Case]] = {  # a routed function: how to call it, and the shapes of its operands
    F.linear: [
        (F.linear, [(3, 5, 7), (4, 7), (4,)]),
        (F.linear, [(3, 5, 7), (4, 7)]),
        (F.linear, [(7,), (4, 7), (4,)]),
        (F.linear, [(7,), (4, 7)]),
        (lambda x, w: F.linear(x, w), [(3, 7), (7,)]),
        (lambda x, w, b: F.linear(bias=b, input=x, weight=w), [(3, 7), (4, 7), (4,)]),
    ],
    torch.matmul: [
        (torch.matmul, [(3, 5), (5, 4)]),
        (torch.matmul, [(3, 5), (5,)]),
        (torch.matmul, [(5,), (5, 4)]),
        (torch.matmul, [(5,), (5,)]),
        (torch.matmul, [(2, 1, 3, 5), (4, 5, 6)]),
        (torch.matmul, [(2, 3, 5), (5, 6)]),
        (torch.matmul, [(3, 5), (2, 5, 6)]),
        (torch.matmul, [(5,), (2, 5, 6)]),
        (torch.matmul, [(2, 4, 5), (5,)]),
        (lambda a, b: torch.matmul(input=a, other=b), [(3, 5), (5, 4)]),
    ],
    torch.mm: [(torch.mm, [(3, 5), (5, 4)]), (lambda a, b: torch.mm(a, mat2=b), [(3, 5), (5, 4)])],
    torch.bmm: [(torch.bmm, [(2, 3, 5), (2, 5, 4)]), (lambda a, b: torch.bmm(a, mat2=b), [(2, 3, 5), (2, 5, 4)])],
    Tensor.matmul: [(lambda a, b: a.matmul(b), [(2, 3, 5), (2, 5, 4)]), (lambda a, b: a.matmul(other=b), [(3, 5), (5, 4)])],
    Tensor.mm: [(lambda a, b: a.mm(b), [(3, 5), (5, 4)])],
    Tensor.bmm: [(lambda a, b: a.bmm(b), [(2, 3, 5), (2, 5, 4)])],
    Tensor.__matmul__: [(lambda a, b: a @ b, [(3, 5), (5, 4)]), (lambda a, b: a @ b.mT, [(2, 3, 5), (2, 4, 5)])],
    Tensor.__rmatmul__: [(lambda a, b: b.__rmatmul__(a), [(3, 5), (5, 4)])],
    torch.einsum: [
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 5), (5, 4)]),
        (lambda a, b: torch.einsum("bhid,bhjd->bhij", [a, b]), [(2, 2, 3, 5), (2, 2, 4, 5)]),
        (lambda a, b: torch.einsum("i,i->", a, b), [(5,), (5,)]),
    ],
    torch.addmm: [(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(4,), (3, 5), (5, 4)])],
    torch.baddbmm: [(torch.baddbmm, [(2, 3, 4), (2, 3, 5), (2, 5, 4)])],
    torch.addbmm: [(torch.addbmm, [(3, 4), (2, 3, 5), (2, 5, 4)])],
    Tensor.addmm: [(lambda c, a, b: c.addmm(a, b), [(3, 4), (3, 5), (5, 4)])],
    Tensor.baddbmm: [(lambda c, a, b: c.baddbmm(a, b, alpha=0.5), [(2, 3, 4), (2, 3, 5), (2, 5, 4)])],
    Tensor.addbmm: [(lambda c, a, b: c.addbmm(a, b), [(3, 4), (2, 3, 5), (2, 5, 4)])],
    F.conv1d: [(lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 4, 6), (3, 4, 3), (3,)]), (F.conv1d, [(2, 4, 6), (3, 4, 3)])],
    F.conv2d: [(lambda x, w, b: F.conv2d(x, w, b, stride=2, groups=2), [(2, 4, 6, 6), (6, 2, 3, 3), (6,)])],
    F.conv3d: [(lambda x, w, b: F.conv3d(x, w, bias=b, padding=1), [(1, 2, 4, 4, 4), (3, 2, 3, 3, 3), (3,)])],
    F.conv_transpose1d: [(lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), [(2, 4, 5), (4, 3, 3), (3,)])],
    F.conv_transpose2d: [(lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), [(2, 4, 4, 4), (4, 3, 3, 3), (3,)])],
    F.conv_transpose3d: [(lambda x, w, b: F.conv_transpose3d(x, w, b, stride=2), [(1, 2, 3, 3, 3), (2, 3, 2, 2, 2), (3,)])],
    torch.linalg.multi_dot: [(lambda *m: torch.linalg.multi_dot(m), [(3, 5), (5, 4)])],
    torch.linalg.vecdot: [(torch.linalg.vecdot, [(5,), (5,)])],
    F.scaled_dot_product_attention: [
        (F.scaled_dot_product_attention, [(2, 2, 5, 4)] * 3),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), [(2, 2, 5, 4)] * 3),
        (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), [(2, 2, 5, 4)] * 3 + [(5, 5)]),
    ],
}
FLAT = [(func, i) for func, cases in CASES.items() for i in range(len(cases))]
NAMES = [f"{'Tensor.' if func is getattr(Tensor, func.__name__, None) else ''}{func.__name__}-{i}" for func, i in FLAT]


class Seen(TorchDispatchMode):
    """Notes the formats in which torch's products really run."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "dot", "vdot", "mv", "linear", "convolution", "attention", "addmv")

    def __init__(self) -> None:
        super().__init__()
        self.formats: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].strip("_")
        if any(name == p or name.startswith(f"{p}_") or (p in ("convolution", "attention") and p in name) for p in self.PRODUCTS):
            self.formats |= {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
        return func(*args, **(kwargs or {}))


@contextmanager
def emulated(dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast("cpu", dtype, cache_enabled=False), Emulation():
        yield


def whole(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return forward_context(parse(f"{FORMATS[dtype]}-true,products=emulated"), torch.device("cpu"))


BLOCKS = {"autocast": emulated, "whole": whole}


def operands(shapes: Shapes, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def given(shapes: Shapes, way: str, dtype: torch.dtype) -> list[Tensor]:
    """The operands as they are in each of the `BLOCKS`."""
    return operands(shapes) if way == "autocast" else [x.detach().to(dtype).requires_grad_() for x in operands(shapes)]


def forward_and_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype, forward: AbstractContextManager[Any]
) -> list[Tensor]:
    """The output, made inside `forward`, and the gradients of the operands, made outside, for an output gradient that `dtype` can hold."""
    with forward:
        output = function(*inputs)
    above = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, above.to(output.dtype))]


def within(got: list[Tensor], expected: list[Tensor], roundings: float, dtype: torch.dtype) -> None:
    """Law: no element is further off than so many roundings (eps) of the largest element."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        bound = roundings * torch.finfo(dtype).eps * float(other.abs().max())
        assert float((one.double() - other.double()).abs().max()) <= bound


def test_every_route_has_a_case() -> None:
    assert set(CASES) == set(ROUTES) - {torch.lstm}, "LSTMs have a test of their own"


def test_the_families_share_all_routes_out() -> None:
    assert set(FAMILIES) == {"matmul", "convolution", "attention"}
    assert frozenset.union(*FAMILIES.values()) == set(ROUTES)
    assert sum(map(len, FAMILIES.values())) == len(ROUTES)
    assert torch.lstm in FAMILIES["matmul"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("func", "case"), FLAT, ids=NAMES)
@pytest.mark.parametrize("way", BLOCKS)
def test_a_product_is_that_of_fp64_with_rounded_operands_and_one_rounding(way: str, func: Any, case: int, dtype: torch.dtype) -> None:
    function, shapes = CASES[func][case]
    inputs = given(shapes, way, dtype)
    got = forward_and_gradients(function, inputs, dtype, BLOCKS[way](dtype))
    wide = [x.detach().to(dtype).double().requires_grad_() for x in inputs]
    expected = forward_and_gradients(function, wide, dtype, nullcontext())
    assert got[0].dtype == dtype
    assert all(g.dtype == x.dtype for g, x in zip(got[1:], inputs, strict=True))
    assert all(torch.equal(g, g.to(dtype).to(g.dtype)) for g in got), "the results are 16-bit numbers"
    for one, exact in zip(got, expected, strict=True):  # half an eps is one rounding; fp32 sums add a little
        torch.testing.assert_close(one.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("func", "case"), FLAT, ids=NAMES)
def test_a_product_is_torchs_within_a_rounding_of_each(func: Any, case: int, dtype: torch.dtype) -> None:
    """torch's own 16-bit kernels round once or more themselves (its convolutions sum in 16 bits)."""
    function, shapes = CASES[func][case]
    got = forward_and_gradients(function, operands(shapes), dtype, emulated(dtype))
    expected = forward_and_gradients(function, operands(shapes), dtype, torch.autocast("cpu", dtype))
    assert [g.dtype for g in got] == [e.dtype for e in expected]
    within(got, expected, 2.0, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("func", "case"), FLAT, ids=NAMES)
def test_the_products_really_run_in_fp32_and_the_same_in_either_block(func: Any, case: int, dtype: torch.dtype) -> None:
    function, shapes = CASES[func][case]
    found = []
    for way, block in [*BLOCKS.items()] * 2:
        with Seen() as seen:
            found.append(forward_and_gradients(function, given(shapes, way, dtype), dtype, block(dtype)))
        assert seen.formats == {torch.float32}
    for other in found[1:]:
        assert all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in zip(found[0], other, strict=True))


def test_what_is_seen_without_emulation_is_16_bits() -> None:
    """The observer of the test above can see the difference."""
    for func in (F.linear, torch.matmul, torch.bmm, F.conv2d):
        function, shapes = CASES[func][0]
        with Seen() as seen:
            forward_and_gradients(function, operands(shapes), torch.bfloat16, torch.autocast("cpu", torch.bfloat16))
        assert torch.bfloat16 in seen.formats


@pytest.mark.parametrize("func", [F.linear, torch.matmul, torch.addmm, torch.einsum, F.conv2d], ids=lambda f: f.__name__)
def test_a_backward_pass_inside_the_block_gives_the_same_numbers(func: Any) -> None:
    function, shapes = CASES[func][0]
    outside = forward_and_gradients(function, operands(shapes), torch.bfloat16, emulated(torch.bfloat16))
    with emulated(torch.bfloat16):
        inside = forward_and_gradients(function, operands(shapes), torch.bfloat16, nullcontext())
    within(inside, outside, 1.0, torch.bfloat16)


EINSUMS = {  # equations without a product of matrices too: torch.autocast leaves those in fp32
    "i,j->ij": [(5,), (6,)],
    "bi,bj->bij": [(3, 4), (3, 5)],
    "ij,ij->ij": [(3, 4), (3, 4)],
    "ij->ji": [(3, 4)],
    "ij->i": [(3, 4)],
    "ii->i": [(3, 3)],
    "ij,ij->i": [(3, 4), (3, 4)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 6)],
    "...ij,...jk->...ik": [(2, 3, 4), (2, 4, 5)],
}


@pytest.mark.parametrize("equation", list(EINSUMS))
def test_einsum_rounds_where_torchs_autocast_does_and_not_elsewhere(equation: str) -> None:
    """Rotary position frequencies, einsum("i,j->ij", positions, frequencies), must stay exact under autocast."""
    inputs = operands(EINSUMS[equation])
    with emulated(torch.bfloat16):
        got = torch.einsum(equation, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.einsum(equation, *inputs)
    assert got.dtype == expected.dtype
    within([got.detach()], [expected.detach()], 2.0 if expected.dtype == torch.bfloat16 else 0.0, torch.bfloat16)


def attention(inputs: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.0, **options)
    return torch.cat([t.reshape(-1) for t in (*layer(inputs, inputs, inputs, need_weights=bool(options)),) if t is not None])


def encoder(inputs: Tensor) -> Tensor:
    torch.manual_seed(0)
    output: Tensor = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)(inputs)
    return output


def encoder_eval(inputs: Tensor) -> Tensor:
    """Without gradients torch has a fast path of one fused operation."""
    torch.manual_seed(0)
    with torch.no_grad():
        output: Tensor = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()(inputs)
    return output


MODULES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": attention,
    "attention with weights and added keys": lambda x: attention(x, add_bias_kv=True, add_zero_attn=True),
    "encoder layer": encoder,
    "encoder layer, fast path": encoder_eval,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(MODULES))
def test_attention_modules_are_torchs_and_their_products_run_in_fp32(name: str, dtype: torch.dtype) -> None:
    def run(forward: AbstractContextManager[Any]) -> list[Tensor]:
        inputs = operands([(2, 5, 8)])
        with forward:
            output = MODULES[name](inputs[0])
        if not output.requires_grad:
            return [output.float()]
        slopes = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
        return [output.detach().float(), *torch.autograd.grad((output.float() * slopes).sum(), inputs)]

    with Seen() as seen:
        got = run(emulated(dtype))
    assert seen.formats == {torch.float32}
    within(got, run(torch.autocast("cpu", dtype)), 4.0, dtype)  # a chain of several roundings
    within(got, run(nullcontext()), 8.0, dtype)
    assert not torch.equal(got[0], run(nullcontext())[0])
