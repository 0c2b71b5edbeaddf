"""Cross entropy of many logits: the meaning of torch's, with a loss and gradients within its error, and nothing kept but the logits."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp import loss
from halfstep.amp.mode import Unread
from halfstep.policy import parse

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 logits stand for the million from which on the loss is ours."""
    monkeypatch.setattr(loss, "WHOLE", 100)


def logits(dtype: torch.dtype, rows: int = 11, classes: int = 29) -> Tensor:
    return (4 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()


TARGETS = torch.randint(0, 29, (11,), generator=torch.Generator().manual_seed(1))
SOME = torch.where(torch.arange(11) % 3 == 0, -100, TARGETS)


def both(x: Tensor, target: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor], str]:
    def ways(value: Tensor) -> list[Tensor]:
        above = torch.arange(1.0, value.numel() + 1).view(value.shape)
        return [value.detach(), *torch.autograd.grad(value, x, above)]

    with amp.autocast("cpu", torch.bfloat16):
        ours = F.cross_entropy(x, target, **options)
    assert ours.grad_fn is not None
    return ways(ours), ways(F.cross_entropy(x.float(), target, **options)), ours.grad_fn.name()


def near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        # a gradient that lies between two 16-bit numbers may become either
        torch.testing.assert_close(a.float(), b.float(), rtol={torch.float32: 3e-6}.get(a.dtype, 2**-7), atol=2e-7)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("target", [TARGETS, SOME], ids=["all", "some ignored"])
def test_loss_and_gradients_are_those_of_torch(
    dtype: torch.dtype, reduction: str, target: Tensor, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setenv("HALFSTEP_KERNELS", "off")
    ours, theirs, name = both(logits(dtype), target, reduction=reduction)
    assert name == "_CrossEntropyBackward"
    assert [t.dtype for t in ours] == [torch.float32, dtype]
    near(ours, theirs)


def test_without_compiled_code_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = both(logits(torch.float32), SOME)
    monkeypatch.setenv("HALFSTEP_KERNELS", "off")
    plain, _, _ = both(logits(torch.float32), SOME)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_all_rows_ignored_and_another_number_for_it() -> None:
    ours, theirs, _ = both(logits(torch.float32), torch.full((11,), -100))
    assert ours[0].isnan()
    assert theirs[0].isnan()
    assert not ours[1].any()
    assert not theirs[1].any()
    near(*both(logits(torch.float32), torch.where(SOME == -100, 5, SOME), ignore_index=5)[:2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 3), (1, 3), (slice(2, 3), slice(None))], ids=["row without a class", "one", "whole row"])
def test_numbers_that_are_none_show_where_they_show_in_torch(value: float, where: Any) -> None:
    x = logits(torch.float32).detach()
    x[where] = value
    for reduction in ("none", "mean"):
        ours, theirs, _ = both(x.clone().requires_grad_(), SOME, reduction=reduction)
        assert all(torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [{"weight": torch.arange(29.0)}, {"label_smoothing": 0.1}, {"size_average": False}],
    ids=["weights of classes", "smoothing", "an old name"],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning")
def test_other_forms_are_left_to_torch(options: dict[str, Any]) -> None:
    ours, theirs, name = both(logits(torch.bfloat16), TARGETS, **options)
    assert name != "_CrossEntropyBackward"
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_targets_that_are_probabilities_or_have_more_dimensions_are_left_to_torch() -> None:
    x = logits(torch.float32)
    for input_, target in ((x, torch.full((11, 29), 1 / 29)), (x.view(1, 11, 29).mT, TARGETS[None])):
        with amp.autocast("cpu", torch.bfloat16):
            value = F.cross_entropy(input_, target)
        assert value.grad_fn is not None
        assert value.grad_fn.name() != "_CrossEntropyBackward"
        assert torch.equal(value, F.cross_entropy(input_, target))


def test_a_class_that_is_not_there_is_told_as_torch_tells_it() -> None:
    with amp.autocast("cpu", torch.bfloat16), pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(logits(torch.float32), TARGETS + 20)


def test_the_logits_alone_are_kept() -> None:
    saved: list[Tensor] = []
    x = logits(torch.bfloat16)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),  # type: ignore[func-returns-value]
        amp.autocast("cpu", torch.bfloat16),
    ):
        F.cross_entropy(x, TARGETS)
    assert [t.numel() for t in saved if t.numel() > 11] == [x.numel()]
    assert saved[0].data_ptr() == x.data_ptr()


def test_second_derivatives_are_those_of_torch() -> None:
    def second(inside: bool) -> Tensor:
        x = logits(torch.float32)
        with amp.autocast("cpu", torch.bfloat16, enabled=inside):
            value = F.cross_entropy(x, SOME)
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    torch.testing.assert_close(second(True), second(False))
    assert second(True).any()


class Head(nn.Module):
    """Logits, and the loss of transformers' causal models: of an fp32 copy of them."""

    def __init__(
        self, change: Callable[[Tensor], Any] = lambda wide: None, view: Callable[[Tensor], Tensor] = lambda wide: wide.view(-1, 29)
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(8, 29)
        self.change, self.view = change, view

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        wide = self.layer(x).float()
        self.change(wide)
        return F.cross_entropy(self.view(wide), target)


def trained(head: Head, alone: bool) -> tuple[list[Tensor], list[torch.dtype]]:
    """The loss and all gradients, and the formats of the logits that are kept for the backward pass."""
    amp.bind(head, parse("bf16-mixed"), torch.device("cpu"))
    x, seen = torch.randn(1, 11, 8, generator=torch.Generator().manual_seed(2)).requires_grad_(), []
    compute = loss._loss

    def noted(*given: Any) -> Any:
        found = compute(*given)
        seen.append(found[1].dtype)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_loss", noted)
        with Unread() if alone else nullcontext():
            found = head(x, TARGETS)
    found.backward()
    return [found.detach(), *[t.grad for t in (x, *head.parameters()) if t.grad is not None]], seen


def test_where_the_loss_alone_is_used_the_16_bit_logits_are_kept() -> None:
    (ours, kept), (usual, before) = trained(Head(), True), trained(Head(), False)
    assert kept == [torch.bfloat16]
    assert before == [torch.float32]
    assert len(ours) == 4  # the loss, the input, weight and bias
    assert all(torch.equal(a, b) for a, b in zip(ours, usual, strict=True))


class Reversed(torch.autograd.Function):
    """Gradient reversal, in its usual form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def _cut(wide: Tensor) -> Tensor:
    with torch.no_grad():
        return wide.view(-1, 29)


@pytest.mark.parametrize(
    ("change", "view", "low"),
    [
        (lambda wide: wide.retain_grad(), lambda wide: wide.view(-1, 29), True),
        (lambda wide: wide.register_hook(lambda g: g * 2), lambda wide: wide.view(-1, 29), True),
        (lambda wide: wide.grad_fn.register_prehook(lambda g: (g[0] * 2,)), lambda wide: wide.view(-1, 29), True),
        (lambda wide: wide.mul_(2.0), lambda wide: wide.view(-1, 29), False),
        (lambda wide: wide.data[0, 10].fill_(-1.0), lambda wide: wide.view(-1, 29), False),
        (Tensor.size, lambda wide: (wide * 2).view(-1, 29), False),
        (Tensor.size, lambda wide: wide.detach().requires_grad_().view(-1, 29), False),
        (Tensor.size, lambda wide: _cut(wide).requires_grad_(), False),
        (Tensor.size, lambda wide: Reversed.apply(wide.view(-1, 29)), False),
        (Tensor.size, lambda wide: Reversed.apply(wide).view(-1, 29), False),
        (Tensor.size, lambda wide: torch._neg_view(wide.view(-1, 29)), False),
    ],
    ids=[
        "kept",
        "hooked",
        "node hooked",
        "changed",
        "its data changed",
        "another",
        "detached",
        "viewed without a graph",
        "reversed",
        "reversed before",
        "negative",
    ],
)
def test_what_is_done_to_the_copy_and_its_gradient_counts(change: Any, view: Any, low: bool) -> None:
    (ours, kept), (usual, _) = trained(Head(change, view), True), trained(Head(change, view), False)
    assert kept == [torch.bfloat16 if low else torch.float32]
    assert len(ours) == len(usual)
    assert all(torch.equal(a, b) for a, b in zip(ours, usual, strict=True))


def test_the_gradient_of_the_copy_can_be_asked_for_and_hooked_after_the_loss() -> None:
    class Penalty(Head):
        """Takes the gradient of its logits in its forward pass."""

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            wide = self.layer(x).float()
            value = F.cross_entropy(wide.view(-1, 29), target)
            wide.register_hook(lambda g: g * 2)
            (slope,) = torch.autograd.grad(value, wide, retain_graph=True)
            return value + slope.detach().pow(2).sum()

    (ours, kept), (usual, _) = trained(Penalty(), True), trained(Penalty(), False)
    assert kept == [torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(ours, usual, strict=True))


@pytest.mark.parametrize("ignored", [torch.tensor(-100), 3.0, True, None], ids=["tensor", "float", "bool", "None"])
def test_an_ignore_index_of_another_type_is_torchs_to_take_or_refuse(ignored: Any) -> None:
    def outcome(inside: bool) -> Any:
        with amp.autocast("cpu", torch.bfloat16, enabled=inside):
            try:
                return F.cross_entropy(logits(torch.float32), TARGETS, ignore_index=ignored).item()
            except (TypeError, RuntimeError) as error:
                return type(error)

    assert outcome(True) == outcome(False)
