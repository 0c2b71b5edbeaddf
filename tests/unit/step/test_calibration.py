"""The loss scale is found inside the first backward pass, and nobody but the scale knows of the probes."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

from halfstep import StepResult
from halfstep.amp import GradScaler, autocast
from halfstep.amp.statistics import count_once

LARGEST_FP16 = 65504.0


class Weight:
    """One weight whose gradient is `slope`, through an fp16 activation whose gradient is `amplified` times as large."""

    def __init__(self, slope: float = 1.0, amplified: float = 1.0, **options: Any) -> None:
        self.p = nn.Parameter(torch.ones(4))
        self.slope, self.amplified = slope, amplified
        self.optimizer = SGD([self.p], lr=0.0)
        self.scaler = GradScaler(**options)

    def loss(self, factor: float = 1.0) -> Tensor:
        return ((self.p / self.amplified).half().float() * self.slope * self.amplified).sum() * factor

    def step(self, factor: float = 1.0) -> StepResult:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(factor)).backward()
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        return result


@pytest.mark.parametrize("amplified", [1.0, 2.0**8])
def test_from_every_starting_scale_no_step_is_lost_and_head_room_is_left(amplified: float) -> None:
    """The limit is in the activations: `amplified` times the scale must be 16 times below the largest fp16 number."""
    for exponent in range(33):
        weight = Weight(amplified=amplified, init_scale=2.0**exponent)
        results = [weight.step() for _ in range(3)]
        assert all(results), exponent
        assert results[0].scale * amplified * 8 <= LARGEST_FP16, exponent
        assert math.frexp(results[0].scale)[0] == 0.5
        assert torch.equal(weight.p.grad, torch.ones(4))


@pytest.mark.parametrize(("floor", "ceiling"), [(1.0, 4.0), (2.0**6, 2.0**8), (2.0**14, 2.0**14), (2.0**9, 2.0**32)])
def test_floor_and_ceiling_hold_although_other_scales_would_be_better(floor: float, ceiling: float) -> None:
    for start in (floor, ceiling):
        weight = Weight(1e-7, init_scale=start, floor=floor, ceiling=ceiling)
        for _ in range(12):
            weight.step()
            assert floor <= weight.scaler.get_scale() <= ceiling


def test_where_no_head_room_is_left_above_the_floor_the_floor_is_used() -> None:
    result = Weight(init_scale=2.0**20, floor=2.0**14).step()
    assert (result.applied, result.scale) == (True, 2.0**14)


def test_gradients_that_underflow_at_the_start_raise_the_scale_at_once() -> None:
    result = Weight(2.0**-20, init_scale=1.0).step()
    assert result.scale * 2.0**-20 >= 2.0**-14, "normal fp16 numbers"


@pytest.mark.parametrize("nothing", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("count", [1, 8, 20])
def test_losses_that_tell_nothing_put_calibration_off_and_cost_no_later_step(nothing: float, count: int) -> None:
    weight = Weight(init_scale=2.0**32)
    for _ in range(count):
        weight.step(nothing)
    results = [weight.step() for _ in range(3)]
    assert all(results), [r.scale for r in results]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("start", [1.0, 2.0**16, 2.0**32])
def test_losses_of_every_format_calibrate(dtype: torch.dtype, start: float) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer, scaler = SGD([p], lr=1.0), GradScaler(init_scale=start)
    scaler.scale((p * p).sum().to(dtype)).backward()
    assert scaler.step(optimizer)
    assert torch.equal(p.detach(), -torch.ones(4))


Built = tuple[nn.Module, list[Optimizer], Callable[[], Tensor]]


def equal_to_torch(build: Callable[[], Built], watch: bool = True, **options: Any) -> float:
    """A calibrated first step is, bit for bit, the one that torch's own scaler takes at that scale; so are random state and buffers."""
    torch.manual_seed(0)
    model, optimizers, loss = build()
    scaler = GradScaler(**options)
    if watch:
        for item in (model, *optimizers):
            scaler.watch(item)
    scaler.scale(loss()).backward()
    results = [scaler.step(o) for o in optimizers]
    assert all(results)
    random = torch.get_rng_state()
    torch.manual_seed(0)
    reference, optimizers, loss = build()
    theirs = torch.amp.GradScaler("cpu", init_scale=results[0].scale)
    theirs.scale(loss()).backward()
    for optimizer in optimizers:
        theirs.step(optimizer)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.to_dense(), other.grad.to_dense()) if mine.grad.is_sparse else torch.equal(mine.grad, other.grad)
    assert torch.equal(random, torch.get_rng_state())
    return results[0].scale


class Deep(nn.Module):
    """Dropout and BatchNorm inside a checkpoint, or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.head, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)), nn.Linear(4, 1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.head(inner)


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("start", [1.0, 2.0**32])
def test_dropout_and_checkpoints_are_as_without_probing(reentrant: bool | None, start: float, watch: bool) -> None:
    def build() -> Built:
        model, x = Deep(reentrant), torch.randn(8, 4, requires_grad=True)
        if watch:
            count_once(model)  # as the scaler sees to it; torch alone would count a batch that is computed again twice

        def loss() -> Tensor:
            with autocast("cpu", torch.float16):
                return model(x).float().square().mean()

        return model, [AdamW(model.parameters())], loss

    with warnings.catch_warnings():
        if reentrant is not None and not watch:
            warnings.filterwarnings("ignore", message="the loss scale could not be calibrated")
            start = min(start, 1.0)  # it is said that this one cannot be calibrated, so it may only not be wrong
        equal_to_torch(build, watch, init_scale=start)


def test_a_compiled_model_calibrates() -> None:
    def build() -> Built:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(8, 4)
        return model, [AdamW(model.parameters())], lambda: compiled(x).half().float().square().mean()

    assert equal_to_torch(build, init_scale=2.0**32) < 2.0**20


def test_sparse_embeddings_calibrate() -> None:
    def build() -> Built:
        table = nn.Embedding(10, 3, sparse=True)
        return table, [SparseAdam(table.parameters(), lr=0.1)], lambda: table(torch.tensor([1, 1, 2])).half().float().square().sum()

    assert equal_to_torch(build, init_scale=2.0**32) < 2.0**16


@pytest.mark.parametrize("start", [1.0, 2.0**32])
def test_complex_weights_calibrate(start: float) -> None:
    one, two = (nn.Parameter(torch.tensor([3.0 + 4.0j, 1.0 - 1.0j])) for _ in range(2))
    first, second, scaler = Adam([one], lr=0.1), Adam([two], lr=0.1), GradScaler(init_scale=start)
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        scaler.scale((one.real.half().float() * one.imag).sum()).backward()
        assert scaler.step(first)
        scaler.update()
        (two.real.half().float() * two.imag).sum().backward()
        second.step()
        assert torch.equal(one, two)


def test_two_losses_in_one_step_share_the_scale_that_was_calibrated() -> None:
    """A retained graph, both losses scaled before either is differentiated, and the second reaches weights that the first does not."""
    for watch in (True, False):
        one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizers = [SGD([p], lr=1.0) for p in (one, two)]
        scaler = GradScaler()
        if watch:
            for optimizer in optimizers:
                scaler.watch(optimizer)
        first, second = scaler.scale(one.sum()), scaler.scale((two.half() * 30000).float().sum() / 1000)
        first.backward()
        second.backward()
        assert scaler.step(optimizers[0])
        assert torch.equal(one.detach(), torch.zeros(2)), f"watch={watch}"
        result = scaler.step(optimizers[1])
        assert not result or torch.allclose(two.detach(), torch.full((2,), -29.0), atol=0.1)


def test_a_list_of_losses_is_scaled_by_one_scale() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([one, two], lr=1.0), GradScaler()
    scaler.watch(optimizer)
    losses = [one.sum(), (two.half() * 30000).float().sum() / 1000]
    scaled = scaler.scale(losses)
    sum(scaled).backward()  # type: ignore[union-attr]
    assert one.grad is not None
    assert two.grad is not None
    torch.testing.assert_close(one.grad, torch.full((2,), scaler.get_scale()))
    torch.testing.assert_close(two.grad, torch.full((2,), 30.0 * scaler.get_scale()), rtol=1e-3, atol=0.0)  # made in fp16
    assert scaler.step(optimizer)


def test_a_second_loss_that_is_met_later_calibrates_too() -> None:
    """As in adversarial training: the generator's loss comes when the discriminator has stepped."""
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second, scaler = SGD([one], lr=1e-9), SGD([two], lr=1e-9), GradScaler()
    for _ in range(3):
        scaler.scale(one.sum()).backward()
        assert scaler.step(first)
        first.zero_grad()
        scaler.scale((two.half() * 30000).float().sum()).backward()
        assert scaler.step(second)
        second.zero_grad()
        scaler.update()


def test_a_static_scale_and_torchs_rule_are_not_calibrated() -> None:
    for scaler in (GradScaler(init_scale=2.0**20, strategy="stock"), GradScaler(enabled=False)):
        count = [0]
        p = nn.Parameter(torch.ones(2))
        p.register_hook(lambda _, count=count: count.__setitem__(0, count[0] + 1))
        expected = scaler.get_scale()
        scaler.scale(p.sum()).backward()
        assert count == [1]
        assert scaler.scale_at_hand == expected


def test_hooks_of_the_users_see_at_most_nine_passes_and_their_gradients_are_thrown_away() -> None:
    for exponent in range(33):
        weight = Weight(init_scale=2.0**exponent)
        seen: list[float] = []
        weight.p.register_hook(lambda g, seen=seen: seen.append(float(g[0])))
        kept: list[float] = []
        weight.p.register_post_accumulate_grad_hook(lambda p, kept=kept: kept.append(float(p.grad[0])))
        weight.step()
        assert len(seen) <= 10
        assert len(kept) == 1, "what is accumulated is the real gradient only"
        assert kept[0] == seen[-1]


def test_an_error_in_a_users_hook_comes_through_and_leaves_all_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    scaler = GradScaler()
    scaler.watch(model)

    def broken(_: Tensor) -> None:
        raise ValueError("mine")

    handle = model[0].weight.register_hook(broken)
    loss = model(torch.randn(4, 2)).square().sum()
    before, random = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"):
        scaler.scale(loss)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    scaler.scale(model(torch.randn(4, 2)).square().sum()).backward()
    assert scaler.step(SGD(model.parameters(), lr=0.1))


def test_an_overflow_in_a_probe_is_no_anomaly() -> None:
    weight = Weight(init_scale=2.0**32)
    with torch.autograd.set_detect_anomaly(True):
        assert weight.step()
        assert torch.is_anomaly_enabled()


def test_a_graph_that_the_user_differentiates_again_is_still_whole() -> None:
    weight = Weight(init_scale=2.0**32)
    loss = weight.loss()
    scaled = weight.scaler.scale(loss)
    scaled.backward(retain_graph=True)
    scaled.backward()
    assert weight.scaler.step(weight.optimizer)
    assert torch.equal(weight.p.grad, torch.full((4,), 2.0))


def test_a_vector_loss_is_not_probed_and_works_with_a_gradient() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([p], lr=1.0), GradScaler()
    scaler.scale(p * 2).backward(gradient=torch.tensor([1.0, 0.5]))
    assert scaler.step(optimizer)
    assert torch.equal(p.detach(), torch.tensor([-1.0, 0.0]))
    scaler.update()
    with pytest.raises(RuntimeError, match="scalar outputs"):
        scaler.scale(p * 2).backward()


def test_what_cannot_be_probed_is_said_with_its_remedy_and_trains_on() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.spent = []
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if not torch._C._current_graph_task_id() or ctx.spent:
                raise RuntimeError("this graph was freed")
            ctx.spent.append(1)
            return grad * 2

    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler()
    scaler.watch(SGD([p], lr=0.1))
    with pytest.warns(UserWarning, match="could not be calibrated, because this graph cannot be differentiated twice") as caught:
        scaler.scale(Once.apply(p).sum())
    assert "to calibrate it" in str(caught[0].message)
    assert p.grad is None
