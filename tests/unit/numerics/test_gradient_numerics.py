"""Norm, magnitude and scaling of lists of tensors against fp64 references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfstep import numerics

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
quick = settings(deadline=None, max_examples=25, derandomize=True, database=None)


@st.composite
def tensor_lists(draw: st.DrawFn, exponents: tuple[int, int] = (-3, 3), smallest: int = 0) -> list[Tensor]:
    """Lists of tensors of mixed dtypes, shapes and magnitudes, empty tensors and the empty list among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shapes = st.lists(st.lists(st.integers(0, 12), min_size=0, max_size=3), min_size=smallest, max_size=6)
    return [
        (torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(*exponents))).to(draw(st.sampled_from(DTYPES))) for shape in draw(shapes)
    ]


def reference_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors))


def reference_largest(tensors: list[Tensor]) -> float:
    return max((float(t.double().abs().max()) for t in tensors if t.numel()), default=0.0)


def sparse(generator: torch.Generator) -> Tensor:
    """An uncoalesced sparse matrix in which one index stands twice, as an embedding's gradient does."""
    return torch.sparse_coo_tensor(torch.tensor([[1, 4, 1]]), torch.randn(3, 3, generator=generator), (6, 3), check_invariants=True)


@quick
@given(tensor_lists())
def test_norm_is_that_of_fp64(tensors: list[Tensor]) -> None:
    got = numerics.norm(tensors, CPU)
    assert got.shape == ()
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(reference_norm(tensors), rel=1e-5)


@quick
@given(tensor_lists())
def test_norm_is_bit_identical_twice(tensors: list[Tensor]) -> None:
    assert torch.equal(numerics.norm(tensors, CPU), numerics.norm(tensors, CPU))


@quick
@given(tensor_lists())
def test_largest_is_exact(tensors: list[Tensor]) -> None:
    got = numerics.largest(tensors, CPU)
    assert got.dtype == torch.float32
    assert float(got) == reference_largest(tensors)


@quick
@given(tensor_lists(exponents=(-3, 4)))
def test_wide_norm_is_that_of_fp64(tensors: list[Tensor]) -> None:
    got = numerics.wide_norm(tensors, CPU)
    assert got.dtype == torch.float64
    assert float(got) == pytest.approx(reference_norm(tensors), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("element", [1e19, 1e20, 1e25, 1e30])
def test_wide_norm_does_not_overflow_where_norm_does(element: float, dtype: torch.dtype) -> None:
    tensors = [torch.full((7, 3), element, dtype=dtype), torch.full((5,), -element, dtype=dtype)]
    assert float(numerics.wide_norm(tensors, CPU)) == pytest.approx(reference_norm(tensors), rel=1e-12)
    assert float(numerics.norm(tensors, CPU)) == math.inf


@quick
@given(tensor_lists(smallest=1), st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 10_000))
def test_one_bad_element_shows_in_every_measure(tensors: list[Tensor], bad: float, place: int) -> None:
    holders = [t for t in tensors if t.numel()]
    if not holders:
        assert float(numerics.norm(tensors, CPU)) == 0.0
        return
    victim = holders[place % len(holders)]
    victim.view(-1)[place % victim.numel()] = bad
    for measure in (numerics.norm, numerics.wide_norm, numerics.largest):
        value = float(measure(tensors, CPU))
        assert math.isnan(value) if math.isnan(bad) else value == math.inf


def test_an_infinite_and_a_nan_element_give_nan() -> None:
    tensors = [torch.tensor([1.0, math.inf]), torch.tensor([math.nan])]
    for measure in (numerics.norm, numerics.wide_norm, numerics.largest):
        assert math.isnan(float(measure(tensors, CPU)))


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.zeros(0, 3), torch.zeros(0, dtype=torch.bfloat16)]])
def test_nothing_measures_zero(tensors: list[Tensor]) -> None:
    for measure in (numerics.norm, numerics.wide_norm, numerics.largest):
        assert float(measure(tensors, CPU)) == 0.0
    numerics.multiply_(tensors, 0.5)


def test_norm_takes_fp64_and_mixes_it_with_others() -> None:
    tensors = [torch.full((3,), 2.0, dtype=torch.float64), torch.ones(4), torch.ones(2, dtype=torch.bfloat16)]
    assert float(numerics.norm(tensors, CPU)) == pytest.approx(math.sqrt(18.0), rel=1e-6)


def test_norm_tells_one_part_from_many() -> None:
    """The norm of a list is that of its parts laid end to end."""
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    parts = list(whole.split([1, 99, 400, 500]))
    assert float(numerics.norm(parts, CPU)) == pytest.approx(float(numerics.norm([whole], CPU)), rel=1e-6)


@quick
@given(st.integers(0, 10_000))
def test_stored_sums_a_sparse_tensor_per_index(seed: int) -> None:
    tensor = sparse(torch.Generator().manual_seed(seed))
    dense = tensor.to_dense()
    values = numerics.stored(tensor)
    assert float(numerics.norm([values], CPU)) == pytest.approx(reference_norm([dense]), rel=1e-6)
    assert float(numerics.largest([values], CPU)) == reference_largest([dense])


@quick
@given(st.integers(0, 10_000))
def test_stored_gives_a_complex_tensor_as_pairs(seed: int) -> None:
    tensor = torch.randn(5, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
    values = numerics.stored(tensor)
    assert values.dtype == torch.float32
    assert values.shape == (5, 2, 2)
    assert float(numerics.norm([values], CPU)) == pytest.approx(float(torch.linalg.vector_norm(tensor.to(torch.complex128))), rel=1e-6)


def test_stored_gives_sparse_complex_values_as_pairs() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.tensor([3 + 4j, 1j, -3 - 3j]), (4,), check_invariants=True)
    assert torch.equal(numerics.stored(tensor), torch.tensor([[0.0, 1.0], [0.0, 1.0]]))


def test_stored_hands_a_plain_tensor_through() -> None:
    tensor = torch.ones(3)
    assert numerics.stored(tensor) is tensor


@quick
@given(tensor_lists(exponents=(-1, 1)), st.integers(-8, 8))
def test_multiplying_by_a_power_of_two_and_back_is_a_round_trip(tensors: list[Tensor], exponent: int) -> None:
    tensors = [t for t in tensors if t.dtype != torch.float16]  # its small range would turn the smallest into subnormals
    before = [t.clone() for t in tensors]
    numerics.multiply_(tensors, 2.0**exponent)
    for now, was in zip(tensors, before, strict=True):
        assert torch.equal(now.double(), was.double() * 2.0**exponent)
    numerics.multiply_(tensors, 2.0**-exponent)
    assert all(torch.equal(now, was) for now, was in zip(tensors, before, strict=True))


@quick
@given(tensor_lists(exponents=(-1, 1)), st.floats(0.01, 10.0))
def test_multiply_is_the_exact_product_within_two_roundings(tensors: list[Tensor], factor: float) -> None:
    """One rounding is that of the factor to the tensor's dtype, the other that of the product."""
    exact = [t.double() * factor for t in tensors]
    numerics.multiply_(tensors, factor)
    for now, then in zip(tensors, exact, strict=True):
        torch.testing.assert_close(now.double(), then, rtol=torch.finfo(now.dtype).eps, atol=1e-7)


def test_multiply_reaches_sparse_and_complex_tensors() -> None:
    tensor = sparse(torch.Generator().manual_seed(1))
    pairs = torch.tensor([1 + 2j, -4j])
    dense = tensor.to_dense()
    numerics.multiply_([tensor, pairs, tensor.coalesce()], 0.25)
    assert torch.equal(tensor.to_dense(), dense * 0.25)
    assert torch.equal(pairs, torch.tensor([0.25 + 0.5j, -1j]))


def test_multiplying_by_one_touches_nothing() -> None:
    tensor = torch.ones(3)
    numerics.multiply_([tensor], 1.0)
    assert tensor._version == 0
    numerics.multiply_([tensor], 2.0)
    assert tensor._version == 1


@quick
@given(st.floats(0.0, 1e30), st.floats(1e-6, 1e6))
def test_clip_factor_never_grows_and_brings_the_norm_below(total: float, max_norm: float) -> None:
    factor = numerics.clip_factor(total, max_norm)
    assert 0.0 <= factor <= 1.0
    assert total * factor <= max_norm * (1 + 1e-6)
    if total + 1e-6 < max_norm * (1 - 1e-6):
        assert factor == 1.0


@quick
@given(st.floats(1e-3, 1e6), st.floats(1.0, 2.0), st.floats(1e-3, 1e3))
def test_clip_factor_is_monotone(total: float, more: float, max_norm: float) -> None:
    assert numerics.clip_factor(total * more, max_norm) <= numerics.clip_factor(total, max_norm)
    assert numerics.clip_factor(total, max_norm * more) >= numerics.clip_factor(total, max_norm)


@pytest.mark.parametrize("total", [math.inf, math.nan])
def test_clip_factor_of_a_bad_norm_changes_nothing(total: float) -> None:
    assert numerics.clip_factor(total, 1.0) == 1.0


def test_clipping_equals_torchs_bit_for_bit() -> None:
    """norm, clip_factor and multiply_ together are torch.nn.utils.clip_grad_norm_ on fp32 lists."""
    different = []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 40, (3,), generator=generator).tolist()
        gradients = [torch.randn(size, generator=generator) * 10.0 ** (seed % 7 - 3) for size in sizes]
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        theirs = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        ours = numerics.norm(gradients, CPU)
        assert torch.equal(ours, theirs)
        numerics.multiply_(gradients, numerics.clip_factor(float(ours), 1.0))
        if not all(torch.equal(g, p.grad) for g, p in zip(gradients, parameters, strict=True)):
            different.append(seed)
    assert not different, f"{len(different)} of 300 lists differ from torch's"
