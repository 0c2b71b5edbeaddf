"""Bytes per weight: the numbers themselves, and that they are those of real tensors."""

from typing import Any, get_args

import pytest
import torch
from torch import nn

from halfstep import numerics
from halfstep.errors import ConfigError
from halfstep.policy import PRESETS, ROLES, Bytes, Policy, bytes_per_parameter, model_bytes, parse, roles_of, tensor_bytes
from halfstep.policy.memory import COUNTERS, MOMENTS, ONLY_WITH, RESIDUALS, name_of, table
from halfstep.policy.policy import States, Weights

ADAMW = {  # precision: bytes of a castable weight, of another one, with AdamW
    "fp32": (16, 16),
    "tf32": (16, 16),
    "fp32,states=int8": (10.0625, 10.0625),
    "bf16-mixed": (16, 16),
    "fp16-mixed": (16, 16),
    "fp16-mixed,states=bf16": (12, 12),
    "bf16-lean": (8.0625, 10.0625),
    "fp16-lean": (8.0625, 10.0625),
    "bf16-lean,states=fp32": (14, 16),
    "bf16-mixed,weights=split": (14, 16),
    "bf16-lean,weights=split24": (7.0625, 10.0625),
    "bf16-lean,weights=kahan,states=bf16": (10, 12),
    "bf16-lean,weights=stochastic": (6.0625, 10.0625),
    "bf16-mixed,weights=plain": (12, 16),
    "bf16-true": (10, 10),
    "bf16-true,fp32=*norm*": (10, 12),
    "fp16-true": (14, 14),
    "bf16-true,weights=plain": (8, 8),
}

RUNS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ROLES if hasattr(torch.optim, name) and name != "LBFGS"),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
]
SHAPES = [(6, 8), (128,), (1,), (2, 3, 5)]
STEPS = [(name, settings, shape) for name, settings in RUNS for shape in SHAPES if name != "Muon" or len(shape) == 2]  # Muon takes matrices only


def stepped(name: str, settings: dict[str, Any], shape: tuple[int, ...]) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """An optimizer of torch after one step on one tensor, and what it keeps for it."""
    p = nn.Parameter(torch.ones(shape))
    optimizer = getattr(torch.optim, name)([p], **settings)
    p.grad = torch.ones(shape).to_sparse() if name == "SparseAdam" else torch.ones(shape)
    optimizer.step()
    return optimizer, optimizer.state[p]


def nbytes(values: Any) -> int:
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor))


@pytest.mark.parametrize(("text", "expected"), ADAMW.items(), ids=list(ADAMW))
def test_bytes_per_weight_with_adamw(text: str, expected: tuple[float, float]) -> None:
    footprint = bytes_per_parameter(text)
    assert (footprint.castable.total, footprint.other.total) == expected
    for castable, b in ((True, footprint.castable), (False, footprint.other)):
        assert b.weight + b.residual + b.gradient + b.states == b.total
        large = tensor_bytes(text, "AdamW", 2**30, castable=castable)
        assert large.total / 2**30 == pytest.approx(b.total, abs=1e-8)


def test_every_preset_and_every_kind_of_weights_and_states_is_counted() -> None:
    assert set(PRESETS) <= set(ADAMW)
    assert {parse(text).weights for text in ADAMW} == set(get_args(Weights)) == set(RESIDUALS)
    assert {parse(text).states for text in ADAMW} == set(get_args(States)) == set(MOMENTS)


def test_all_of_torchs_optimizers_are_in_the_table() -> None:
    own = {c.__name__ for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)} - {"Optimizer"}
    assert own - set(ROLES) == set()
    assert {name for name, _ in RUNS} == own - {"LBFGS"}
    assert set(COUNTERS) <= set(ROLES)
    assert all(key in ROLES[name] for name, key in ONLY_WITH)


@pytest.mark.parametrize(("name", "settings", "shape"), STEPS, ids=str)
def test_fp32_states_are_counted_as_torch_makes_them(name: str, settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Law: the bytes of an optimizer's real tensors after a step, and the keys of those of the weight's size."""
    optimizer, state = stepped(name, settings, shape)
    for given, group in ((optimizer, None), (type(optimizer), settings), (name, settings), (name, optimizer.param_groups[0])):
        b = tensor_bytes("fp32", given, shape, group=group)
        assert b.states == nbytes(state.values())
        assert b == Bytes(4 * torch.Size(shape).numel(), 0, 4 * torch.Size(shape).numel(), b.states)
        if name != "Adafactor":
            full = {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == shape and k != "step"}
            assert set(roles_of(given, group)) == full


@pytest.mark.parametrize("numel", [0, 1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize(("name", "settings"), RUNS, ids=str)
def test_encoded_states_are_those_tensors(name: str, settings: dict[str, Any], numel: int) -> None:
    """int8 and bf16 instead of each state with a role, and nothing else, against the codec's own tensors."""
    roles = roles_of(name, settings)
    fp32 = tensor_bytes("fp32", name, numel, group=settings).states
    kept = fp32 - sum(4 * numel for role in roles.values() if role)
    x = torch.linspace(0.5, 1.0, numel)
    int8 = sum(nbytes(numerics.encode(x, role == "first")) for role in roles.values() if role)
    assert tensor_bytes("fp32,states=int8", name, numel, group=settings).states == kept + int8
    bf16 = sum(x.bfloat16().nbytes for role in roles.values() if role)
    assert tensor_bytes("fp32,states=bf16", name, numel, group=settings).states == kept + bf16


@pytest.mark.parametrize("form", ["bf16", "fp16"])
@pytest.mark.parametrize("numel", [1, 5, 128])
def test_weights_and_residuals_are_those_tensors(form: str, numel: int) -> None:
    x = torch.linspace(0.5, 1.0, numel)
    dtype = parse(f"{form}-lean").weight_dtype
    made = {
        "split": numerics.split(x, dtype),
        "split24": numerics.split(x, dtype, 8),
        "kahan": numerics.kahan_split(x, dtype),
        "stochastic": (x.to(dtype), None),
    }
    for weights, (hi, lo) in made.items():
        b = tensor_bytes(f"{form}-mixed,weights={weights}", "AdamW", numel)
        assert b.weight == b.gradient == hi.nbytes
        assert b.residual == (0 if lo is None else lo.nbytes)


def test_gradients_take_4_bytes_while_they_are_added_up() -> None:
    for text in ADAMW:
        once, added = tensor_bytes(text, "AdamW", 100), tensor_bytes(text, "AdamW", 100, accumulating=True)
        assert added.gradient == 400
        assert (added.weight, added.residual, added.states) == (once.weight, once.residual, once.states)
    assert bytes_per_parameter("bf16-lean", accumulating=True).castable.gradient == 4


def test_what_is_not_castable_is_fp32_with_the_same_states() -> None:
    for text in ("bf16-lean", "fp16-lean,weights=split24", "bf16-mixed,weights=plain", "bf16-true,fp32=norm"):
        narrow, wide = tensor_bytes(text, "AdamW", 100), tensor_bytes(text, "AdamW", 100, castable=False)
        assert (wide.weight, wide.residual, wide.gradient) == (400, 0, 400)
        assert wide.states == narrow.states
    assert tensor_bytes("bf16-true", "AdamW", 100, castable=False) == tensor_bytes("bf16-true", "AdamW", 100), "the whole model is 16-bit"


def gpt2() -> list[tuple[tuple[int, ...], bool]]:
    """The shapes of GPT-2 with 124 million parameters, and which of them are used by products only. The head is tied to the embedding."""
    d = 768
    products = [(d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    layer = [(shape, True) for shape in products] + [((d,), False)] * 4
    return [((50257, d), False), ((1024, d), False), *layer * 12, ((d,), False), ((d,), False)]


GPT2 = {
    "bf16-mixed": 16.0,
    "bf16-lean,states=fp32": 14.634,
    "bf16-lean": 8.696,
    "bf16-lean,weights=split24": 8.013,
    "bf16-true": 10.0,
    "fp16-true": 14.0,
}


@pytest.mark.parametrize(("text", "expected"), GPT2.items(), ids=list(GPT2))
def test_a_whole_model(text: str, expected: float) -> None:
    sizes = gpt2()
    count = sum(torch.Size(shape).numel() for shape, _ in sizes)
    assert count == 124_439_808
    whole = model_bytes(sizes, text)
    assert whole.total / count == pytest.approx(expected, abs=5e-4)
    parts = [tensor_bytes(text, "AdamW", shape, castable=castable) for shape, castable in sizes]
    assert whole == Bytes(*(sum(getattr(b, part) for b in parts) for part in ("weight", "residual", "gradient", "states")))
    assert model_bytes([], text).total == 0


def test_centered_averages_stay_fp32() -> None:
    assert roles_of("RMSprop") == {"square_avg": "second"}
    assert roles_of("RMSprop", {"centered": True, "momentum": 0.9}) == {"square_avg": None, "momentum_buffer": "first", "grad_avg": None}
    assert roles_of("Adam", {"amsgrad": True})["max_exp_avg_sq"] is None


class Holder:
    """Something of halfstep's that keeps an optimizer inside, as wrapped and prepared ones do."""

    __module__ = "halfstep.somewhere"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4))


def test_an_optimizer_is_found_by_name_class_instance_parent_and_inside_another() -> None:
    class Mine(torch.optim.AdamW):
        pass

    for given in ("AdamW", torch.optim.AdamW, torch.optim.AdamW([parameter()]), Mine, Mine([parameter()])):
        assert name_of(given) == "AdamW"
    inside = Holder(Holder(torch.optim.SGD([parameter()], momentum=0.9)))
    assert name_of(inside) == "SGD"
    assert roles_of(inside) == {"momentum_buffer": "first"}
    assert roles_of(torch.optim.SGD([parameter()])) == roles_of("SGD") == {}


class Foreign(Holder):
    """Of another library, with states of its own beside those of the optimizer inside."""

    __module__ = "elsewhere"


class AdamW(torch.optim.Optimizer):
    """Of another library, with states of its own."""


class Lion(torch.optim.Optimizer):
    """torch has none, and all of them keep the same."""


def test_an_optimizer_of_another_library_is_not_taken_for_torchs_by_its_name() -> None:
    assert name_of(Foreign(torch.optim.SGD([parameter()]))) is None
    assert name_of(AdamW) is None
    assert roles_of(AdamW) == {}
    assert name_of(Lion) == "Lion"
    with pytest.raises(ConfigError, match="states of the optimizer AdamW are not known") as caught:
        tensor_bytes("fp32", AdamW, 4)
    assert caught.value.remedy


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RMSProp are not known.*'RMSprop'"):
        bytes_per_parameter("fp32", "RMSProp")
    with pytest.raises(ConfigError, match=r"LBFGS keeps a history.*history_size"):
        tensor_bytes("fp32", torch.optim.LBFGS([parameter()]), 4)
    with pytest.raises(ConfigError, match="Did you mean 'bf16-lean'"):
        bytes_per_parameter("bf16-leen")


def test_groups_that_keep_different_states_are_counted_one_by_one() -> None:
    a, b = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [a], "momentum": 0.9}, {"params": [b]}], lr=0.1)
    with pytest.raises(ConfigError, match=r"different states.*group=optimizer.param_groups\[0\]"):
        tensor_bytes("fp32", optimizer, 4)
    assert [tensor_bytes("fp32", optimizer, 4, group=g).states for g in optimizer.param_groups] == [16, 0]
    same = torch.optim.SGD([{"params": [parameter()], "momentum": 0.9}, {"params": [parameter()], "momentum": 0.5}], lr=0.1)
    assert tensor_bytes("fp32", same, 4).states == 16


PRINTED = {
    "fp32": "fp32 with AdamW: 16 bytes per parameter (weight 4, gradient 4, states 8)",
    "bf16-lean": "bf16-lean with AdamW: 8.06 bytes per castable parameter (weight 2, residual 2, gradient 2, states 2.06) "
    "and 10.06 bytes per other parameter (weight 4, gradient 4, states 2.06)",
    "bf16-true": "bf16-true with AdamW: 10 bytes per parameter (weight 2, residual 2, gradient 2, states 4)",
    "bf16-true,fp32=norm": "bf16-true,fp32=norm with AdamW: 10 bytes per 16-bit parameter (weight 2, residual 2, gradient 2, states 4) "
    "and 12 bytes per fp32 parameter (weight 4, gradient 4, states 4)",
}


@pytest.mark.parametrize(("text", "line"), PRINTED.items(), ids=list(PRINTED))
def test_a_footprint_is_one_line(text: str, line: str) -> None:
    assert str(bytes_per_parameter(text)) == line


def test_the_table_has_a_row_per_precision_and_a_column_per_optimizer() -> None:
    policies: list[Policy | str] = ["bf16-mixed", PRESETS["bf16-lean"], "bf16-true"]
    assert table(["AdamW", ("SGD", {"momentum": 0.9}), torch.optim.SGD], policies).splitlines() == [
        "| precision | AdamW | SGD (momentum=0.9) | SGD |",
        "|---|---|---|---|",
        "| `bf16-mixed` | 16 | 12 | 8 |",
        "| `bf16-lean` | 8.06 / 10.06 | 7.03 / 9.03 | 6 / 8 |",
        "| `bf16-true` | 10 | 8 | 6 |",
    ]
