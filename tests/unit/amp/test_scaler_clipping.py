"""Clipping through the scaler against torch's own clipping of unscaled gradients."""

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from halfstep.amp import GradScaler

FACTORS = (3.0, 0.5, 8.0)


class Side:
    """Three weights, one of them in an optimizer of its own, with gradients that are the same for the same seed."""

    def __init__(self, scaler: GradScaler | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = [nn.Parameter(torch.randn(n, generator=generator)) for n in (5, 3, 4)]
        self.slopes = [torch.randn(n, generator=generator) * f for n, f in zip((5, 3, 4), FACTORS, strict=True)]
        self.first, self.second = SGD(self.weights[:2], lr=1.0), SGD(self.weights[2:], lr=1.0)
        self.scaler = scaler
        if scaler is not None:
            scaler.watch(self.first)
            scaler.watch(self.second)
        loss = sum((w * s).sum() for w, s in zip(self.weights, self.slopes, strict=True))
        assert isinstance(loss, Tensor)
        (loss if scaler is None else scaler.scale(loss)).backward()

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self.scaler is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return self.scaler.clip_grad_norm_(parameters, max_norm, norm_type)

    def gradients(self) -> list[Tensor]:
        return [w.grad for w in self.weights if w.grad is not None]


def close(ours: Side, theirs: Side) -> None:
    torch.testing.assert_close(ours.gradients(), theirs.gradients(), rtol=1e-6, atol=0.0)


def scalers() -> list[GradScaler]:
    return [GradScaler(), GradScaler(init_scale=1.0), GradScaler(enabled=False)]


CHOICES: dict[str, Callable[[Side], list[Tensor]]] = {
    "one whole optimizer": lambda s: s.weights[:2],
    "both optimizers": lambda s: s.weights,
    "a part of one optimizer": lambda s: s.weights[:1],
    "parts of two optimizers": lambda s: s.weights[1:],
    "as many as one optimizer has": lambda s: [s.weights[0], s.weights[2]],
}


@pytest.mark.parametrize("choice", list(CHOICES))
@pytest.mark.parametrize("max_norm", [0.1, 5.0, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_is_torchs_on_unscaled_gradients(choice: str, max_norm: float, norm_type: float) -> None:
    for scaler in scalers():
        ours, theirs = Side(scaler), Side()
        total = ours.clip(iter(CHOICES[choice](ours)), max_norm, norm_type)
        expected = theirs.clip(CHOICES[choice](theirs), max_norm, norm_type)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0.0)
        scaler.clip_grad_norm_(ours.weights, math.inf)  # unscales those that were not chosen
        close(ours, theirs)


def test_clipping_of_weights_that_no_optimizer_has_is_torchs() -> None:
    scaler = GradScaler(enabled=False)
    ours, theirs = Side(scaler), Side()
    ours.second.param_groups.clear()
    total = ours.clip([ours.weights[0], ours.weights[2]], 1.0)
    torch.testing.assert_close(total, theirs.clip([theirs.weights[0], theirs.weights[2]], 1.0), rtol=1e-6, atol=0.0)
    close(ours, theirs)


@pytest.mark.parametrize("way", ["scaler clips", "unscale, scaler clips", "unscale, torch clips"])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_three_ways_to_clip_agree(way: str, max_norm: float) -> None:
    for scaler in scalers():
        ours, theirs = Side(scaler), Side()
        if way.startswith("unscale"):
            scaler.unscale_(ours.first)
        clip = torch.nn.utils.clip_grad_norm_ if way.endswith("torch clips") else scaler.clip_grad_norm_
        total = clip(ours.weights[:2], max_norm)
        expected = theirs.clip(theirs.weights[:2], max_norm)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0.0)
        result = scaler.step(ours.first)
        theirs.first.step()
        assert result.applied
        assert result.grad_norm == pytest.approx(float(expected), rel=1e-6)
        assert result.clipped == (max_norm < 1.0)
        torch.testing.assert_close(ours.weights[:2], theirs.weights[:2], rtol=1e-6, atol=1e-7)


def test_clipping_twice_is_torchs_clipping_twice() -> None:
    for scaler in scalers():
        ours, theirs = Side(scaler), Side()
        for max_norm in (2.0, 0.5, 1.0):
            total = ours.clip(ours.weights[:2], max_norm)
            torch.testing.assert_close(total, theirs.clip(theirs.weights[:2], max_norm), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(ours.gradients()[:2], theirs.gradients()[:2], rtol=1e-6, atol=0.0)
        assert scaler.step(ours.first).clipped


@pytest.mark.parametrize("edit", [lambda g: g.mul_(0.01), lambda g: g.mul_(50.0), lambda g: g.clamp_(-0.1, 0.1)], ids=["down", "up", "clamp"])
def test_clipping_after_an_edit_measures_what_is_there(edit: Callable[[Tensor], Tensor]) -> None:
    for scaler in scalers():
        ours, theirs = Side(scaler), Side()
        scaler.unscale_(ours.first)
        for side in (ours, theirs):
            for gradient in side.gradients()[:2]:
                edit(gradient)
        total = ours.clip(ours.weights[:2], 1.0)
        torch.testing.assert_close(total, theirs.clip(theirs.weights[:2], 1.0), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(ours.gradients()[:2], theirs.gradients()[:2], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_gradients_are_left_as_they_are_and_the_norm_says_so(bad: float) -> None:
    for scaler in scalers():
        side = Side(scaler)
        with scaler.edits():
            side.gradients()[1][0] = bad
        before = [g.clone() for g in side.gradients()]
        assert not math.isfinite(float(side.clip(side.weights, 1.0)))
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(side.gradients()[:2], before, strict=False))
        assert not scaler.step(side.first)
        assert scaler.step(side.second)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loop_that_skips_a_bad_norm_goes_on_with_the_next_batch(bad: float) -> None:
    """`if not isfinite(norm): zero_grad(); continue` must not end in skipping for ever."""
    for scaler in scalers():
        side = Side(scaler)
        with scaler.edits():
            side.gradients()[0][0] = bad
        assert not math.isfinite(float(side.clip(side.weights[:2], 1.0)))
        side.first.zero_grad()
        side.second.zero_grad()
        scaler.scale(side.weights[0].sum()).backward()
        assert float(side.clip(side.weights[:2], 1.0)) == pytest.approx(math.sqrt(5.0))
        result = scaler.step(side.first)
        assert result.applied
        assert result.grad_norm == pytest.approx(math.sqrt(5.0))


def test_a_loop_that_skips_a_large_norm_goes_on_with_the_next_batch() -> None:
    for scaler in scalers():
        side = Side(scaler)
        side.clip(side.weights[:2], 1.0)
        side.first.zero_grad()
        scaler.scale(side.weights[0].sum()).backward()
        assert float(side.clip(side.weights[:2], 1.0)) == pytest.approx(math.sqrt(5.0))
        assert torch.allclose(side.gradients()[0], torch.full((5,), 1 / math.sqrt(5.0)))


def test_a_loop_without_scale_that_skips_a_bad_norm_goes_on() -> None:
    """With scaling off, `loss.backward()` needs no scale() before it."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scaler = SGD([weight], lr=1.0), GradScaler(enabled=False)
    scaler.watch(optimizer)
    (weight * torch.tensor([3.0, math.inf])).sum().backward()
    assert not math.isfinite(float(scaler.clip_grad_norm_([weight], 1.0)))
    optimizer.zero_grad()
    (weight * torch.tensor([3.0, 4.0])).sum().backward()
    assert float(scaler.clip_grad_norm_([weight], 1.0)) == 5.0
    assert scaler.step(optimizer)


@pytest.mark.parametrize("choice", ["one whole optimizer", "both optimizers", "a part of one optimizer"])
def test_large_gradients_that_may_be_used_are_clipped_although_their_squares_overflow(choice: str) -> None:
    scaler = GradScaler(enabled=False)
    side = Side(scaler)
    chosen = CHOICES[choice](side)
    big = nn.Parameter(torch.zeros(400))
    side.first.add_param_group({"params": [big]})
    big.grad = torch.full((400,), 2.0**60)
    total = side.clip([*chosen, big], 1.0)
    assert float(total) == pytest.approx(20 * 2.0**60, rel=1e-6)
    assert float(torch.linalg.vector_norm(big.grad)) == pytest.approx(1.0, rel=1e-5)
    assert scaler.step(side.first).clipped


def test_clipping_before_the_optimizer_is_known_is_right() -> None:
    """In the first iteration no optimizer has been seen: clipping scaled gradients would make the step 65536 times too small."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scaler = SGD([weight], lr=1.0), GradScaler()
    scaler.scale((weight * torch.tensor([30.0, 40.0])).sum()).backward()
    total = scaler.clip_grad_norm_([weight], 5.0)
    assert float(total) == 50.0
    assert scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-3.0, -4.0]))


def test_clipping_nothing_gives_zero() -> None:
    weight = nn.Parameter(torch.ones(2))
    for scaler in scalers():
        assert float(scaler.clip_grad_norm_([weight], 1.0)) == 0.0
        assert float(scaler.clip_grad_norm_([], 1.0)) == 0.0
        assert float(scaler.clip_grad_norm_(weight, 1.0)) == 0.0


def test_the_next_step_does_not_remember_the_clip() -> None:
    for scaler in scalers():
        side = Side(scaler)
        side.clip(side.weights[:2], 0.1)
        assert scaler.step(side.first).clipped
        scaler.update()
        side.first.zero_grad()
        scaler.scale(side.weights[0].sum()).backward()
        result = scaler.step(side.first)
        assert not result.clipped
        assert result.grad_norm == pytest.approx(math.sqrt(5.0))


def embedding(scaler: GradScaler, sparse: bool) -> tuple[nn.Embedding, Optimizer]:
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=sparse)
    optimizer = SGD(table.parameters(), lr=0.5)
    scaler.watch(optimizer)
    return table, optimizer


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_sparse_gradients_give_the_weights_of_dense_ones(max_norm: float | None) -> None:
    """Rows 3 and 7 are looked up more than once, so the sparse gradient is not coalesced."""
    rows = torch.tensor([3, 7, 3, 1, 7, 3])
    ends = []
    for sparse, scaler in ((True, GradScaler()), (False, GradScaler()), (True, GradScaler(enabled=False))):
        table, optimizer = embedding(scaler, sparse)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((table(rows) ** 2).sum()).backward()
            if max_norm is not None:
                total = float(scaler.clip_grad_norm_(table.parameters(), max_norm))
            result = scaler.step(optimizer)
            scaler.update()
            assert result.applied
            assert max_norm is None or result.grad_norm == pytest.approx(total)
            assert result.clipped == (max_norm == 0.5)
        ends.append(table.weight.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("when", ["before unscale", "after unscale"])
def test_a_nan_in_a_sparse_gradient_is_caught(when: str) -> None:
    scaler = GradScaler()
    table, optimizer = embedding(scaler, sparse=True)
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([3, 3, 1])).sum()).backward()
    assert table.weight.grad is not None
    if when == "after unscale":
        scaler.unscale_(optimizer)
    with scaler.edits():
        table.weight.grad._values()[1, 2] = math.nan
    assert scaler.step(optimizer).reason == "overflow"
    assert torch.equal(table.weight.detach(), before)
