"""Binding a policy to a module: what its forward pass computes, and that removal leaves no trace."""

import copy
import inspect
import pickle
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import amp
from halfstep.errors import ConfigError
from halfstep.policy import PRESETS, parse

CPU = torch.device("cpu")
BF16 = parse("bf16-mixed")
COMPUTE = parse("bf16-mixed,output=compute")
Pair = namedtuple("Pair", ["logits", "extra"])


class Watched(nn.Linear):
    """A linear layer that notes under what it was called."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append((input.dtype, torch.is_autocast_enabled("cpu")))
        output: Tensor = super().forward(input)
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Watched(4, 8), nn.Tanh(), Watched(8, 8))
        self.head = Watched(8, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Said."""
        output: Tensor = self.head(self.body(x)) * scale
        return output


def model() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.parametrize("text", ["bf16-mixed", "fp16-mixed", "bf16-mixed,output=compute", "fp16-mixed,output=compute", "fp32"])
def test_forward_runs_under_the_policy_and_outputs_follow_it(text: str) -> None:
    policy, bound, plain = parse(text), model(), model()
    amp.bind(bound, policy, CPU)
    with amp.forward_context(policy, CPU):
        expected = plain(X)
    for got in (bound(X), bound.forward(X)):
        assert got.dtype == (policy.dtype if policy.output == "compute" else torch.float32)
        assert torch.equal(got, expected.to(got.dtype))
    assert bound.head.seen[0] == (policy.dtype, policy.is_mixed)
    assert amp.bound_policy(bound) == policy
    assert not torch.is_autocast_enabled("cpu")


def test_the_policy_acts_in_every_thread() -> None:
    bound, seen = model(), list[torch.dtype]()
    amp.bind(bound, COMPUTE, CPU)
    thread = threading.Thread(target=lambda: seen.append(bound(X).dtype))
    thread.start()
    thread.join()
    assert seen == [torch.bfloat16]


def test_gradients_are_fp32_and_those_of_autocast() -> None:
    bound, plain = model(), model()
    amp.bind(bound, BF16, CPU)
    bound(X).square().sum().backward()
    with amp.autocast("cpu", torch.bfloat16):
        outputs = plain(X)
    outputs.float().square().sum().backward()
    for ours, theirs in zip(bound.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.float32
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("patterns", "held"),
    [
        ("head", ("head",)),
        ("body.2", ("body.2",)),
        ("body", ("body",)),
        ("body.?|head", ("body.0", "body.1", "body.2", "head")),
        ("*", ("body", "head")),
    ],
)
def test_patterns_hold_modules_in_fp32(patterns: str, held: tuple[str, ...]) -> None:
    bound = model()
    assert amp.bind(bound, parse(f"bf16-mixed,fp32={patterns}"), CPU).fp32 == held
    bound(X)
    for name in ("body.0", "body.2", "head"):
        layer = bound.get_submodule(name)
        assert isinstance(layer, Watched)
        inside = any(name == h or name.startswith(f"{h}.") for h in held)
        ((dtype, autocast),) = layer.seen
        assert autocast == (not inside)
        if inside:
            assert dtype == torch.float32


def test_a_held_head_computes_what_it_would_in_fp32() -> None:
    bound, plain = model(), model()
    amp.bind(bound, parse("bf16-mixed,fp32=head,output=compute"), CPU)
    with amp.autocast("cpu", torch.bfloat16):
        features = plain.body(X)
    got = bound(X)
    assert got.dtype == torch.float32
    assert torch.equal(got, plain.head(features.float()))


def test_a_held_module_takes_16_bit_tensors_by_keyword_too() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Watched(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(input=x.bfloat16())
            return output

    bound = Outer()
    amp.bind(bound, parse("bf16-mixed,fp32=inner"), CPU)
    assert bound(X).dtype == torch.float32
    assert bound.inner.seen == [(torch.float32, False)]


def test_a_pattern_without_a_module_is_refused_and_nothing_is_bound() -> None:
    bound = model()
    with pytest.raises(ConfigError, match="'head'"):
        amp.bind(bound, parse("bf16-mixed,fp32=haed"), CPU)
    assert amp.bound_policy(bound) is None
    assert "forward" not in bound.__dict__


def test_remove_restores_the_module_and_its_parts() -> None:
    bound, plain = model(), model()
    before = {name: dict(m.__dict__) for name, m in bound.named_modules()}
    binding = amp.bind(bound, parse("bf16-mixed,fp32=head"), CPU)
    assert binding.module is bound
    bound(X)
    binding.remove()
    assert {name: set(m.__dict__) for name, m in bound.named_modules()} == {name: set(d) for name, d in before.items()}
    assert amp.bound_policy(bound) is None
    assert torch.equal(bound(X), plain(X))


def test_remove_gives_a_forward_of_the_modules_own_back() -> None:
    """Some libraries set `module.forward` on the instance."""
    bound = nn.Linear(4, 2)
    own = bound.forward

    def doubled(x: Tensor) -> Tensor:
        return own(x) * 2

    bound.forward = doubled
    expected = bound(X)
    binding = amp.bind(bound, COMPUTE, CPU)
    assert bound(X).dtype == torch.bfloat16
    torch.testing.assert_close(bound(X).float(), expected, rtol=2**-6, atol=2**-6)
    binding.remove()
    assert bound.forward is doubled


def test_a_forward_borrowed_from_another_module_keeps_its_weights() -> None:
    torch.manual_seed(0)
    lender, borrower = nn.Linear(4, 2), nn.Linear(4, 2)
    borrower.forward = lender.forward
    expected = borrower(X)
    amp.bind(borrower, BF16, CPU)
    torch.testing.assert_close(borrower(X), expected, rtol=2**-6, atol=2**-6)


def test_a_second_binding_is_refused_or_takes_effect_and_can_be_undone() -> None:
    bound = model()
    amp.bind(bound, BF16, CPU)
    second = parse("fp16-mixed,output=compute")
    try:
        binding = amp.bind(bound, second, CPU)
    except ConfigError:
        assert amp.bound_policy(bound) == BF16
        return
    assert amp.bound_policy(bound) == second
    assert bound(X).dtype == torch.float16
    assert bound.head.seen[-1] == (torch.float16, True)
    binding.remove()
    assert amp.bound_policy(bound) == BF16
    assert bound(X).dtype == torch.float32
    assert bound.head.seen[-1] == (torch.bfloat16, True)


def test_a_pickled_module_runs_under_the_policy_that_it_claims() -> None:
    bound = nn.Linear(4, 2)
    amp.bind(bound, COMPUTE, CPU)
    back = pickle.loads(pickle.dumps(bound))  # noqa: S301  made on this line
    claimed = amp.bound_policy(back)
    assert back(X).dtype == (claimed.dtype if claimed else torch.float32)


def test_a_part_that_torch_never_calls_is_refused_or_held() -> None:
    """nn.MultiheadAttention reads out_proj's weights and never calls it, so that a forward of its own has no effect."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    try:
        amp.bind(attention, parse("bf16-mixed,fp32=out_proj,output=compute"), CPU)
    except ConfigError:
        return
    assert attention(x, x, x)[0].dtype == torch.float32


def test_a_copy_uses_its_own_weights_under_the_same_policy() -> None:
    bound = model()
    amp.bind(bound, parse("bf16-mixed,fp32=head"), CPU)
    twin = copy.deepcopy(bound)
    assert torch.equal(twin(X), bound(X))
    before = bound(X)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(X), torch.zeros(3, 2))
    assert torch.equal(bound(X), before)
    assert amp.bound_policy(twin) == amp.bound_policy(bound)
    assert twin.body[0].seen[-1][1]
    assert twin.head.seen[-1] == (torch.float32, False)


def test_signature_name_and_documentation_are_kept() -> None:
    bound = model()
    before = inspect.signature(bound.forward)
    amp.bind(bound, parse("bf16-mixed,fp32=head"), CPU)
    assert inspect.signature(bound.forward) == before
    assert inspect.signature(bound.head.forward) == inspect.signature(Watched(1, 1).forward)
    assert (bound.forward.__name__, bound.forward.__doc__) == ("forward", "Said.")
    assert torch.equal(bound(X, scale=0.0), torch.zeros(3, 2))


def test_state_dict_parameters_and_names_are_unchanged() -> None:
    bound, plain = model(), model()
    amp.bind(bound, parse("bf16-mixed,fp32=head"), CPU)
    assert list(bound.state_dict()) == list(plain.state_dict())
    for ours, theirs in zip(bound.state_dict().values(), plain.state_dict().values(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert [n for n, _ in bound.named_modules()] == [n for n, _ in plain.named_modules()]
    plain.load_state_dict(bound.state_dict())


def test_forward_hooks_still_run() -> None:
    bound, seen = model(), list[str]()
    bound.register_forward_pre_hook(lambda *_: seen.append("before"))
    bound.register_forward_hook(lambda _m, _i, output: seen.append(str(output.dtype)))
    amp.bind(bound, BF16, CPU)
    bound(X)
    assert seen == ["before", "torch.float32"]


HALF = torch.ones(2, dtype=torch.bfloat16)
LONG = torch.ones(2, dtype=torch.int64)


@dataclass
class Plain:
    logits: Tensor


def model_output() -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.CausalLMOutputWithPast(loss=HALF[0], logits=HALF, hidden_states=(HALF, LONG))


CONTAINERS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: HALF,
    "fp16": lambda: HALF.half(),
    "tuple": lambda: (HALF, LONG, None, "x"),
    "list": lambda: [HALF, [HALF]],
    "dict": lambda: {"a": HALF, "b": {"c": HALF}},
    "dict by number": lambda: {0: HALF, 1: LONG},
    "ordered dict": lambda: OrderedDict(a=HALF),
    "ordered dict by number": lambda: OrderedDict({0: HALF}),
    "user dict": lambda: UserDict(a=HALF),
    "namedtuple": lambda: Pair(HALF, {"k": HALF}),
    "dataclass": lambda: Plain(HALF),
    "torch's return type": lambda: torch.max(HALF.reshape(1, 2), dim=1),
    "model output": model_output,
}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | UserDict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    if isinstance(value, list | tuple):
        return [leaf for v in value for leaf in leaves(v)]
    if isinstance(value, Plain):
        return [value.logits]
    return [value]


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_containers_keep_their_type_and_16_bit_tensors_become_fp32(name: str) -> None:
    class Gives(nn.Module):
        def forward(self) -> Any:
            return CONTAINERS[name]()

    bound = Gives()
    amp.bind(bound, BF16, CPU)
    given, got = CONTAINERS[name](), bound()
    assert type(got) is type(given)
    assert len(leaves(got)) == len(leaves(given))
    for before, after in zip(leaves(given), leaves(got), strict=True):
        if isinstance(before, Tensor):
            assert after.dtype == (torch.float32 if before.is_floating_point() else before.dtype)
            assert torch.equal(after, before.to(after.dtype))
        else:
            assert after is before
    if isinstance(given, dict):
        assert list(got) == list(given)


def test_a_batch_encoding_reaches_a_held_module() -> None:
    """transformers' BatchEncoding is a mapping that is not made from keywords."""
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": LONG, "pixels": HALF})
    got = amp.upcast(encoding)
    assert got["pixels"].dtype == torch.float32
    assert got["input_ids"] is LONG


@pytest.mark.parametrize("value", [None, 3, "text", Plain(torch.ones(2)), torch.ones(2), torch.ones(2, dtype=torch.float64), LONG], ids=repr)
def test_what_holds_no_16_bit_tensor_in_a_container_is_returned_as_it_is(value: Any) -> None:
    assert amp.upcast(value) is value


def test_upcast_is_part_of_the_graph() -> None:
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    amp.upcast({"a": weight})["a"].sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_a_policy_without_products_changes_no_output() -> None:
    bound, plain = model(), model()
    amp.bind(bound, PRESETS["fp32"], CPU)
    assert amp.bound_policy(bound) == PRESETS["fp32"]
    assert torch.equal(bound(X), plain(X))
