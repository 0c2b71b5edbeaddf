"""Constants that do not fit the format they meet, each beside one that does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.amp import bind
from halfstep.policy import parse
from halfstep.tracing import Finding, Observation
from halfstep.tracing.constants import Constants, rounded

CPU = torch.device("cpu")
X = torch.tensor([0.0, 1.0, 300.0])
M = torch.tensor([True, False, False])


def found(call: Callable[[], object], model: nn.Module | None = None) -> list[Finding]:
    detector = Constants()
    with torch.no_grad(), Observation(model if model is not None else nn.Identity(), [detector]):
        call()
    return detector.findings()


def faults(call: Callable[[], object]) -> list[str]:
    return [f.fault for f in found(call)]


VANISHING: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "add": (lambda x: x / (x + 1e-8), "eps"),
    "radd": (lambda x: 1e-8 + x, "eps"),
    "sub": (lambda x: x - 1e-8, "eps"),
    "add_": (lambda x: x.clone().add_(1e-8), "eps"),
    "0-dim": (lambda x: x + torch.tensor(1e-8), "eps"),
    "div": (lambda x: x / 1e-8, "eps"),
    "rdiv": (lambda x: 1e-8 / (x + 2), "eps"),
    "cast": (lambda x: x + torch.tensor(1e-8).to(x.dtype), "eps"),
    "full": (lambda x: torch.full_like(x, 1e-9), "eps"),
    "foreach": (lambda x: torch._foreach_add([x.clone()], 1e-8), "eps"),
    "clamp": (lambda x: x.clamp(min=1e-12), "clamp"),
    "clamp_min": (lambda x: x.clamp_min(1e-12), "clamp"),
    "maximum": (lambda x: torch.maximum(x, torch.tensor(1e-12)), "clamp"),
    "normalize": (lambda x: F.normalize(x, dim=0), "clamp"),
    "cosine": (lambda x: F.cosine_similarity(x, x, dim=0), "clamp"),
    "logit": (lambda x: torch.logit(x.sigmoid(), 1e-8), "clamp"),
}


@pytest.mark.parametrize("name", VANISHING)
def test_a_constant_that_becomes_0_in_fp16_is_reported_and_is_none_in_bf16_or_fp32(name: str) -> None:
    function, fault = VANISHING[name]
    assert faults(lambda: function(X.half())) == [fault]
    assert faults(lambda: function(X)) == []
    if name != "logit":  # 1 - 1e-8 is 1 in bf16 too
        assert faults(lambda: function(X.bfloat16())) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / (x + 1e-4),
        lambda x: x.clamp(min=1e-5),
        lambda x: (x + 1).clamp(0.01, 0.99),
        lambda x: x.masked_fill(M, -1e4),
        lambda x: x.masked_fill(M, float("-inf")),
        lambda x: x.masked_fill(M, torch.finfo(x.dtype).min),
        lambda x: torch.where(M, x, float("-inf")),
        lambda x: x.sum() * 1e-9 + x,  # a result is no constant
        lambda x: F.layer_norm(x, (3,), eps=1e-12),  # fp32 inside
        lambda x: F.rms_norm(x, (3,), eps=1e-12),
        lambda x: x * 0.5 + 1 - 1.5,
        lambda x: x * 1e-8 if x.dtype == torch.float32 else x * 1e-3,
        lambda x: x + 0,
    ],
)
def test_constants_that_fit_are_no_finding(function: Callable[[Tensor], object]) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert faults(lambda dtype=dtype: function(X.to(dtype))) == []


def test_the_finding_names_the_module_the_constant_and_its_fate() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.norm() + 1e-8)

    model = nn.Sequential(nn.Identity(), Block(), Block())
    (finding,) = found(lambda: model(X.half()), model)
    assert (finding.place.module, finding.place.kind, finding.place.op) == ("1", "Block", "add")
    assert "1e-08 becomes 0 in fp16" in finding.what
    assert "1 other module" in finding.what
    assert str(finding).startswith("eps in 1 (Block), forward, test_constants.py:")


MASKS: dict[str, Callable[[Tensor], object]] = {
    "masked_fill": lambda x: x.masked_fill(M, -1e9),
    "masked_fill_": lambda x: x.clone().masked_fill_(M, -1e9),
    "masked_fill tensor": lambda x: x.masked_fill(M, torch.tensor(-1e9)),
    "where": lambda x: torch.where(M, x, -1e9),
    "where tensor": lambda x: torch.where(M, x, torch.tensor(-1e9)),
    "add": lambda x: x + -1e9,
    "times": lambda x: x + (1 - M.to(x.dtype)) * -1e9,
    "cast": lambda x: x + torch.tensor([0.0, -1e9, 0.0]).to(x.dtype),
    "full": lambda x: torch.full((2,), -1e9, dtype=x.dtype),
    "pad": lambda x: F.pad(x, (1, 1), value=-1e9),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), -1e9),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_beyond_the_limit_is_reported_also_where_torch_refuses_it(name: str) -> None:
    def run(x: Tensor) -> None:
        with suppress(RuntimeError):  # torch refuses some of them
            MASKS[name](x)

    findings = found(lambda: run(X.half()))
    assert {f.fault for f in findings} == {"mask"}
    assert "-1e+09" in findings[0].what
    assert faults(lambda: run(X.bfloat16())) == []
    assert faults(lambda: run(X)) == []


def test_a_mask_at_the_lowest_number_is_reported_once_a_score_has_pushed_it_over_and_made_a_nan() -> None:
    scores, lowest = torch.tensor([[-20.0, -30.0]]).half(), torch.finfo(torch.float16).min
    (finding,) = found(lambda: (scores + torch.full_like(scores, lowest)).softmax(-1))
    assert finding.fault == "mask"
    assert finding.place.op == "add"
    assert "NaN" in finding.what
    assert faults(lambda: scores.clone().add_(torch.full_like(scores, lowest)).softmax(-1)) == ["mask"]
    some = torch.tensor([[0.0, lowest]]).half()
    assert faults(lambda: (scores + some).softmax(-1)) == []  # -inf in a row with something in it
    assert faults(lambda: (scores.float() + torch.full((1, 2), lowest)).softmax(-1)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_lowest_number_of_fp32_is_reported_where_a_whole_row_of_it_became_nan(dtype: torch.dtype) -> None:
    lowest = torch.finfo(torch.float32).min
    part, whole = torch.tensor([[0.0, lowest]]), torch.tensor([[lowest, lowest]])
    (finding,) = found(lambda: (torch.ones(1, 2, dtype=dtype) + whole.to(dtype)).softmax(-1))
    assert (finding.fault, finding.place.op, "-3.4e+38" in finding.what) == ("mask", "to", True)
    assert faults(lambda: (torch.ones(1, 2, dtype=dtype) + part.to(dtype)).softmax(-1)) == []
    assert faults(lambda: (torch.ones(1, 2, dtype=dtype) + whole).softmax(-1)) == []  # in fp32


def test_an_overflowing_product_cast_to_fp16_is_no_mask() -> None:
    layer = nn.Linear(64, 4, bias=False)
    nn.init.constant_(layer.weight, -100.0)
    bind(layer, parse("fp16-mixed"), CPU)
    assert found(lambda: layer(torch.full((2, 64), 100.0)), layer) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bound_next_to_1_that_becomes_1_is_reported(dtype: torch.dtype) -> None:
    (finding,) = found(lambda: X.to(dtype).sigmoid().clamp(1e-3, 1 - 1e-7))
    assert finding.fault == "clamp"
    assert "0.9999999 becomes 1" in finding.what
    assert faults(lambda: X.to(dtype).clamp(-1, 1)) == []


def test_a_bound_beyond_the_format_is_reported() -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match="without overflow"):
            X.half().clamp(max=1e9)

    assert faults(run) == ["clamp"]


def test_an_eps_buffer_that_became_0_is_reported_before_the_run() -> None:
    class Norm(nn.Module):
        def __init__(self, eps: float) -> None:
            super().__init__()
            self.register_buffer("eps", torch.tensor(eps))

    assert [f.fault for f in found(lambda: None, Norm(1e-12).half())] == ["eps"]
    assert found(lambda: None, Norm(1e-3).half()) == []
    assert found(lambda: None, Norm(1e-12)) == []


def test_adam_on_fp16_weights_is_reported_for_its_eps() -> None:
    p = nn.Parameter(torch.ones(3).half())
    p.grad = torch.full((3,), 1e-4).half()
    optimizer = torch.optim.Adam([p], foreach=False)
    assert "eps" in faults(lambda: optimizer.step())


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed"])
def test_under_a_policy_that_runs_norms_in_fp32_their_eps_is_no_fault(policy: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return F.cosine_similarity(F.normalize(self.layer(x), dim=-1), x, dim=-1)

    model = Head()
    bind(model, parse(policy), CPU)
    assert found(lambda: model(torch.ones(2, 16)), model) == []


def test_rounded() -> None:
    assert rounded(1e-8, torch.float16) == 0
    assert rounded(1e5, torch.float16) == float("inf")
    assert rounded(0.1, torch.bfloat16) == pytest.approx(0.1, rel=2**-8)
