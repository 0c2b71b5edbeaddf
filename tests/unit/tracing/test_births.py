from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.amp import autocast
from halfstep.tracing import Finding, Observation
from halfstep.tracing.births import Births, is_bad

INF, NAN = math.inf, math.nan
HALF = [torch.float16, torch.bfloat16]


class Holder(nn.Module):
    """Runs a function of its input as its forward pass, inside of a part named `part`."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part = Body(body)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Body(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def births(body: Callable[[Tensor], Tensor], x: Tensor, backward: bool = False, model: nn.Module | None = None) -> list[Finding]:
    """The births that what `body` gives (its gradient with `backward`) descends from."""
    found = Births()
    found.know({"batch": x})
    with Observation(model or Holder(body), [found]) as seen:
        out = seen.model(x)
        ends = [out]
        if backward:
            ends += torch.autograd.grad(out.sum(), [x])
        found.blame(ends)
    return found.findings()


def one(found: list[Finding]) -> Finding:
    assert len(found) == 1, "\n".join(map(str, found))
    return found[0]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_one_bad_value_is_seen(dtype: torch.dtype, value: float) -> None:
    t = torch.zeros(5, 7, dtype=dtype)
    assert not is_bad(t)
    t[3, 2] = value
    assert is_bad(t)
    assert is_bad(t.T)


def test_large_values_are_not_bad_though_their_sum_overflows() -> None:
    assert not is_bad(torch.full((9,), 3e38))
    assert is_bad(torch.tensor([3e38, 3e38, -INF, INF]))
    assert not is_bad(torch.full((9000,), 6e4, dtype=torch.float16))
    assert not is_bad(torch.empty(0))
    assert not is_bad(torch.tensor([3]))


class TestOverflow:
    @pytest.mark.parametrize("route", ["plain", "torch", "halfstep"])
    def test_a_product_names_itself_and_its_operands(self, route: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8), nn.LayerNorm(8))
        with torch.no_grad():
            model[1].weight.fill_(300.0)
        x = torch.full((4, 16), 40.0)
        if route == "plain":
            model, x = model.half(), x.half()
        found = Births()
        block = {
            "plain": torch.autocast("cpu", enabled=False),
            "torch": torch.autocast("cpu", torch.float16),
            "halfstep": autocast("cpu", torch.float16),
        }
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        with Observation(model, [found]), block[route]:
            found.blame([model(x)])
        finding = one(found.findings())
        assert (finding.fault, finding.place.module, finding.place.kind, finding.place.op) == ("overflow", "1", "Linear", "linear")
        assert finding.what.startswith("the product reaches 1.5")
        assert finding.what.endswith("and fp16 ends at 65504")
        assert finding.output is not None
        assert finding.output.inf == 32
        assert len(finding.inputs) == 3
        assert {r.dtype for r in finding.inputs} == {torch.float16}
        assert all(r.finite for r in finding.inputs)
        assert max(r.largest for r in finding.inputs) == pytest.approx(320.0, rel=0.01)

    def test_the_first_of_two_is_named_and_both_where_both_reach_the_end(self) -> None:
        x = torch.full((4,), 60000.0, dtype=torch.float16)
        chain = births(lambda x: (x * 2 - x).exp() + 1, x)
        assert one(chain).place.op == "mul"
        both = births(lambda x: torch.cat([x * 2, x * 3]), x)
        assert [f.at for f in both] == sorted(f.at for f in both)
        assert len(both) == 2

    @pytest.mark.parametrize(
        ("body", "op"),
        [
            (lambda x: x.square(), "pow"),
            (lambda x: (x / 15).exp(), "exp"),
            (lambda x: x.sum(), "sum"),
            (lambda x: x.clone().mul_(3000.0), "mul"),
            (lambda x: (x.float() * 3000).half(), "to"),
            (lambda x: torch.dot(x, x), "dot"),
            (lambda x: F.softplus(x) * 3000, "mul"),
        ],
    )
    def test_other_ops(self, body: Callable[[Tensor], Tensor], op: str) -> None:
        finding = one(births(body, torch.full((2000,), 300.0, dtype=torch.float16)))
        assert (finding.fault, finding.place.op, finding.place.module) == ("overflow", op, "part")
        assert finding.place.source.startswith("test_births.py:")

    def test_in_bf16_the_same_is_none(self) -> None:
        assert births(lambda x: x.square(), torch.full((8,), 300.0, dtype=torch.bfloat16)) == []

    def test_in_the_backward_pass(self) -> None:
        x = torch.full((4,), 1e-4, dtype=torch.float16, requires_grad=True)
        finding = one(births(lambda x: x * 300.0 * 300.0 * 300.0, x, backward=True))
        assert finding.fault == "overflow"
        assert finding.place.direction == "backward"
        assert finding.place.module == "part"


class TestNonfinite:
    @pytest.mark.parametrize("dtype", [*HALF, torch.float32])
    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (lambda x: (x - x).log(), "logarithm of 0"),
            (lambda x: x / (x - x), "division by 0"),
            (lambda x: (x - x) / (x - x), "division by 0"),
            (lambda x: (x - x).rsqrt(), "division by 0"),
            (lambda x: (-x).sqrt(), "look at the inputs"),
        ],
    )
    def test_what_is_not_finite_in_fp32_either(self, dtype: torch.dtype, body: Callable[[Tensor], Tensor], says: str) -> None:
        finding = one(births(body, torch.ones(4, dtype=dtype)))
        assert finding.fault == "nonfinite"
        assert says in f"{finding.what} {finding.remedy}"

    def test_the_root_of_0_in_the_backward_pass(self) -> None:
        finding = one(births(lambda x: (x * 0).sqrt(), torch.ones(4, requires_grad=True), backward=True))
        assert (finding.fault, finding.place.direction, finding.place.op) == ("nonfinite", "backward", "div")
        assert "backward pass of sqrt" in finding.what

    def test_memory_that_nobody_filled(self) -> None:
        torch.utils.deterministic.fill_uninitialized_memory, before = True, torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)  # new memory is then NaN
        try:
            assert births(lambda x: torch.empty(4).copy_(x) + 1, torch.ones(4)) == []
            finding = one(births(lambda x: x + torch.empty(4), torch.ones(4)))
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = before
        assert (finding.fault, finding.place.op) == ("nonfinite", "add")
        assert "never written" in finding.what


class TestLineage:
    @pytest.mark.parametrize(
        "body",
        [
            lambda x: 1 / (1 + (x * 30000).exp()),
            lambda x: (x * 40000).tanh(),
            lambda x: torch.where(x > 0, x, x / 0.0),
            lambda x: (x * 70000.0).clamp(max=3.0),
            lambda x: (x / (x - x)).nan_to_num(0.0, 0.0, 0.0),
            lambda x: torch.empty(4, dtype=x.dtype).copy_(x),
            lambda x: torch.full_like(x, -INF).exp() + x,
            lambda x: x.new_full((4,), -INF).maximum(x),
            lambda x: x.clamp(-INF, INF),
            lambda x: torch.minimum(x, torch.tensor(INF, dtype=x.dtype)),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_an_inf_that_comes_to_nothing_is_no_fault(self, body: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        assert births(body, torch.ones(4, dtype=dtype)) == []

    def test_it_is_reported_when_nothing_says_what_matters(self) -> None:
        found = Births()
        with Observation(nn.Identity(), [found]):
            torch.ones(3, dtype=torch.float16) * 7e4
        assert [f.fault for f in found.findings()] == ["mask"]

    def test_memory_that_is_used_again_is_forgotten(self) -> None:
        def body(x: Tensor) -> Tensor:
            work = (x * 60000) * 60000
            work.copy_(x)
            return (work + 1) / (x - x)

        finding = one(births(body, torch.full((4,), 1.0, dtype=torch.float16)))
        assert (finding.fault, finding.place.op) == ("nonfinite", "div")

    def test_through_views_writes_and_a_number_read_to_python(self) -> None:
        def body(x: Tensor) -> Tensor:
            out = torch.zeros(4, 4, dtype=x.dtype)
            out[1:3].T[:, :1] = (x * 60000 * 60000)[:, None]
            return out.reshape(2, 8).transpose(0, 1).contiguous().sum()

        assert one(births(body, torch.ones(4, dtype=torch.float16))).place.op == "mul"
        finding = one(births(lambda x: x * float((x * 60000 * 60000).amax()), torch.ones(4, dtype=torch.float16)))
        assert finding.fault == "overflow"

    @pytest.mark.parametrize("old", [False, True])
    def test_through_activation_checkpointing(self, old: bool) -> None:
        body = lambda x: checkpoint(lambda v: (v * 300).square() * 1e-3, x, use_reentrant=old)  # noqa: E731
        finding = births(body, torch.ones(4, dtype=torch.float16, requires_grad=True))[0]
        assert (finding.fault, finding.place.op, finding.place.direction) == ("overflow", "pow", "forward")


class TestGiven:
    @pytest.mark.parametrize("dtype", [*HALF, torch.float32])
    @pytest.mark.parametrize("value", [NAN, INF])
    def test_the_data(self, dtype: torch.dtype, value: float) -> None:
        x = torch.arange(8, dtype=dtype)
        x[2] = value
        finding = one(births(lambda x: (x * 2).sum(), x))
        assert (finding.fault, finding.place.op) == ("data", "mul")
        assert finding.what.startswith(f"batch holds 1 {'NaN' if value != value else 'inf'} of 8 values")

    def test_data_that_is_cast_or_moved_first(self) -> None:
        x = torch.tensor([1.0, NAN, 3.0])
        assert one(births(lambda x: x.half().view(3, 1).clone().sum(), x)).fault == "data"

    def test_data_whose_bad_values_are_left_out_is_no_fault(self) -> None:
        x = torch.tensor([1.0, NAN, 3.0])
        assert births(lambda x: torch.where(x.isnan(), 0.0, x).sum(), x) == []
        assert births(lambda x: x.nan_to_num() + x[0], x) == []

    def test_a_tensor_without_a_name(self) -> None:
        other = torch.tensor([1.0, NAN])
        assert one(births(lambda x: x + other, torch.ones(2))).what.startswith("a tensor given to it holds 1 NaN")
        assert one(births(lambda x: x + torch.tensor([1.0, NAN]), torch.ones(2))).fault == "data"

    def test_weights_and_statistics(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[0].weight.data[1, 1] = NAN
        finding = one(births(lambda x: x, torch.ones(3, 4), model=model))
        assert (finding.fault, finding.place.module) == ("weights", "0")
        assert finding.what.startswith("0.weight holds 1 NaN of 16 values")
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        model[1].running_var[2] = INF
        model[1].running_mean[2] = NAN
        assert {f.fault for f in births(lambda x: x, torch.ones(3, 4), model=model)} == {"weights"}

    def test_statistics_that_bad_data_has_spoilt_are_not_to_blame(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        x = torch.ones(3, 4)
        x[1, 1] = NAN
        assert one(births(lambda x: x, x, model=model)).fault == "data"


class TestMasks:
    @staticmethod
    def attention(mask: Callable[[Tensor], Tensor], rows: int) -> Callable[[Tensor], Tensor]:
        return lambda x: mask(x).softmax(-1) @ torch.ones(4, 1, dtype=x.dtype)

    WAYS: tuple[Any, ...] = (
        lambda x, hidden: x.masked_fill(hidden, -INF),
        lambda x, hidden: torch.where(hidden, -INF, x),
        lambda x, hidden: torch.where(hidden, torch.tensor(-INF, dtype=x.dtype), x),
        lambda x, hidden: x + torch.zeros_like(x).masked_fill_(hidden, -INF),
        lambda x, hidden: x + torch.where(hidden, torch.full((), -INF, dtype=x.dtype), 0.0),
        lambda x, hidden: x + (torch.full(hidden.shape, -INF, dtype=x.dtype).triu(1) if not hidden[0].all() else torch.full_like(x, -INF)),
    )

    @pytest.mark.parametrize("dtype", [*HALF, torch.float32])
    @pytest.mark.parametrize("way", WAYS)
    def test_an_inf_that_is_written_on_purpose_is_none(self, way: Any, dtype: torch.dtype) -> None:
        causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
        x = torch.randn(4, 4).to(dtype).requires_grad_()
        assert births(lambda x: way(x, causal).softmax(-1).sum(-1), x, backward=True) == []
        whole = torch.ones(4, 4, dtype=torch.bool)
        finding = births(lambda x: way(x, whole).softmax(-1), x)[0]
        assert (finding.fault, finding.place.op) == ("mask", "softmax")
        assert "a whole row is masked" in finding.what

    @pytest.mark.parametrize("values", [[0.0, -INF], [-INF, -INF, 5.0]])
    def test_a_mask_that_is_given(self, values: list[float]) -> None:
        mask = torch.tensor(values)
        assert births(lambda x: (x + mask).softmax(-1), torch.ones(len(values))) == []

    def test_a_mask_in_a_buffer(self) -> None:
        class Causal(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

            def forward(self, x: Tensor) -> Tensor:
                return (x + self.mask).softmax(-1)

        assert births(lambda x: x, torch.randn(4, 4), model=Causal()) == []

    def test_a_product_with_it_is_nan(self) -> None:
        finding = one(births(lambda x: x * torch.zeros(2).masked_fill(torch.tensor([True, False]), -INF), torch.zeros(2)))
        assert (finding.fault, finding.place.op) == ("mask", "mul")

    @pytest.mark.parametrize(
        "body",
        [
            lambda x: (x * 0 + 1) * -1e9,
            lambda x: (x.float() * 0 - 3.4e38).half(),
            lambda x: x + torch.full((4,), -1e9).half(),
            lambda x: torch.where(x > 5, x, -1e9),
        ],
    )
    def test_a_constant_that_does_not_fit(self, body: Callable[[Tensor], Tensor]) -> None:
        x = torch.zeros(4, dtype=torch.float16)
        finding = one(births(lambda x: body(x).softmax(-1), x))
        assert finding.fault == "mask", str(finding)
        assert "fp16, which ends at 65504" in finding.what
        assert births(lambda x: body(x).exp(), x) == []
