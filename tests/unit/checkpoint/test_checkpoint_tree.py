"""Nested values come back from a checkpoint's JSON and tensors bit for bit, or are refused by name."""

import json
import math
import struct
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load as read_tensors

from halfstep.checkpoint.tensors import pieces
from halfstep.checkpoint.tree import decode, encode
from halfstep.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
LAYOUTS = ("plain", "transposed", "strided", "inner")
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def from_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of arbitrary bits, NaNs with any payload included."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same kind of tensor as a view that is not contiguous, where its shape allows that."""
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if layout == "strided" and tensor.dim() >= 1:
        return tensor[::2]
    if layout == "inner" and tensor.dim() >= 1:
        return tensor[1:]
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: object, b: object) -> bool:
    """Equal in type, structure and every bit; all NaNs of Python floats count as one."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True))
    return a == b


def round_trip(value: object) -> object:
    """Through the very bytes that a checkpoint holds."""
    structure, tensors = encode(value)
    return decode(json.loads(json.dumps(structure)), read_tensors(b"".join(pieces(tensors))) if tensors else {})


texts = st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
tensors = st.builds(
    lambda dtype, shape, seed, layout: laid_out(from_bytes(dtype, shape, seed), layout),
    st.sampled_from(DTYPES),
    shapes,
    st.integers(0, 2**32),
    st.sampled_from(LAYOUTS),
)
arrays = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint32, np.uint64, np.uint8, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3),
    elements={"allow_nan": False},
)
# text without dots, so that every path in the tree is another one; colliding paths have a test of their own
keys = st.text(st.characters(exclude_characters="."), max_size=4) | st.sampled_from(["$tensor", "$tuple", "$items", "$dtype", "$array"])
other_keys = st.integers(-3, 3) | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2)) | st.sampled_from(DTYPES)
trees = st.recursive(
    scalars | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(other_keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(quick, max_examples=150)
@given(trees)
@example({"$tensor": "x"})
@example({"$items": [[1, 2]], "$tuple": ()})
@example([-0.0, math.inf, -math.inf, math.nan, 5e-324, 2**70, True, 1, 1.0])
def test_every_tree_comes_back_bit_for_bit(value: object) -> None:
    assert same(value, round_trip(value))


@quick
@given(st.sampled_from(DTYPES), shapes, st.integers(0, 2**32), st.sampled_from(LAYOUTS))
@example(torch.bfloat16, (), 0, "plain")
@example(torch.uint8, (0, 3), 0, "plain")
@example(torch.float16, (3, 2), 1, "transposed")
def test_every_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], seed: int, layout: str) -> None:
    tensor = laid_out(from_bytes(dtype, shape, seed), layout)
    assert same(tensor, round_trip({"x": tensor})["x"])


def test_a_tensor_as_the_whole_value_comes_back() -> None:
    assert same(torch.arange(3.0), round_trip(torch.arange(3.0)))


def test_tensors_whose_paths_look_alike_stay_apart() -> None:
    dotted = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    assert same(dotted, round_trip(dotted))
    numbered = {0: torch.tensor(1), "0": torch.tensor(2)}
    assert same(numbered, round_trip(numbered))
    leading = {".a": torch.tensor(1), "a": torch.tensor(2)}
    assert same(leading, round_trip(leading))


@pytest.mark.parametrize("key", ["__metadata__", "\ud800", ""])
def test_any_text_may_be_the_name_of_a_tensor(key: str) -> None:
    value = {key: torch.tensor(1.5)}
    assert same(value, round_trip(value))


def test_a_tensor_met_twice_is_stored_once_and_stays_one() -> None:
    weight = torch.randn(3, 2)
    structure, stored = encode({"head": weight, "body": {"tied": weight.detach(), "again": torch.nn.Parameter(weight)}})
    assert len(stored) == 1
    back = decode(structure, stored)
    assert back["head"] is back["body"]["tied"] is back["body"]["again"]
    assert same(back["head"], weight)


@quick
@given(st.integers(2, 5), st.integers(2, 5), st.integers(0, 99))
def test_different_views_of_one_memory_are_all_right_and_not_taken_for_tied(rows: int, columns: int, seed: int) -> None:
    base = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    views = {"whole": base, "turned": base.T, "first": base[0], "tail": base[1:], "flat": base.view(-1), "as_int": base.view(torch.int32)}
    assert same({k: v.clone() for k, v in views.items()}, round_trip(views))


def test_writing_to_one_restored_view_leaves_the_others_alone() -> None:
    base = torch.arange(4.0)
    back = round_trip({"whole": base, "half": base[:2]})
    back["whole"].zero_()
    assert back["half"].tolist() == [0.0, 1.0]


def test_lazily_negated_and_conjugated_tensors_are_stored_as_their_values() -> None:
    number = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert round_trip({"x": number.conj()})["x"].tolist() == [1 - 2j]
    assert round_trip({"x": number.conj().imag})["x"].tolist() == [-2.0]


def test_encoding_neither_changes_nor_keeps_a_graph_of_what_it_is_given() -> None:
    weight = torch.randn(2, 2, requires_grad=True)
    doubled = weight * 2
    before = bits(doubled)
    back = round_trip({"x": doubled})
    back["x"].add_(1)
    assert bits(doubled) == before
    assert doubled.requires_grad
    assert not back["x"].requires_grad


@quick
@given(arrays)
@example(np.zeros((0, 3), dtype=np.float32))
@example(np.zeros((2, 0, 3), dtype=np.int64))
@example(np.array(5, dtype=np.uint8))
def test_numpy_arrays_come_back_with_dtype_and_shape(array: np.ndarray) -> None:
    assert same(array, round_trip({"x": array})["x"])


def test_not_a_number_and_infinity_survive_in_arrays() -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0], dtype=np.float32)
    back = round_trip(array)
    assert np.isnan(back[0])
    assert back[1:].tobytes() == array[1:].tobytes()


@pytest.mark.parametrize("number", [np.float64(0.1), np.float32(0.1), np.float16(0.1), np.int64(-3), np.uint8(7), np.bool_(True), np.str_("a")])
def test_numpy_scalars_become_equal_python_values(number: np.generic) -> None:
    back = round_trip({"x": number})["x"]
    assert not isinstance(back, np.generic)
    assert back == number


def test_other_mappings_become_dicts_in_the_same_order() -> None:
    back = round_trip(OrderedDict([("z", 1), ("a", torch.tensor(2))]))
    assert type(back) is dict
    assert list(back) == ["z", "a"]


UNUSUAL = {
    "set": {1},
    "bytes": b"x",
    "object": object(),
    "complex": 1j,
    "function": len,
    "generator": (i for i in ()),
    "module": torch.nn.Linear(1, 1),
    "device": torch.device("cpu"),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "complex128": torch.zeros(2, dtype=torch.complex128),
    "object_array": np.array([object()], dtype=object),
    "complex_array": np.array([1j]),
    "date_array": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "record_array": np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
    "longdouble": np.longdouble(1) / 3,
}


def outcome(value: object) -> object:
    """What comes back for a value deep inside a tree, or the refusal."""
    try:
        return round_trip({"state": [0, {"hook": value}]})["state"][1]["hook"]
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("kind", ["sparse", "meta", "complex128", "object_array", "complex_array", "date_array", "record_array", "longdouble"])
def test_unusual_tensors_and_arrays_are_refused_with_their_path_or_come_back(kind: str) -> None:
    value = UNUSUAL[kind]
    back = outcome(value)
    if isinstance(back, CheckpointError):
        assert back.cause.startswith("state.1.hook ")
        assert back.remedy
    else:
        assert torch.equal(back, value) if torch.is_tensor(value) else np.array_equal(back, value)


@pytest.mark.parametrize("kind", ["set", "bytes", "object", "complex", "function", "generator", "module", "device"])
def test_plain_python_objects_are_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^state\.1\.hook is a {type(UNUSUAL[kind]).__name__}, which a checkpoint cannot hold"):
        encode({"state": [0, {"hook": UNUSUAL[kind]}]})


def test_a_refused_value_at_the_top_is_named_too() -> None:
    with pytest.raises(CheckpointError, match="the value is a set"):
        encode({1, 2})
