from __future__ import annotations

import math

import pytest
import torch

from halfstep.tracing import SEVERITY, Fault, Finding, Place, Range, Trace, ordered, range_of
from halfstep.tracing.findings import number


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_range_counts_what_is_not_finite_and_leaves_it_out(dtype: torch.dtype) -> None:
    seen = range_of(torch.tensor([[0.0, -4.0, 0.5], [math.inf, math.nan, -math.inf]], dtype=dtype))
    assert seen == Range(dtype, (2, 3), 0.5, 4.0, nan=1, inf=2)
    assert not seen.finite


@pytest.mark.parametrize(
    ("tensor", "least", "largest"),
    [
        (torch.zeros(3), 0.0, 0.0),
        (torch.empty(0), 0.0, 0.0),
        (torch.empty(2, device="meta"), 0.0, 0.0),
        (torch.tensor([True, False]), 1.0, 1.0),
        (torch.tensor([-7, 3, 0]), 3.0, 7.0),
        (torch.tensor([2.0, -3.0]).to(torch.float8_e4m3fn), 2.0, 3.0),
        (torch.tensor([3 - 4j]), 3.0, 4.0),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), 2.0, 2.0),
        (torch.full((2,), 6e4, dtype=torch.float16), 6e4, 6e4),
    ],
    ids=["zeros", "empty", "meta", "bool", "int", "fp8", "complex", "sparse", "fp16"],
)
def test_every_kind_of_tensor_has_a_range(tensor: torch.Tensor, least: float, largest: float) -> None:
    seen = range_of(tensor)
    assert (seen.least, seen.largest) == pytest.approx((least, largest), rel=1e-3)
    assert seen.finite


def test_a_range_as_text() -> None:
    assert str(Range(torch.float16, (8, 64), 0.002, 41000.0, inf=3)) == "fp16 (8, 64) 0.002..41000, 3 inf"
    assert str(Range(torch.bfloat16, (4,), 0.0, 1.5e20, nan=1)) == "bf16 (4,) 0..1.5e+20, 1 NaN"
    assert str(Range(torch.int64, (), 0.0, 0.0)) == "int64 () 0..0"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (41000.0, "41000"), (106000.0, "1.06e+05"), (0.0021, "0.0021"), (-math.inf, "-inf"), (math.nan, "NaN")]
)
def test_numbers_as_a_person_reads_them(value: float, text: str) -> None:
    assert number(value) == text


def test_a_finding_as_text() -> None:
    place = Place("blocks.1.wo", "Linear", "linear", "forward", "model.py:42")
    finding = Finding("overflow", place, "the product reaches 1.06e+05", "hold it in fp32", (Range(torch.float16, (2,), 1.0, 2.0),), step=7)
    assert str(finding).splitlines() == [
        "overflow in blocks.1.wo (Linear), forward, model.py:42, step 7: the product reaches 1.06e+05",
        "  inputs: fp16 (2,) 1..2",
        "  remedy: hold it in fp32",
    ]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Place("", "GPT", direction="backward"), "the model (GPT), backward"),
        (Place("a.b", ""), "a.b, forward"),
        (Place(source="run.py:3"), "code outside of the model, forward, run.py:3"),
    ],
)
def test_a_place_as_text(place: Place, text: str) -> None:
    assert str(place) == text


def test_findings_are_told_by_severity_then_by_time_and_fixed_ones_last() -> None:
    def one(fault: Fault, at: int, fixed: bool = False) -> Finding:
        return Finding(fault, Place(), f"{fault} {at}", "", fixed=fixed, at=at)

    given = [one("shape", -1), one("near", 3), one("overflow", 9), one("table", -1, fixed=True), one("overflow", 2), one("data", 12), one("near", 3)]
    assert [f.what for f in ordered(given)] == ["data 12", "overflow 2", "overflow 9", "near 3", "shape -1", "table -1"]
    assert SEVERITY[0] == "data"
    assert SEVERITY[-1] == "shape"


def test_a_trace_as_text() -> None:
    nothing = Trace(loss=2.3145, closest=(("ff (Linear)", 0.25), ("head (Linear)", 0.01)), ops=812)
    assert str(nothing) == (
        "nothing found: loss 2.31, all of 812 ops finite; closest to the limit of its format: ff (Linear) 25.0%, head (Linear) 1.0%"
    )
    assert nothing.first is None
    finding = Finding("mismatch", Place("head", "Linear"), "met", "cast")
    found = Trace((finding,), None, error="RuntimeError: no")
    assert found.first is finding
    assert str(found).splitlines() == ["mismatch in head (Linear), forward: met", "  remedy: cast", "the traced code raised: RuntimeError: no"]
    assert str(Trace()) == "nothing found"
