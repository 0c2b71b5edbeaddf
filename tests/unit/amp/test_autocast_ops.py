"""The op policy, function by function: formats against torch's own CUDA dispatcher on tensors without data, values against fp32.

`FakeTensorMode` makes CUDA tensors that have a format and no data, and torch's CUDA autocast casts them as it does on a GPU: the formats
that are expected below are asked of torch and not written down here.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from halfstep import amp
from halfstep.amp import ops
from halfstep.amp.emulation import ROUTES

DTYPES = [torch.bfloat16, torch.float16]


class Shape(tuple[int, ...]):
    """Stands for a floating tensor of this shape, with values in (0.1, 0.9)."""


M, V, IMAGE, CLIP = Shape((4, 4)), Shape((4,)), Shape((1, 2, 4, 4)), Shape((1, 2, 4, 4, 4))
SEQUENCE, LINE = Shape((1, 4, 4)), Shape((1, 2, 4))
LABELS, SIGNS = torch.tensor([1, 0, 3, 2]), torch.tensor([1.0, -1.0, 1.0, -1.0])
PLACES = torch.zeros(1, 2, 2, 2, 2, dtype=torch.int64)
WEIGHTS = [Shape((12, 4)), Shape((12, 4)), Shape((12,)), Shape((12,))]
RNN = [Shape((4, 4)), Shape((4, 4)), Shape((4,)), Shape((4,))]
GRU_CELL = (M, M, *WEIGHTS)

Table = dict[str, list[tuple[Any, ...]]]
FP32: Table = {
    **{name: [(M,)] for name in ops.POINTWISE_FP32 if name != "pow"},
    "pow": [(M, 2.0), (M, M)],
    **{name: [(M, -1)] for name in ("softmax", "log_softmax", "softmin", "gumbel_softmax", "cumsum", "cumprod", "logsumexp")},
    "gumbel_softmax": [(M,)],
    **{name: [(M,), (M, 1)] for name in ("sum", "prod")},
    "sum_to_size": [(M, 1, 4)],
    "norm": [(M,)],
    "vector_norm": [(M,), (M, 3)],
    **{
        name: [(M,)]
        for name in ("matrix_norm", "nuclear_norm", "norm_except_dim", "pdist", "normalize", "trapz", "trapezoid", "cumulative_trapezoid")
    },
    "frobenius_norm": [(M, [0, 1])],
    **{name: [(M, M)] for name in ("dist", "cdist", "pairwise_distance", "cosine_similarity")},
    "renorm": [(M, 2, 0, 1.0)],
    "layer_norm": [(M, (4,), V, V)],
    "native_layer_norm": [(M, (4,), V, V, 1e-5)],
    "group_norm": [(M, 2)],
    "rms_norm": [(M, (4,))],
    "local_response_norm": [(SEQUENCE, 2)],
    "lp_pool1d": [(LINE, 2.0, 2)],
    "lp_pool2d": [(IMAGE, 2.0, 2)],
    "lp_pool3d": [(CLIP, 2.0, 2)],
    **{name: [(M, LABELS)] for name in ("cross_entropy", "nll_loss", "nll_loss_nd", "multi_margin_loss")},
    **{name: [(M, M)] for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits")},
    "multilabel_soft_margin_loss": [(M, M)],
    "poisson_nll_loss": [(M, M, True, False, 1e-8, 1)],
    "gaussian_nll_loss": [(M, M, M)],
    "ctc_loss": [(Shape((4, 1, 4)), torch.tensor([[1, 2]]), [4], [2])],
    "cosine_embedding_loss": [(M, M, SIGNS)],
    "hinge_embedding_loss": [(V, SIGNS)],
    "margin_ranking_loss": [(V, V, SIGNS)],
    "multilabel_margin_loss": [(M, torch.ones(4, 4, dtype=torch.int64))],
    "soft_margin_loss": [(V, SIGNS)],
    **{name: [(M, M, M)] for name in ("triplet_margin_loss", "triplet_margin_with_distance_loss")},
    **{name: [(IMAGE, 8)] for name in ("upsample", "upsample_nearest", "upsample_bilinear")},
    **{f"{kind}1d": [(LINE, [8], None)] for kind in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"{kind}2d": [(IMAGE, [8, 8], None)] for kind in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"{kind}3d": [(CLIP, [8, 8, 8], None)] for kind in ("upsample_nearest", "_upsample_nearest_exact")},
    "upsample_linear1d": [(LINE, [8], False, None)],
    "upsample_trilinear3d": [(CLIP, [8, 8, 8], False, None)],
    **{
        f"{n}": [(IMAGE, [8, 8], False, None)]
        for n in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    },
}
LOW: Table = {
    **{name: [(M, M)] for name in ("linear", "matmul", "mm", "vecdot", "chain_matmul")},
    "bmm": [(SEQUENCE, SEQUENCE)],
    "mv": [(M, V)],
    "addmm": [(M, M, M)],
    "addmv": [(V, M, V)],
    "addr": [(M, V, V)],
    "addbmm": [(M, SEQUENCE, SEQUENCE)],
    "baddbmm": [(SEQUENCE, SEQUENCE, SEQUENCE)],
    "einsum": [("ij,jk->ik", M, M), ("i,j->ij", V, V), ("ij,jk,kl->il", M, M, M)],
    "multi_dot": [([M, M, M],)],
    "prelu": [(M, Shape((1,)))],
    "conv_tbc": [(Shape((4, 1, 2)), Shape((3, 2, 2)), Shape((2,)))],
    **{f"conv{d}d": [(Shape((1, 2, *(4,) * d)), Shape((2, 2, *(3,) * d)))] for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": [(Shape((1, 2, *(4,) * d)), Shape((2, 2, *(3,) * d)))] for d in (1, 2, 3)},
    "scaled_dot_product_attention": [(IMAGE, IMAGE, IMAGE)],
    "lstm": [(SEQUENCE, [LINE.__class__((1, 4, 4))] * 2, [Shape((16, 4)), Shape((16, 4))] + [Shape((16,))] * 2, True, 1, 0.0, False, False, False)],
    "gru": [(SEQUENCE, SEQUENCE, WEIGHTS, True, 1, 0.0, False, False, False)],
    **{name: [(SEQUENCE, SEQUENCE, RNN, True, 1, 0.0, False, False, False)] for name in ("rnn_tanh", "rnn_relu")},
    "lstm_cell": [(M, [M, M], Shape((16, 4)), Shape((16, 4)), Shape((16,)), Shape((16,)))],
    "gru_cell": [GRU_CELL],
    **{name: [(M, M, *RNN)] for name in ("rnn_tanh_cell", "rnn_relu_cell")},
}
WIDEST: Table = {
    **{name: [(M, M, M)] for name in ("addcdiv", "addcmul")},
    **{name: [(M, M)] for name in ("atan2", "arctan2", "tensordot")},
    "cross": [(Shape((4, 3)), Shape((4, 3)))],
    "bilinear": [(M, M, SEQUENCE)],
    **{name: [(V, V)] for name in ("dot", "vdot", "inner")},
    "grid_sample": [(CLIP, Shape((1, 2, 2, 2, 3)))],
    "grid_sampler": [(CLIP, Shape((1, 2, 2, 2, 3)), 0, 0, False)],
    "index_put": [(V, (torch.tensor([1]),), Shape((1,)))],
    "scatter_add": [(M, 0, LABELS[None], M)],
}
AS_GIVEN: Table = {
    **{name: [(CLIP, 2)] for name in ("avg_pool3d", "adaptive_avg_pool3d", "max_pool3d", "adaptive_max_pool3d")},
    **{name: [(CLIP, 2)] for name in ("max_pool3d_with_indices", "adaptive_max_pool3d_with_indices")},
    "pad": [(LINE, (1, 1), "reflect"), (LINE, (1, 1), "replicate"), (LINE, (1, 1))],
    "max_unpool1d": [(Shape((1, 2, 2)), torch.tensor([[[0, 2], [1, 3]]]), 2)],
    "max_unpool2d": [(Shape((1, 2, 2, 2)), torch.tensor([[[0, 2], [8, 10]]] * 2)[None], 2)],
    "max_unpool3d": [(Shape((1, 2, 2, 2, 2)), torch.arange(8).reshape(2, 2, 2).expand(1, 2, 2, 2, 2).contiguous(), 2)],
    "trace": [(M,)],
}
ELSEWHERE: dict[str, Callable[..., Any]] = {  # functions in no list: they follow their operands, as on CUDA
    **{f.__name__: f for f in (F.gelu, F.silu, F.relu, F.elu, F.leaky_relu, F.hardswish, F.mish, F.logsigmoid, F.dropout, F.tanhshrink, F.softsign)},
    **{
        f.__name__: f
        for f in (torch.sin, torch.tanh, torch.sigmoid, torch.erf, torch.sqrt, torch.exp2, torch.atan, torch.asinh, torch.neg, torch.abs)
    },
    **{f.__name__: f for f in (torch.mean, torch.std, torch.var, torch.amax, torch.argmax, torch.sort, torch.diff, torch.t, torch.nansum)},
    "add": lambda x: x + x,
    "add 1": lambda x: x + 1,
    "mul": lambda x: x * 0.5,
    "div": lambda x: x / x,
    "half minus": lambda x: 1 - x,
    "with fp32": lambda x: x * torch.ones(4, device=x.device),
    "cat": lambda x: torch.cat([x, x.float()]),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "std over": lambda x: x.std(0),
    "avg_pool": lambda x: F.avg_pool1d(x.unsqueeze(0), 2),
    "max_pool": lambda x: F.max_pool1d(x.unsqueeze(0), 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x.unsqueeze(0), 1),
    "area": lambda x: F.interpolate(x.unsqueeze(0).unsqueeze(0), 2, mode="area"),
    "embedding": lambda x: F.embedding(torch.tensor([1], device=x.device), x),
    "1 / x": lambda x: 1 / x,
    "2 ** x": lambda x: 2**x,
    "x ** 2": lambda x: x**2,
    "x.mT": lambda x: x.mT,
    "interpolate": lambda x: F.interpolate(x.unsqueeze(0).unsqueeze(0), 8),
    "interpolate bilinear": lambda x: F.interpolate(x.unsqueeze(0).unsqueeze(0), 8, mode="bilinear", antialias=True),
    "special.softmax": lambda x: torch.special.softmax(x, 0),
    "x.norm": lambda x: x.norm(dim=0, keepdim=True),
    "linalg.norm": lambda x: torch.linalg.norm(x),
}
NOT_WITHOUT_DATA = ("gaussian_nll_loss", "ctc_loss", "lstm", "gru", "rnn_tanh", "rnn_relu", "gru_cell")  # they look at values or need a GPU's library
OTHER_ARGUMENTS = (torch._C._nn.max_unpool2d, torch._C._nn.max_unpool3d, Tensor.__rtruediv__)  # what F.max_unpool2d calls; 1 / x is in ELSEWHERE
TABLES = {"fp32": FP32, "low": LOW, "widest": WIDEST, "as given": AS_GIVEN}
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def cases(table: Table) -> list[Any]:
    """Every op of a table in each of the forms in which it can be called."""
    return [
        pytest.param(name, form, args, id=f"{name}-{i}-{j}")
        for name, calls in table.items()
        for i, form in enumerate(ops.forms(name))
        for j, args in enumerate(calls)
        if form not in OTHER_ARGUMENTS
    ]


def made(args: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The arguments with tensors for the shapes in them."""
    generator = torch.Generator().manual_seed(0)

    def make(value: Any) -> Any:
        if isinstance(value, Shape):
            return (torch.rand(tuple(value), generator=generator) * 0.8 + 0.1).to(dtype)
        return [make(v) for v in value] if isinstance(value, list) else value

    return tuple(make(a) for a in args)


def formats(result: Any) -> list[torch.dtype]:
    return [t.dtype for t in tree_leaves(result) if isinstance(t, Tensor)]


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """torch's CUDA autocast without a GPU, for tensors without data."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def on_cuda(call: Callable[..., Any], args: Any, dtype: torch.dtype) -> list[torch.dtype]:
    """The formats of the results on CUDA under torch's autocast."""
    with FakeTensorMode(), cuda_autocast(dtype):
        given = tree_map(lambda v: torch.empty(v.shape, dtype=v.dtype, device="cuda") if isinstance(v, Tensor) else v, args)
        return formats(call(*given))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch warns of functions that it will drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_op_of_the_lists_has_a_case() -> None:
    assert set(FP32) == set(ops.FP32)
    assert set(LOW) == set(ops.LOW)
    assert set(WIDEST) == set(ops.WIDEST)
    assert set(AS_GIVEN) == {name for name in ops.FP32_ON_CPU_ONLY if "fractional" not in name}, "those draw random numbers"
    assert not (set(FP32) | set(LOW) | set(WIDEST)) & set(AS_GIVEN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "form", "args"), cases(FP32))
def test_an_fp32_op_is_what_fp32_gives_for_the_operands(name: str, form: Any, args: Any, dtype: torch.dtype) -> None:
    given = made(args, dtype)
    wide = tree_map(lambda v: v.float() if isinstance(v, Tensor) and v.dtype == dtype else v, given)
    torch.manual_seed(0)
    expected = form(*wide)
    torch.manual_seed(0)
    with amp.autocast("cpu", dtype):
        got = form(*given)
    assert formats(got) == formats(expected)
    assert set(formats(got)) == {torch.float32}
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)
    if name not in NOT_WITHOUT_DATA:
        assert on_cuda(form, given, dtype) == formats(got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operands", ["fp32", "16-bit"])
@pytest.mark.parametrize(("name", "form", "args"), cases(LOW))
def test_a_product_is_16_bit_as_on_cuda(name: str, form: Any, args: Any, operands: str, dtype: torch.dtype) -> None:
    given = made(args, torch.float32 if operands == "fp32" else dtype)
    with amp.autocast("cpu", dtype):
        got = form(*given)
    assert set(formats(got)) == {dtype}
    rounded = tree_map(lambda v: v.to(dtype).float() if isinstance(v, Tensor) and v.is_floating_point() else v, given)
    for one, exact in zip(tree_leaves(got), tree_leaves(form(*rounded)), strict=True):
        torch.testing.assert_close(one.float(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    if name not in NOT_WITHOUT_DATA:
        assert on_cuda(form, given, dtype) == formats(got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [None, 0, -1], ids=["all 16-bit", "the first fp32", "the last fp32"])
@pytest.mark.parametrize(("name", "form", "args"), cases(WIDEST))
def test_promoting_ops_run_in_the_widest_format(name: str, form: Any, args: Any, wide: int | None, dtype: torch.dtype) -> None:
    given = list(made(args, dtype))
    floats = [i for i, a in enumerate(given) if isinstance(a, Tensor) and a.is_floating_point()]
    if wide is not None:
        given[floats[wide]] = given[floats[wide]].float()
    with amp.autocast("cpu", dtype):
        got = form(*given)
    exact = form(*(a.float() if i in floats else a for i, a in enumerate(given)))
    assert formats(got) == [dtype if wide is None else torch.float32]
    if form is not torch.linalg.cross or wide is None:  # on CUDA it takes the first operand's, whatever the second is
        assert formats(got) == on_cuda(form, tuple(given), dtype)
    if wide is None:
        torch.testing.assert_close(got.float(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    else:
        assert torch.equal(got, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "form", "args"), cases(AS_GIVEN))
def test_what_only_the_cpu_list_casts_up_stays_in_its_format(name: str, form: Any, args: Any, dtype: torch.dtype) -> None:
    given = made(args, dtype)
    with amp.autocast("cpu", dtype):
        got = form(*given)
    assert formats(got) == on_cuda(form, given, dtype)
    exact = form(*(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in given))
    for one, other in zip(tree_leaves(got), tree_leaves(exact), strict=True):
        assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_functions_in_no_list_give_cudas_formats(name: str, dtype: torch.dtype) -> None:
    given = made((M,), dtype)
    with amp.autocast("cpu", dtype):
        got = formats(ELSEWHERE[name](*given))
    assert got == on_cuda(ELSEWHERE[name], given, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table", list(TABLES))
def test_the_devices_own_list_is_torchs(table: str, dtype: torch.dtype) -> None:
    """ops="device": formats and, where nothing is emulated, bits of torch.autocast on this device."""
    for case in cases(TABLES[table]):
        form, args = case.values[1:]
        given = made(args, dtype)

        def run(block: Any, form: Any = form, given: Any = given) -> Any:
            torch.manual_seed(0)
            try:
                with block:
                    return tree_leaves(form(*given))
            except (RuntimeError, NotImplementedError) as error:
                return str(error)

        expected, got = run(torch.autocast("cpu", dtype)), run(amp.autocast("cpu", dtype, ops="device"))
        if isinstance(expected, str) and form not in ROUTES:
            assert got == expected
        elif form not in ROUTES:
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
        elif not isinstance(expected, str):
            assert formats(got) == formats(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules_and_methods_are_covered(dtype: torch.dtype) -> None:
    layer = nn.Linear(8, 8)
    with amp.autocast("cpu", dtype):
        x = layer(torch.ones(2, 8))
        assert x.dtype == dtype
        for y in (nn.Softmax(-1)(x), nn.LayerNorm(8)(x), nn.GroupNorm(2, 8)(x), nn.RMSNorm(8)(x), nn.Softplus()(x), nn.CosineSimilarity()(x, x)):
            assert y.dtype == torch.float32
        for y in (nn.MSELoss()(x, x), nn.CrossEntropyLoss()(x, torch.tensor([0, 1])), nn.KLDivLoss(reduction="sum")(x, x), nn.HuberLoss()(x, x)):
            assert y.dtype == torch.float32
        for y in (nn.GRU(8, 4)(x)[0], nn.RNN(8, 4)(x)[0], nn.LSTM(8, 4)(x)[0], nn.GRUCell(8, 4)(x), nn.RNNCell(8, 4)(x), nn.LSTMCell(8, 4)(x)[0]):
            assert y.dtype == dtype
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        output, weights = attention(x[None], x[None], x[None])
        assert (output.dtype, weights.dtype) == (dtype, torch.float32), "softmax inside, in fp32"
        assert nn.Upsample(scale_factor=2)(x[None]).dtype == torch.float32


def test_sums_that_overflow_16_bits_do_not() -> None:
    x = torch.full((300,), 300.0, dtype=torch.float16)
    with amp.autocast("cpu", torch.float16):
        found = (x.sum(), x.pow(2).mean(), (x**2).sum(), x.norm(), x.cumsum(0)[-1], torch.prod(x[:3]), torch.linalg.vector_norm(x))
    assert [float(v) for v in found] == pytest.approx([9e4, 9e4, 2.7e7, 300 * 300**0.5, 9e4, 2.7e7, 300 * 300**0.5])


def test_in_place_forms_and_out_are_left_alone() -> None:
    x, target = torch.full((3,), 0.5, dtype=torch.bfloat16), torch.empty(3, dtype=torch.bfloat16)
    with amp.autocast("cpu", torch.bfloat16):
        assert x.clone().exp_().dtype == torch.bfloat16
        assert x.clone().pow_(2).dtype == torch.bfloat16
        assert torch.exp(x, out=target) is target
        y = x.clone()
        y **= 2
        assert y.dtype == torch.bfloat16
    assert torch.equal(target, x.exp())


@pytest.mark.parametrize("asked", [torch.float16, torch.float64])
def test_a_format_asked_for_is_given(asked: torch.dtype) -> None:
    x = torch.ones(3, dtype=torch.float16)
    with amp.autocast("cpu", torch.float16):
        assert x.sum(dtype=asked).dtype == asked
        assert F.softmax(x, -1, dtype=asked).dtype == asked


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_other_formats_are_untouched(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    with amp.autocast("cpu", torch.bfloat16):
        got = [x.sum().dtype, x.cumsum(0).dtype, x.prod().dtype]
    assert got == [x.sum().dtype, x.cumsum(0).dtype, x.prod().dtype]


def test_gradients_come_back_in_the_operands_format() -> None:
    x = torch.linspace(0, 1, 6).half().requires_grad_()
    with amp.autocast("cpu", torch.float16):
        loss = F.softmax(x, -1).pow(2).sum()
    loss.backward()
    wide = x.detach().float().requires_grad_()
    F.softmax(wide, -1).pow(2).sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.half())
