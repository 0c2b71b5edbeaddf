"""Cross entropy in pieces has the bits of torch's, and keeps nothing of the size of the logits but themselves."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import amp
from halfstep.amp import loss

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 logits stand for the 8 million from which on the loss is cut up."""
    monkeypatch.setattr(loss, "WHOLE", 100)
    monkeypatch.setattr(loss, "PIECE", 130)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("target", [TARGETS, SOME], ids=["all", "some ignored"])
def test_the_bits_are_those_of_torch(dtype: torch.dtype, reduction: str, target: Tensor) -> None:
    ours, theirs, name = both(logits(dtype), target, reduction=reduction)
    assert name == "_CrossEntropyBackward"
    assert [t.dtype for t in ours] == [torch.float32, dtype]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_all_rows_ignored_and_another_number_for_it() -> None:
    ours, theirs, _ = both(logits(torch.float32), torch.full((11,), -100))
    assert ours[0].isnan()
    assert theirs[0].isnan()
    ours, theirs, _ = both(logits(torch.float32), torch.where(SOME == -100, 5, SOME), ignore_index=5)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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
