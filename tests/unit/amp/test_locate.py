"""The first module whose outputs 16 bits do not hold is named, and looking for it leaves no trace."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp.locate import Blamed, Locating
from halfstep.policy import parse

CPU = torch.device("cpu")
X = torch.full((3, 8), 8.0)


def linear(value: float, width: int = 8) -> nn.Linear:
    """A linear layer whose weights are all `value`."""
    layer = nn.Linear(8, width)
    with torch.no_grad():
        layer.weight.fill_(value)
        layer.bias.zero_()
    return layer


class Around(nn.Module):
    """A part between two layers: it gets 64 from X."""

    def __init__(self, part: nn.Module, post: Any = lambda y: y) -> None:
        super().__init__()
        self.a, self.part, self.b, self.post = linear(1.0), part, linear(1e-5, 4), post

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        return self.b(self.post(self.part(self.a(x), *more, **named)).clamp(max=6e4))


class Given(nn.Module):
    """A part made of a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.w = function, linear(300.0)

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        return self.function(self, x, *more, **named)


def located(model: nn.Module, *args: Any, precision: str = "fp16-mixed", **kwargs: Any) -> tuple[list[Blamed], Any]:
    amp.bind(model, parse(precision), CPU)
    with Locating(model) as seen:
        outputs = model(*args, **kwargs)
    assert not any(part._forward_hooks for part in model.modules())
    return seen.found, outputs


def said(found: list[Blamed]) -> list[tuple[str, str, bool]]:
    return [(one.module, one.cause, one.heals) for one in found]


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-lean", "fp16-true"])
def test_the_innermost_module_is_named_with_its_range(precision: str) -> None:
    found, outputs = located(Around(Given(lambda s, x: s.w(x) * 1.0)), X, precision=precision)
    assert said(found)[0] == ("part.w", "overflow", True)
    first = found[0]
    assert (first.kind, first.dtype, first.given) == ("Linear", torch.float16, 64.0)
    assert first.reach == pytest.approx(8 * 64 * 300, rel=1e-3)
    assert math.isinf(first.value)
    assert torch.isfinite(outputs).all()
    assert str(first).startswith("part.w (Linear) gives inf or NaN in fp16 from inputs up to 64; in fp32 its outputs reach 1.53")
    assert str(first).endswith("and fp16 ends at 65504")


def test_a_module_in_range_is_not_named() -> None:
    assert located(Around(linear(100.0)), X)[0] == []


@dataclass
class Record:
    y: Tensor
    x: Tensor


@pytest.mark.parametrize(
    "shape",
    [
        lambda y, x: (y, x),
        lambda y, x: [y, None],
        lambda y, x: {"y": y, "other": None, "n": torch.arange(2)},
        lambda y, x: OrderedDict(x=x, y=(y,)),
        lambda y, x: Record(y, x),
    ],
    ids=["tuple", "list", "dict", "nested", "dataclass"],
)
def test_whatever_the_outputs_come_in(shape) -> None:
    def post(value: Any) -> Tensor:
        value = value.y if isinstance(value, Record) else value["y"] if isinstance(value, dict) else value[0]
        return value[0] if isinstance(value, tuple) else value

    assert said(located(Around(Given(lambda s, x: shape(s.w(x).square(), x)), post), X)[0])[0] == ("part.w", "overflow", True)
    functional = Around(Given(lambda s, x: shape(torch.mul(x, x * 100), x)), post)
    assert said(located(functional, X)[0])[0] == ("part", "overflow", True)


def test_code_of_the_model_itself_is_its_own_fault() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(1.0), linear(1e-5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y * y * y)

    found, _ = located(Root(), X)
    assert said(found) == [("", "overflow", True)]
    assert "the forward method of Root" in str(found[0])
    assert "in fp16 from inputs" in str(found[0])


@pytest.mark.parametrize("inplace", [False, True])
def test_a_function_that_writes_in_place_behind_it_changes_nothing(inplace: bool) -> None:
    model = Around(nn.Sequential(linear(300.0), nn.ReLU(inplace)), lambda y: F.relu(y, inplace=inplace))
    found, outputs = located(model, X)
    assert said(found)[0] == ("part.0", "overflow", True)
    assert torch.isfinite(outputs).all()


MASK = torch.eye(8)[:3].bool()


def test_masks_are_no_fault() -> None:
    masked = Given(lambda s, x, mask: x.masked_fill(mask, -math.inf))
    assert located(Around(masked, lambda y: y.softmax(-1)), X, MASK)[0] == []
    inside = Given(lambda s, x, mask: x.masked_fill(mask, -math.inf).softmax(-1))
    assert located(Around(inside), X, MASK)[0] == []


def test_behind_a_mask_an_overflow_is_still_found() -> None:
    model = Around(Given(lambda s, x, mask: s.w(x.masked_fill(mask, -math.inf).softmax(-1) * 500)), lambda y: y)
    model.a = linear(0.0)
    assert said(located(model, X, MASK)[0])[0] == ("part.w", "overflow", True)


def test_a_mask_constant_beyond_fp16_is_found() -> None:
    model = Around(Given(lambda s, x, mask: x + mask.half() * -1e9), lambda y: y.softmax(-1))
    found, _ = located(model, X, MASK)
    assert said(found) == [("part", "overflow", True)]


def test_a_row_that_is_masked_whole_is_nan_in_fp32_too() -> None:
    model = Around(Given(lambda s, x: x.masked_fill(torch.ones(3, 8).bool(), -math.inf).softmax(-1)))
    found, _ = located(model, X)
    assert said(found) == [("part", "nonfinite", False)]
    assert math.isnan(found[0].value)
    assert "in fp32 too" in str(found[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("buffer", [False, True])
def test_weights_that_are_not_finite_are_told_as_such(value: float, buffer: bool) -> None:
    model = Around(nn.BatchNorm1d(8) if buffer else linear(1.0)).eval()
    target = model.part.running_mean if buffer else model.part.weight
    with torch.no_grad():
        target.view(-1)[0] = value
    found, _ = located(model, X)
    if value != -math.inf:  # a -inf may be meant
        assert said(found) == [("part", "weights", False)]
        assert "the weights of part" in str(found[0])
    else:
        assert all(cause != "overflow" for _, cause, _ in said(found))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("how", ["position", "keyword", "star", "nested"])
def test_bad_data_is_named_by_its_argument(value: float, how: str) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear(1.0)

        def forward(self, x: Tensor, y: Any = None, *more: Tensor, **named: Any) -> Tensor:
            y = y["deep"][0] if isinstance(y, dict) else 0.0 if y is None else y
            return self.a(x) + y + sum(more)

    bad = torch.full((3, 8), value)
    args, kwargs, name = {
        "position": ((bad,), {}, "x"),
        "keyword": ((X,), {"y": bad}, "y"),
        "star": ((X, X, bad), {}, ""),
        "nested": ((X,), {"y": {"deep": [bad]}}, "y"),
    }[how]
    found, _ = located(Takes(), *args, **kwargs)
    assert [one.cause for one in found] == ["data"]
    assert not found[0].heals
    assert found[0].argument == name or how == "star"
    assert "are not finite" in str(found[0])


def test_two_faults_are_found_in_one_pass() -> None:
    model = nn.Sequential(linear(300.0), Given(lambda s, x: x.clamp(max=64.0)), nn.Sequential(linear(300.0)), linear(1e-5))
    found, outputs = located(model, X * 8)
    assert [name for name, _, _ in said(found)][:2] == ["0", "2.0"]
    assert torch.isfinite(outputs).all()


def test_after_what_fp32_does_not_help_nothing_more_is_looked_at() -> None:
    model = nn.Sequential(linear(300.0), Given(lambda s, x: torch.log(-x)), linear(300.0))
    found, _ = located(model, X * 8)
    assert said(found) == [("0", "overflow", True), ("1", "nonfinite", False)]


def test_random_numbers_and_buffers_are_those_of_a_pass_that_nobody_looks_into() -> None:
    def run(look: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), Given(lambda s, x: s.w(F.dropout(x, 0.5)) * 1e3), nn.Dropout(0.5))
        amp.bind(model, parse("fp16-mixed"), CPU)
        torch.manual_seed(2)
        x = torch.randn(3, 8)
        if look:
            with Locating(model) as seen:
                model(x)
            assert seen.found
        else:
            model(x)
        return torch.get_rng_state(), {k: v for k, v in model.state_dict().items() if "running" in k or "num" in k}

    (random, buffers), (random_too, buffers_too) = run(True), run(False)
    assert torch.equal(random, random_too)
    assert all(torch.equal(buffers[k], buffers_too[k]) for k in buffers)


def test_a_shared_module_is_named_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear(300.0)
            self.alias = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.alias(x * 8).clamp(max=1.0) + self.a(x)

    assert said(located(Twice(), X)[0]) == [("a", "overflow", True)]


def test_a_module_with_hooks_of_the_users_own() -> None:
    model = Around(linear(300.0))
    handle = model.part.register_forward_hook(lambda _, given, gave: gave * 1.0)
    amp.bind(model, parse("fp16-mixed"), CPU)
    with Locating(model) as seen:
        model(X)
    assert said(seen.found)[0] == ("part", "overflow", True)
    assert list(model.part._forward_hooks) == [handle.id]
