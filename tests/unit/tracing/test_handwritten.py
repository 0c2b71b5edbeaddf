"""Softmax and norms written by hand in 16 bits, each beside what does it right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.amp import autocast
from halfstep.tracing import Finding, Observation
from halfstep.tracing.handwritten import Handwritten

X = torch.linspace(-2, 2, 32).reshape(2, 16)
HALF = (torch.float16, torch.bfloat16)


def found(call: Callable[[], object], model: nn.Module | None = None) -> list[Finding]:
    detector = Handwritten()
    with Observation(model if model is not None else nn.Identity(), [detector]):
        call()
    return detector.findings()


def shifted(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def in_place(x: Tensor) -> Tensor:
    e = x.clone().exp_()
    return e.div_(e.sum(-1, keepdim=True))


SOFTMAX: dict[str, Callable[[Tensor], object]] = {
    "plain": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "shifted": shifted,
    "in place": in_place,
    "masked": lambda x: (x.exp() * (x > 0)) / ((x.exp() * (x > 0)).sum(-1, keepdim=True) + 1e-3),
    "reciprocal": lambda x: x.exp() * (1 / x.exp().sum(-1, keepdim=True)),
    "base 2": lambda x: torch.exp2(x) / torch.exp2(x).sum(-1)[:, None],
    "log-sum-exp": lambda x: x - x.exp().sum(-1, keepdim=True).log(),
}
NORMS: dict[str, Callable[[Tensor], object]] = {
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
    "product": lambda x: x / ((x * x).sum(-1, keepdim=True) / 16).sqrt(),
    "square": lambda x: x / torch.square(x).mean(-1, keepdim=True).add_(1e-3).sqrt(),
    "layer norm": lambda x: (x - x.mean(-1, keepdim=True)) / ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True) ** 0.5,
    "variance": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-3).sqrt(),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_by_hand_is_reported_in_16_bits_and_not_in_fp32(name: str, dtype: torch.dtype) -> None:
    assert [f.fault for f in found(lambda: SOFTMAX[name](X.to(dtype)))] == ["softmax"]
    assert found(lambda: SOFTMAX[name](X)) == []


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_by_hand_is_reported_in_16_bits_and_not_in_fp32(name: str, dtype: torch.dtype) -> None:
    assert [f.fault for f in found(lambda: NORMS[name](X.to(dtype)))] == ["norm"]
    assert found(lambda: NORMS[name](X)) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(-1),
        lambda x: x.logsumexp(-1),
        lambda x: F.layer_norm(x, (16,)),
        lambda x: F.rms_norm(x, (16,)),
        lambda x: x / x.norm(dim=-1, keepdim=True),
        lambda x: shifted(x.float()).to(x.dtype),
        lambda x: NORMS["rms"](x.float()),
        lambda x: x.pow(2).mean(),  # a squared error
        lambda x: 1 / (1 + (-x).exp()),  # a sigmoid
        lambda x: (1 + x.exp()).log(),
        lambda x: x.pow(3).mean(-1).abs().sqrt(),
        lambda x: x.exp().sum(-1),
        lambda x: (x * x.flip(-1)).sum(-1).abs().sqrt(),
        lambda x: x.std(-1),
    ],
)
def test_what_torch_computes_in_fp32_or_what_is_no_softmax_is_not(function: Callable[[Tensor], object]) -> None:
    for dtype in HALF:
        assert found(lambda dtype=dtype: function(X.to(dtype))) == []


def test_squares_in_fp16_are_reported_although_their_root_is_taken_in_fp32() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.tensor([[400.0, -400.0, 400.0, -400.0]])
    nn.init.eye_(layer.weight)

    def run(dtype: torch.dtype, norm: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with autocast("cpu", dtype):
                return norm(layer(x))

        return call

    (finding,) = found(run(torch.float16, lambda h: h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5)))
    assert finding.fault == "norm"
    assert "from 256 on, and the largest value here is 400" in finding.what
    assert found(run(torch.float16, lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5))) == []  # pow runs in fp32
    assert found(run(torch.bfloat16, lambda h: h / (h * h).sum(-1, keepdim=True).sqrt())) == []  # rounded once, summed in fp32
    assert found(run(torch.float16, shifted)) == []


def test_the_finding_names_the_module_and_a_loop_over_layers_gives_one() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return shifted(x)

    model = nn.Sequential(Attention(), Attention(), Attention())
    (finding,) = found(lambda: model(X.half()), model)
    assert (finding.place.module, finding.place.kind, finding.place.op) == ("0", "Attention", "div")
    assert "largest x here is 0" in finding.what
    assert "2 other modules" in finding.what
    assert "torch.softmax" in finding.remedy


def test_memory_that_is_written_anew_carries_no_note() -> None:
    def call() -> Tensor:
        e = X.half().exp()
        e.zero_().add_(1)
        return e / e.sum(-1, keepdim=True)

    assert found(call) == []


def test_ops_of_a_backward_pass_are_not_looked_at() -> None:
    x = X.half().requires_grad_()
    assert found(lambda: x.softmax(-1).pow(2).sum().backward()) == []
