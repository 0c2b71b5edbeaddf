"""Blocks under function transforms, higher derivatives, and less usual tensors and layers (kind J)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor, nn

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F32

RECORDS: list[Record] = []
record = collector(RECORDS, "J")
CLOSE = 0.02  # bf16 has 8 bits, and these are sums of few products


def _error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((found.detach().float() - wanted.detach()).abs().max() / wanted.detach().abs().max())


def _both(library: Library, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """A result inside a block and outside it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)  # torch's own, in forward mode
        with library.autocast(BF16):
            inside = run()
        return inside.detach(), run().detach()


@record(
    "per-sample-gradients",
    "vmap of grad of a layer inside a block (differential privacy, influence functions)",
    today="right",
    right="a gradient for each sample, within bf16 of fp32's and not equal to it",
    check=lambda v: v["shape"] == (3, 2, 4) and 0 < v["error"] < CLOSE,
    stock="right",
)
def per_sample(library: Library) -> Any:
    layer, inputs = nn.Linear(4, 2), torch.randn(3, 4)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).float().pow(2).sum()  # type: ignore[no-any-return]

    inside, outside = _both(library, lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, inputs)["weight"])
    return {"shape": tuple(inside.shape), "error": _error(inside, outside)}


@record(
    "forward-mode-derivative",
    "torch.func.jvp of a layer inside a block",
    today="right",
    right="the tangent within bf16 of fp32's, in 16 bits",
    check=lambda v: 0 < v["error"] < CLOSE,
    stock="right",
)
def forward_derivative(library: Library) -> Any:
    layer, x, v = nn.Linear(8, 4), torch.randn(2, 8), torch.randn(2, 8)
    inside, outside = _both(library, lambda: torch.func.jvp(layer, (x,), (v,))[1])
    return {"error": _error(inside, outside)}


@record(
    "dual-tensors",
    "forward-mode AD with dual tensors through a layer inside a block",
    today="right",
    right="the tangent within bf16 of fp32's",
    check=lambda v: 0 < v["error"] < CLOSE,
    stock="right",
)
def dual_tensors(library: Library) -> Any:
    layer, x, v = nn.Linear(8, 4), torch.randn(2, 8), torch.randn(2, 8)

    def run() -> Tensor:
        with forward_mode.dual_level():
            dual = forward_mode.make_dual(x, v)  # type: ignore[no-untyped-call]
            tangent: Tensor = forward_mode.unpack_dual(layer(dual)).tangent  # type: ignore[no-untyped-call]
            return tangent.clone()

    inside, outside = _both(library, run)
    return {"error": _error(inside, outside)}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij,bj->b", x, self.weight, x)


def _penalty(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    @record(
        f"gradient-of-a-gradient-{name}",
        f"a gradient penalty through {name} inside a block: double backward",
        today="right",
        right="the penalty's gradient within 5 % of fp32's and not equal to it",
        check=lambda v: 0 < v["error"] < 0.05,
        refs=("case 26",),
        stock="right",
    )
    def penalty(library: Library) -> Any:
        net, x = make(), torch.randn(shape, requires_grad=True)
        weight = next(net.parameters())

        def run() -> Tensor:
            (inner,) = torch.autograd.grad(net(x).float().pow(2).sum(), x, create_graph=True)
            (outer,) = torch.autograd.grad(inner.float().pow(2).sum(), weight)
            return outer

        inside, outside = _both(library, run)
        return {"error": _error(inside, outside)}


_penalty("a-linear-net", lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), (3, 4))
_penalty("a-convolution", lambda: nn.Conv2d(1, 2, 3), (1, 1, 6, 6))
_penalty("a-transposed-convolution", lambda: nn.ConvTranspose1d(2, 2, 3), (1, 2, 6))
_penalty("a-bilinear-layer", lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), _Bilinear()), (3, 4))


def _layer(name: str, make: Callable[[], nn.Module], call: Callable[[nn.Module], Tensor]) -> None:
    @record(
        f"layer-{name}",
        f"{name} inside a bf16 block",
        today="right",
        right="computed in bf16: the result within bf16 of fp32's and not equal to it; fp32 gradients",
        check=lambda v: 0 < v["error"] < 0.1 and v["gradients"] == {F32},
        stock="right",
    )
    def layer(library: Library) -> Any:
        net = make()
        with library.autocast(BF16):
            out = call(net)
        out.float().sum().backward()  # type: ignore[no-untyped-call]
        dtypes = {p.grad.dtype for p in net.parameters() if p.grad is not None}
        return {"error": _error(out, call(net)), "gradients": dtypes}


def _ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4) * 0.3], layout=torch.jagged)


def _packed(net: nn.Module) -> Tensor:
    inputs = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([3, 2]), batch_first=True)
    return net(packed)[0].data  # type: ignore[no-any-return]


def _self_attention(net: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
    return net(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(3))[0]  # type: ignore[no-any-return]


_SEQUENCE = torch.linspace(-1, 1, 24).reshape(3, 2, 4)
_layer("of-nested-tensors", lambda: nn.Linear(4, 4), lambda net: net(_ragged()).values())
_layer("packed-lstm", lambda: nn.LSTM(4, 4, batch_first=True), _packed)
_layer("gru", lambda: nn.GRU(4, 4), lambda net: net(_SEQUENCE)[0])
_layer("multi-head-attention", lambda: nn.MultiheadAttention(8, 2, batch_first=True), _self_attention)


@record(
    "encoder-in-evaluation",
    "nn.TransformerEncoderLayer in eval() without gradients, with padding, inside a block (torch has a fast path for it)",
    today="right",
    right="finite, within bf16 of fp32's and not equal to it",
    check=lambda v: v["finite"] and 0 < v["error"] < CLOSE,
    stock="right",
)
def encoder(library: Library) -> Any:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, True]] * 2)
    with torch.no_grad():
        inside, outside = _both(library, lambda: layer(x, src_key_padding_mask=padding))
    return {"finite": bool(inside.isfinite().all()), "error": _error(inside, outside)}


@record(
    "tensor-subclass",
    "a user's tensor subclass in a product inside a block",
    today="right",
    right="the subclass is kept and the product is bf16",
    check=lambda v: v == ["Marked", BF16],
    stock="right",
)
def subclass(library: Library) -> Any:
    class Marked(torch.Tensor):
        pass

    with library.autocast(BF16):
        product = torch.ones(2, 2).as_subclass(Marked) @ torch.ones(2, 2)
    return [type(product).__name__, product.dtype]


@record(
    "products-into-a-given-tensor",
    "torch.matmul(a, b, out=fp32 tensor) inside a block",
    today="right: left as it is",
    right="written into the fp32 tensor; a product without out= is bf16",
    check=lambda v: v == [F32, 2.0, BF16],
    stock="right",
)
def given_tensor(library: Library) -> Any:
    a, out = torch.ones(2, 2), torch.empty(2, 2)
    with library.autocast(BF16):
        torch.matmul(a, a, out=out)
        return [out.dtype, float(out[0, 0]), (a @ a).dtype]
