from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.tracing import Finding, Observation, Place
from halfstep.tracing.mismatch import Mismatch, of_error


def raised(model: nn.Module, *inputs: Tensor) -> Finding | None:
    """What is said of the error that a forward (and backward) pass raises."""
    found = Mismatch()
    seen = Observation(model, [found])
    with pytest.raises(Exception, match=r"\w") as caught, seen:
        model(*inputs).sum().backward()
    return found.finding(caught.value) or of_error(caught.value, seen.error_place(caught.value), model)


class Part(nn.Module):
    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *x: Tensor) -> Any:
        return self.body(self, *x)


X = torch.ones(2, 8)
H = X.half()


@pytest.mark.parametrize(
    ("layer", "x", "weight"),
    [
        (nn.Linear(8, 8), H, "fp32 0.weight"),
        (nn.Linear(8, 8).half(), X, "fp16 0.weight"),
        (nn.Linear(8, 8, bias=False).bfloat16(), X, "bf16 0.weight"),
        (nn.Linear(8, 8).bfloat16(), H, "bf16 0.weight"),
        (nn.Conv1d(8, 8, 1), H[None].mT, "fp32 0.weight"),
        (nn.LayerNorm(8).half(), X, "fp16 0.weight"),
        (nn.BatchNorm1d(8).half(), X, "fp16 0.weight"),
        (nn.GroupNorm(2, 8).bfloat16(), X, "bf16 0.weight"),
        (nn.PReLU(), H, "fp32 0.weight"),
        (nn.LSTM(8, 8), H, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_layer_and_its_input(layer: nn.Module, x: Tensor, weight: str) -> None:
    finding = raised(nn.Sequential(layer), x)
    assert finding is not None
    assert (finding.fault, finding.place.module, finding.place.kind) == ("mismatch", "0", type(layer).__name__)
    assert weight in finding.what
    assert "torch raised" in finding.what
    assert finding.place.source.startswith("test_mismatch.py:")


@pytest.mark.parametrize(
    "body",
    [
        lambda _, x, h: x @ h.T,
        lambda _, x, h: torch.bmm(x[None], h.T[None]),
        lambda _, x, h: F.scaled_dot_product_attention(x[None], h[None], h[None]),
        lambda _, x, h: x.lerp(h, 0.5),
        lambda _, x, h: x[0].dot(h[0]),
        lambda _, x, h: x.clone().index_add_(0, torch.tensor([0]), h[:1]),
        lambda _, x, h: x.clone().index_put_((torch.tensor([0]),), h[:1]),
        lambda _, x, h: x.clone().scatter_(1, torch.zeros(2, 1).long(), h[:, :1]),
        lambda _, x, h: x.clone().masked_scatter_(x > 0, h),
        lambda _, x, h: torch.einsum("ij,kj->ik", x, h),
        lambda _, x, h: F.binary_cross_entropy(h.sigmoid(), x.sigmoid()),
        lambda _, x, h: torch.baddbmm(x[None, :, :2], h[None], h[None].mT),
        lambda _, x, h: torch.linalg.svd(h)[1],
    ],
)
def test_an_op_in_a_forward_pass(body: Callable[..., Any]) -> None:
    model = nn.Sequential(Part(body))
    model.forward = lambda x, h: model[0](x, h)  # type: ignore[method-assign]
    finding = raised(model, X, H)
    assert finding is not None
    assert (finding.fault, finding.place.module) == ("mismatch", "0")
    assert "fp16" in finding.what or "Half" in finding.what


def test_a_custom_backward_pass() -> None:
    class Up(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return (x @ w).float()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad @ ctx.saved_tensors[0].T, None

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Up.apply(x, self.weight.T)

    finding = raised(nn.Sequential(nn.Linear(8, 8).half(), Head(8, 8).half()), H)
    assert finding is not None
    assert (finding.fault, finding.place.module, finding.place.direction) == ("mismatch", "1", "backward")
    assert "custom backward" in finding.remedy


@pytest.mark.parametrize("dtype", [torch.float16])
@pytest.mark.parametrize(
    "body", [lambda _, h: h.masked_fill(h > 0, -1e9), lambda _, h: torch.full((2,), -1e9, dtype=h.dtype), lambda _, h: h.clamp(-1e9, 1e9)]
)
def test_a_constant_that_torch_refuses_is_a_mask(body: Callable[..., Any], dtype: torch.dtype) -> None:
    finding = raised(nn.Sequential(Part(body)), X.to(dtype))
    assert finding is not None
    assert (finding.fault, finding.place.module) == ("mask", "0")
    assert "1e+09 does not fit fp16, which ends at 65504" in finding.what


@pytest.mark.parametrize("error", [ValueError("no such file"), KeyError("dtype"), RuntimeError("size mismatch (4) vs (8)")])
def test_other_errors_are_not_about_dtypes(error: Exception) -> None:
    assert of_error(error, Place()) is None
    model = nn.Sequential(nn.Linear(4, 4))
    assert raised(model, torch.ones(2, 3)) is None
    assert raised(model.half(), torch.ones(2, 3).half()) is None


def test_an_error_that_the_code_has_caught_is_not_taken_for_the_one_that_ended_it() -> None:
    def body(_: nn.Module, x: Tensor) -> Tensor:
        try:
            x @ x.half().T
        except RuntimeError:
            x = x + 1
        raise ValueError("another")

    assert raised(nn.Sequential(Part(body)), X) is None
