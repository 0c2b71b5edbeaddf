"""How tensors spread over a format: the rows counted on the device against a plain count, and what becomes of them on the host."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.numerics import FORMATS
from halfstep.step import spread
from halfstep.step.spread import LOOKED_AT, TOGETHER, joined, looked_at, rows

CPU = torch.device("cpu")
CASES = {
    "mixed": torch.tensor([0.0, 1e-5, -1e-7, 2.0, -70000.0, 40000.0, math.inf, math.nan, 0.0, 1.0]),
    "finite": torch.tensor([0.0, 1e-5, -1e-7, 2.0, -70000.0, 40000.0, 32752.0, 32751.0, -0.0]),
    "zeros": torch.zeros(3, 2),
    "one": torch.tensor(3.0),
    "not contiguous": torch.arange(12.0).reshape(3, 4).T,
}


def plainly(t: Tensor, largest: float, normal: float) -> list[float]:
    """The same counts, one number at a time."""
    numbers = t.double().reshape(-1).tolist()
    finite = [abs(v) for v in numbers if math.isfinite(v)]
    counts = [sum(v == 0 for v in finite), len(numbers) - len(finite), sum(0 < v < normal for v in finite), sum(v >= largest / 2 for v in finite)]
    worst = math.nan if any(math.isnan(v) for v in numbers) else max(map(abs, numbers))
    norm = math.sqrt(sum(v * v for v in numbers)) if worst == worst else math.nan
    return [*map(float, counts), worst, norm]


@pytest.mark.parametrize("form", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_the_plain_counts(dtype: torch.dtype, form: str) -> None:
    fmt, tensors = FORMATS[form], [t.to(dtype) for t in CASES.values()]
    found = rows(tensors, [fmt] * len(tensors), CPU)
    expected = torch.tensor([plainly(t, fmt.largest, fmt.smallest_normal) for t in tensors], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_tensors_of_several_kinds_and_formats_keep_their_places() -> None:
    tensors = [torch.full((2,), 3e4), torch.tensor([]), torch.full((4,), 3e4, dtype=torch.bfloat16), torch.full((3,), 4e4)]
    found = rows(tensors, [FORMATS["fp16"], FORMATS["fp32"], FORMATS["fp16"], FORMATS["fp32"]], CPU)
    assert found[:, 3].tolist() == [0, 0, 0, 0]
    found = rows([t * 2 for t in tensors], [FORMATS["fp16"], FORMATS["fp32"], FORMATS["fp16"], FORMATS["fp32"]], CPU)
    assert found[:, 3].tolist() == [2, 0, 4, 0]


def test_many_tensors_are_counted_in_parts_each_in_its_place() -> None:
    tensors = [torch.full((3,), float(i % 3 > 0)) for i in range(2 * TOGETHER + 5)]
    found = rows(tensors, [FORMATS["fp32"]] * len(tensors), CPU)
    assert found[:, 0].tolist() == [3.0 * (i % 3 == 0) for i in range(len(tensors))]


@pytest.mark.parametrize("size", [0, 1, LOOKED_AT, LOOKED_AT + 1, 3 * LOOKED_AT, 1_000_003])
def test_a_sample_is_small_and_as_large_as_said(size: int) -> None:
    found = rows([torch.zeros(size)], [FORMATS["fp32"]], CPU)
    assert found[0, 0] == looked_at(size) <= LOOKED_AT
    assert looked_at(size) >= min(size, LOOKED_AT // 3)


def test_half_of_the_columns_are_half_of_the_sample() -> None:
    matrix = torch.ones(1024, 64)
    matrix[:, ::2] = 0
    assert rows([matrix], [FORMATS["fp32"]], CPU)[0, 0] / looked_at(matrix.numel()) == pytest.approx(0.5, abs=0.01)


def test_joined_rows_are_those_of_the_joined_tensor() -> None:
    parts = [torch.tensor([0.0, 1.0, 3e-8, 6e4]), torch.tensor([0.0, 0.0, 2.0])]
    whole = torch.cat(parts)
    form = FORMATS["fp16"]
    apart = joined(rows(parts, [form] * 2, CPU).tolist(), [4, 3])
    together = joined(rows([whole], [form], CPU).tolist(), [7])
    assert apart == pytest.approx(together)
    assert together == pytest.approx((7, 3 / 7, 0, 1 / 4, 1 / 7, math.log2(6e4), math.log2(math.sqrt((6e4**2 + 5) / 7))))


@pytest.mark.parametrize(
    ("value", "log2max", "log2rms", "nonfinite"),
    [
        (0.0, -math.inf, -math.inf, 0.0),
        (math.inf, math.inf, math.inf, 0.5),
        (math.nan, math.nan, math.nan, 0.5),
        (2.0**100, 100.0, 100.0, 0.0),  # whose square overflows fp32
    ],
)
def test_nothing_is_hidden_in_the_logarithms(value: float, log2max: float, log2rms: float, nonfinite: float) -> None:
    found = joined(rows([torch.tensor([value, 0.0])], [FORMATS["fp32"]], CPU).tolist(), [2])
    assert str(found[5:]) == str((log2max, log2rms))
    assert found[2] == nonfinite


def test_an_inf_that_the_sample_misses_is_told() -> None:
    t = torch.zeros(LOOKED_AT * 10)
    t[1] = math.inf
    found = joined(rows([t], [FORMATS["fp32"]], CPU).tolist(), [t.numel()])
    assert found[2] > 0
    assert found[5] == math.inf


class Widened(TorchDispatchMode):
    """Notes the sizes of all fp32 tensors that are made, a size for each piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, list | tuple) else (result,):
            if isinstance(t, Tensor) and t.dtype == torch.float32:
                self.kept.append(t)  # so that no memory is given out twice
                self.sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_16_bit_tensor_is_cast_up_as_a_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer of PIECE elements serves all: a copy of each would touch all holes of the heap in turn."""
    monkeypatch.setattr(spread, "PIECE", 1000)
    tensors = [torch.randn(50, 70).to(dtype) for _ in range(20)] + [torch.randn(7).to(dtype)]
    with Widened() as seen:
        found = rows(tensors, [FORMATS["bf16"]] * len(tensors), CPU)
    large = [size for size in seen.sizes.values() if size > 100]
    assert large == [1000]
    for t, row in zip(tensors, found, strict=True):
        assert float(row[5]) == pytest.approx(float(t.double().norm()), rel=1e-6)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype_changes_no_length(default: torch.dtype) -> None:
    tensors = [torch.randn(300, generator=torch.Generator().manual_seed(0)).to(torch.float16)]
    expected = rows(tensors, [FORMATS["fp16"]], torch.device("cpu"))
    torch.set_default_dtype(default)
    try:
        found = rows(tensors, [FORMATS["fp16"]], torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
