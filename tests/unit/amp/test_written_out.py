"""Modules that are written out in small operations run in fewer passes, with the bits of their own code."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.amp import written_out
from halfstep.amp.casting import bind
from halfstep.policy import parse

pytest.importorskip("numba")
activations = pytest.importorskip("transformers.activations")


class Block(nn.Module):
    """A linear layer and the GELU of GPT-2."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)
        self.act = activations.NewGELUActivation() if act is None else act
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return checkpoint(lambda t: self.act(self.layer(t)), x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.act(self.layer(x))  # type: ignore[no-any-return]


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The formats of what the fewer passes were given, in a process that has proven nothing yet."""
    seen: list[torch.dtype] = []
    apply = written_out.applied
    monkeypatch.setattr(written_out, "applied", lambda function, x, *others: (seen.append(x.dtype), apply(function, x, *others))[1])
    monkeypatch.setattr(written_out, "_proven", {})
    return seen


def made(precision: str, act: nn.Module | None = None) -> Block:
    torch.manual_seed(0)
    block = Block(act)
    bind(block, parse(precision), torch.device("cpu"))
    return block


X = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) * 4


def results(block: nn.Module, x: Tensor = X) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = block(leaf)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), [leaf, *block.parameters()])]


def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_out, "_takes", lambda x: False)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16), ("bf16-lean", torch.bfloat16)])
def test_bits_of_result_and_gradients(precision: str, dtype: torch.dtype, applied: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    block = made(precision)
    results(block)  # a lean model decides on its weights in its first call
    applied.clear()
    ours = results(block)
    assert applied == [dtype]
    own_code(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(ours, results(block), strict=True))
    assert applied == [dtype]


def test_every_number_is_tried_and_a_wrong_bit_is_noticed(applied: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = written_out.gelu_kernels()
    assert kernels is not None
    forward = kernels.forward

    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        y, t = forward(x)
        y[x == 1.0078125] *= 1 + 2.0**-22  # one number of 65,536
        return y, t

    monkeypatch.setattr(kernels, "forward", wrong)
    results(made("bf16-mixed"))
    assert applied == [torch.bfloat16]  # the trial alone
    assert list(written_out._proven.values()) == [False]


def test_where_the_module_runs_itself(applied: list[torch.dtype]) -> None:
    class Other(activations.NewGELUActivation):  # type: ignore[misc]
        """Another function of the same name and place would be it; this one is another."""

        def forward(self, input: Tensor) -> Tensor:
            return input * 2

    results(made("bf16-mixed", Other()))
    results(made("fp32"))
    results(made("bf16-mixed"), X[:2])  # few numbers
    block = made("bf16-mixed")
    with torch.no_grad():
        block(X)
    assert applied == []
    with amp.autocast("cpu", torch.bfloat16):
        Block()(X)  # not bound
    assert applied == []


def test_with_torchs_own_list_of_ops_the_bits_are_others_and_the_module_runs(applied: list[torch.dtype]) -> None:
    results(made("bf16-mixed,ops=device"))
    assert applied == [torch.bfloat16]  # the trial
    assert list(written_out._proven.values()) == [False]


def test_a_forward_pass_that_is_computed_again_has_its_precision(applied: list[torch.dtype]) -> None:
    block = made("bf16-mixed")
    plain = results(block)
    applied.clear()
    block.again = True
    assert all(torch.equal(a, b) for a, b in zip(plain, results(block), strict=True))
    assert applied == []  # what is kept is made again under conditions that only operations of torch carry


def test_second_derivatives(applied: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    block = made("bf16-mixed")

    def second() -> list[Tensor]:
        leaf = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(block(leaf).sin().sum(), leaf, create_graph=True)
        return [first.detach(), torch.autograd.grad(first.pow(2).sum(), leaf)[0]]

    ours = second()
    assert torch.bfloat16 in applied
    own_code(monkeypatch)
    for a, b in zip(ours, second(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_copies_and_pickles_go_on(applied: list[torch.dtype]) -> None:
    block = made("bf16-mixed")
    results(block)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):  # noqa: S301
        results(twin)
    assert torch.bfloat16 in applied


def test_somebody_who_looks_on_sees_the_operations(applied: list[torch.dtype]) -> None:
    from torch.overrides import TorchFunctionMode

    names: list[str] = []

    class Watch(TorchFunctionMode):
        """Notes names."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    block = made("bf16-mixed")
    with Watch():
        results(block)
    assert "tanh" in names
    assert applied == []


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("proven", [True, False], ids=["proven before", "not yet"])
def test_another_default_dtype_changes_nothing(applied: list[torch.dtype], default: torch.dtype, proven: bool) -> None:
    block, expected = made("bf16-mixed"), results(made("bf16-mixed"))
    if not proven:
        written_out._proven.clear()
    torch.set_default_dtype(default)
    try:
        found = results(block)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_operands_and_gradients_that_are_stored_with_the_other_sign(applied: list[torch.dtype]) -> None:
    block = made("bf16-mixed")
    leaf = X.clone().requires_grad_()
    y = block(leaf)
    above = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    first = torch.autograd.grad(y, leaf, -above, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, leaf, torch._neg_view(above))[0])
