"""What runs in which dtype inside a block (kind J)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F16, F32, near, read

RECORDS: list[Record] = []
record = collector(RECORDS, "J")

# CUDA autocast documents these as fp32: the check is made on values too large or too fine for fp16
WIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "pow": lambda x: x.pow(2),
    "power-operator": lambda x: x**2,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.prod(-1),
    "norm": lambda x: x.norm(),
    "linalg-norm": torch.linalg.vector_norm,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "softplus": F.softplus,
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
}
RIGHT_TODAY = {"prod", "mse_loss", "l1_loss", "cross_entropy", "cdist"}


def _wide(name: str, op: Callable[[Tensor], Tensor]) -> None:
    @record(
        f"fp32-op-{name}",
        f"{name} of an fp16 result on the CPU",
        today="stays fp16 on the CPU, while CUDA documents fp32" if name not in RIGHT_TODAY else "right: on the CPU's list too",
        right="fp32, with the value of the fp32 op",
        check=lambda v: v["dtype"] is F32 and v["half"] is F16 and v["equal"],
        refs=("case 68",),
        stock="right" if name in RIGHT_TODAY else "wrong",
    )
    def wide(library: Library) -> Any:
        layer = nn.Linear(8, 8)
        nn.init.constant_(layer.bias, 3.0)
        with torch.no_grad(), library.autocast(F16):
            x = layer(torch.full((2, 8), 0.3) + torch.eye(2, 8))
            result = op(x)
        wanted = op(x.float())
        return {"half": x.dtype, "dtype": result.dtype, "equal": torch.allclose(result.float(), wanted, rtol=1e-6, atol=0)}


for _name, _op in WIDE.items():
    _wide(_name, _op)

NARROW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "at-operator": lambda a, b: a @ b,
    "linear": F.linear,
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "conv1d": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
}


def _narrow(name: str, op: Callable[[Tensor, Tensor], Tensor]) -> None:
    @record(
        f"16-bit-op-{name}",
        f"{name} of fp32 tensors in a bf16 block on the CPU",
        today="right",
        right="bf16, the product of the rounded operands to one bf16 rounding",
        check=lambda v: v["dtype"] is BF16 and v["error"] < 0.02,
        refs=("case 68",),
        stock="right",
    )
    def narrow(library: Library) -> Any:
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        with library.autocast(BF16):
            result = op(a, b)
        wanted = op(a.to(BF16).float(), b.to(BF16).float())
        return {"dtype": result.dtype, "error": float((result.float() - wanted).abs().max() / wanted.abs().max())}


for _name, _both in NARROW.items():
    _narrow(_name, _both)


@record(
    "sum-of-a-mask",
    "a Dice loss over 512 x 512 probabilities in an fp16 block",
    today="the sums are inf in fp16, the loss NaN",
    right="0 for a perfect prediction",
    check=lambda v: near(v, 0.0),
    refs=("case 07", "case 68"),
)
def sum_of_mask(library: Library) -> Any:
    mask = torch.ones(512 * 512, dtype=F16)
    with library.autocast(F16):
        return float(1 - 2 * (mask * mask).sum() / (mask.sum() + mask.sum()))


@record(
    "square-in-a-norm",
    "an RMS norm by hand, x.pow(2).mean(), of values around 320 in an fp16 block",
    today="the square is inf, its inverse 0: the norm gives zeros, without NaN or a warning",
    right="ones",
    check=lambda v: near(v, 1.0, 1e-3),
    refs=("case 08", "case 68"),
)
def square_in_norm(library: Library) -> Any:
    layer = nn.Linear(8, 8, bias=False)
    nn.init.constant_(layer.weight, 5.0)
    with torch.no_grad(), library.autocast(F16):
        x = layer(torch.full((1, 8), 8.0))
        return float((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))[0, 0])


@record(
    "exp-of-a-log-variance",
    "the KL term of a VAE with a log variance of 12 in an fp16 block",
    today="exp(12) is inf in fp16",
    right="exp(12) = 162755 to 1 %",
    check=lambda v: near(v, math.exp(12.0), 0.01),
    refs=("case 13", "case 68"),
)
def exp_of_log_variance(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 12.0)
    with torch.no_grad(), library.autocast(F16):
        return float(layer(torch.zeros(1, 4)).exp())


@record(
    "bce-on-probabilities",
    "F.binary_cross_entropy(sigmoid(logit of 10), 0) in an fp16 block",
    today="the probability rounds to 1: a loss of 100 and a NaN gradient (CUDA refuses the call)",
    right="a loss of 10 and a gradient of 1, or a refusal that names the form on logits",
    check=lambda v: near(v, [10.0, 1.0], 0.01),
    refused=("binary_cross_entropy_with_logits",),
    refs=("case 69",),
)
def bce_on_probabilities(library: Library) -> Any:
    return _bce(library, lambda p, t: F.binary_cross_entropy(p, t))


@record(
    "bce-module-on-probabilities",
    "nn.BCELoss instead of the function",
    today="a loss of 100 and a NaN gradient",
    right="a loss of 10 and a gradient of 1, or a refusal that names the form on logits",
    check=lambda v: near(v, [10.0, 1.0], 0.01),
    refused=("binary_cross_entropy_with_logits",),
    refs=("case 69",),
)
def bce_module(library: Library) -> Any:
    return _bce(library, nn.BCELoss())


def _bce(library: Library, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    layer = nn.Linear(4, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 10.0)
    with library.autocast(F16):
        loss = loss_of(torch.sigmoid(layer(torch.ones(1, 4))), torch.zeros(1, 1))
    loss.backward()  # type: ignore[no-untyped-call]
    assert layer.bias.grad is not None
    return [float(loss.detach()), float(layer.bias.grad)]


@record(
    "bce-on-logits",
    "F.binary_cross_entropy_with_logits in an fp16 block",
    today="right",
    right="a loss of 10 to fp16's rounding of the logit, in a layer that ran in fp16",
    check=lambda v: near(v[0], 10.0, 0.01) and v[1] is F16,
    refs=("case 69",),
    stock="right",
)
def bce_on_logits(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 10.0)
    with torch.no_grad(), library.autocast(F16):
        logit = layer(torch.ones(1, 4))
        return float(F.binary_cross_entropy_with_logits(logit, torch.zeros(1, 1))), logit.dtype


@record(
    "squared-error-of-large-targets",
    "F.mse_loss against a target of 300 in an fp16 block",
    today="right: on the CPU's list of fp32 losses",
    right="90000",
    check=lambda v: near(v[0], 90000.0, 0.01) and v[1] is F16,
    refs=("case 14",),
    stock="right",
)
def squared_error(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    with torch.no_grad(), library.autocast(F16):
        out = layer(torch.zeros(1, 4))
        return float(F.mse_loss(out, torch.full((1, 1), 300.0))), out.dtype


@record(
    "huber-loss-of-large-targets",
    "F.huber_loss against a target of 70000, delta 1e5, in an fp16 block",
    today="the fp32 target decides: right in value",
    right="0.5 x 70000^2",
    check=lambda v: near(v[0], 0.5 * 70000.0**2, 1e-3) and v[1] is F16,
    refs=("case 14",),
    stock="right",
)
def huber(library: Library) -> Any:
    layer = nn.Linear(4, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    with torch.no_grad(), library.autocast(F16):
        out = layer(torch.zeros(1, 4))
        return float(F.huber_loss(out, torch.full((1, 1), 70000.0), delta=1e5)), out.dtype


@record(
    "batched-losses-of-16-bit-outputs",
    "kl_div, smooth_l1_loss and gaussian_nll_loss of two fp16 outputs in one block",
    today="kl_div and smooth_l1_loss are fp32 on the CPU's list; gaussian_nll_loss stays fp16",
    right="fp32 in all",
    check=lambda v: set(v) == {F32},
    refs=("case 68",),
)
def losses_of_outputs(library: Library) -> Any:
    layer = nn.Linear(4, 4)
    with torch.no_grad(), library.autocast(F16):
        a, b = layer(torch.ones(1, 4)), layer(torch.zeros(1, 4))
        losses = (F.kl_div(a, b.abs(), reduction="sum"), F.smooth_l1_loss(a, b), F.gaussian_nll_loss(a, b, a.abs() + 1))
    return [loss.dtype for loss in losses]


@record(
    "gradients-are-fp32",
    "gradients of fp32 weights through a bf16 block",
    today="right",
    right="fp32, with the output in bf16",
    check=lambda v: v == [F32, F32, BF16],
    stock="right",
)
def gradients_are_fp32(library: Library) -> Any:
    layer = nn.Linear(4, 4)
    with library.autocast(BF16):
        out = layer(torch.ones(1, 4))
    out.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return [layer.weight.grad.dtype, layer.bias.grad.dtype, out.dtype]


@record(
    "asked-for-a-device-that-is-not-there",
    "autocast('cuda') on a machine without one",
    today="a warning, then fp32",
    right="refused, or fp16 on the device there is",
    check=lambda v: v is F16 or torch.cuda.is_available(),
    refused=("cuda",),
    refs=("case 34",),
)
def device_not_there(library: Library) -> Any:
    with library.autocast(F16, device="cuda"):
        return nn.Linear(4, 4)(torch.ones(1, 4)).dtype


@record(
    "scaler-without-a-device",
    "GradScaler() as in most scripts, on a machine without CUDA",
    today="a warning, then a scaler that is off",
    right="on: the loss is multiplied, and the step takes 0.5 off",
    check=lambda v: (v["on"] and v["factor"] > 1 and near(v["weight"], 0.5)) or torch.cuda.is_available(),
    refs=("case 34",),
)
def scaler_without_device(library: Library) -> Any:
    scaler, w = library.scaler(device=None), nn.Parameter(torch.ones(4))
    optimizer, loss = torch.optim.SGD([w], lr=0.5), w.sum()
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optimizer)
    return {"on": scaler.is_enabled(), "factor": read(scaled)[0] / read(loss)[0], "weight": read(w)[0]}


@record(
    "scaler-for-another-device",
    "GradScaler('cuda') and a loss on the CPU",
    today="a warning, then a scaler that is off: the same run without loss scaling",
    right="refused with both devices named",
    check=lambda v: torch.cuda.is_available(),
    refused=("cuda", "cpu"),
    refs=("case 34",),
)
def scaler_for_another_device(library: Library) -> Any:
    scaler, w = library.scaler(device="cuda"), nn.Parameter(torch.ones(4))
    scaler.scale(w.sum()).backward()


def _no_effect(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")

    @record(
        f"autocast-to-{name}",
        f"autocast(dtype={name})",
        today="a warning, then a block without effect",
        right="refused with the dtypes that work",
        check=lambda v: False,
        refused=("bfloat16", "float16"),
        refs=("case 34",),
    )
    def no_effect(library: Library) -> Any:
        with library.autocast(dtype):
            return nn.Linear(4, 4)(torch.ones(1, 4)).dtype


for _dtype in (torch.float32, torch.float64, torch.int8):
    _no_effect(_dtype)


@record(
    "integers-and-fp64-pass-through",
    "fp64 and integer operands inside a block",
    today="right",
    right="fp64 products stay fp64, ids stay int64, fp32 products are bf16",
    check=lambda v: v == [torch.float64, torch.int64, BF16],
    stock="right",
)
def pass_through(library: Library) -> Any:
    wide, ids, narrow = torch.ones(2, 2, dtype=torch.float64), torch.tensor([50257, 3]), torch.ones(2, 2)
    with library.autocast(BF16):
        return [(wide @ wide).dtype, (ids + 1).dtype, (narrow @ narrow).dtype]
