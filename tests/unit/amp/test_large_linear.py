"""A linear layer with a large fp32 weight and the CPU's own products: torch's bits, and a gradient that an embedding adds its rows to."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.amp import recycled

ROWS, WIDTH = 300, 24


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """7,200 elements stand for the 4 million from which on this is done."""
    monkeypatch.setattr(recycled, "LEAST", 1000)


def block(ours: bool) -> torch.autocast | amp.autocast:
    return amp.autocast("cpu", torch.bfloat16, products="native") if ours else torch.autocast("cpu", torch.bfloat16)


def run(ours: bool, tied: bool, bias: bool, passes: int = 1, again: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(ROWS, WIDTH))
    weight = table if tied else nn.Parameter(torch.randn(ROWS, WIDTH))
    added = nn.Parameter(torch.randn(ROWS)) if bias else None
    leaves = [table, weight, *([added] if added is not None else [])]
    ids, found = torch.randint(0, ROWS, (4, 16)), []
    for _ in range(3):
        for leaf in leaves:
            leaf.grad = None
        for _ in range(passes):
            with block(ours):
                hidden = F.embedding(ids, table).view(64, WIDTH)
                logits = checkpoint(F.linear, hidden, weight, added, use_reentrant=False) if again else F.linear(hidden, weight, added)
                assert logits.dtype == torch.bfloat16
                loss = logits.float().pow(2).mean()
            loss.backward()
        found += [loss.detach(), *[leaf.grad.clone() for leaf in leaves if leaf.grad is not None]]
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize(("passes", "again"), [(1, False), (2, False), (1, True)], ids=["one pass", "two", "computed again"])
def test_bits_are_torchs(tied: bool, bias: bool, passes: int, again: bool) -> None:
    ours, torchs = run(True, tied, bias, passes, again), run(False, tied, bias, passes, again)
    assert len(ours) == (9 if not bias else 12)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def test_rows_are_added_to_the_gradient_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    zeroed = []
    zero = Tensor.zero_
    monkeypatch.setattr(Tensor, "zero_", lambda t: (zeroed.append(tuple(t.shape)), zero(t))[1])
    run(True, tied=True, bias=False)
    assert (ROWS, WIDTH) not in zeroed
    run(True, tied=False, bias=False)
    assert (ROWS, WIDTH) in zeroed


def test_a_weight_that_is_used_twice_has_its_gradients_summed_in_fp32() -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(ROWS, WIDTH)), torch.randn(8, WIDTH)
    weights, slopes = weight.detach().bfloat16(), []
    with block(True):
        total = sum(F.linear(x * factor, weight).float().sum() for factor in (1.0, 1e-3))
    total.backward()
    for factor in (1.0, 1e-3):
        low = weights.clone().requires_grad_()
        F.linear((x * factor).bfloat16(), low).float().sum().backward()
        assert low.grad is not None
        slopes.append(low.grad.float())
    assert weight.grad is not None
    assert torch.equal(weight.grad, slopes[0] + slopes[1])


def test_second_derivatives_and_many_gradients_at_once() -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(ROWS, WIDTH)), torch.randn(8, WIDTH)

    def ways(ours: bool) -> list[Tensor]:
        with block(ours):
            y = F.linear(x, weight)
        (first,) = torch.autograd.grad(y.float().pow(2).mean(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), weight)
        with block(ours):
            y = F.linear(x, weight)
        many = torch.autograd.grad(y, weight, torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)[0]
        return [first.detach(), second, many]

    assert all(torch.equal(a, b) for a, b in zip(ways(True), ways(False), strict=True))


def test_gradients_that_somebody_keeps_stay_as_they_were() -> None:
    torch.manual_seed(0)
    table, kept = nn.Parameter(torch.randn(ROWS, WIDTH)), []
    table.register_hook(lambda g: kept.append(g.clone()))
    for _ in range(2):
        table.grad = None
        with block(True):
            hidden = F.embedding(torch.arange(64), table)
            F.linear(hidden, table).float().pow(2).mean().backward()
        kept.append(table.grad)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[3])
    assert kept[1].data_ptr() != kept[3].data_ptr()


def test_a_gradient_in_shared_memory_is_not_written_over() -> None:
    table = nn.Parameter(torch.randn(ROWS, WIDTH))

    def step(factor: float) -> None:
        table.grad = None
        with block(True):
            F.linear(torch.ones(8, WIDTH) * factor, table).float().pow(2).mean().backward()

    step(1.0)
    assert table.grad is not None
    shared = table.grad.share_memory_()
    before, place = shared.clone(), shared.data_ptr()
    del shared  # another process may still have its pages
    step(2.0)
    assert table.grad.data_ptr() != place or torch.equal(table.grad, before)


def test_a_weight_that_takes_16_bit_gradients_has_them() -> None:
    def gradient(ours: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(ROWS, WIDTH))
        table.grad_dtype = torch.bfloat16
        with block(ours):
            hidden = F.embedding(torch.arange(64), table)
            F.linear(hidden, table).float().pow(2).mean().backward()
        assert table.grad is not None
        return table.grad

    assert gradient(True).dtype == torch.bfloat16
    torch.testing.assert_close(gradient(True), gradient(False), rtol=2**-6, atol=1e-6)
