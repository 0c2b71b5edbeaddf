"""Backward passes that are run again at lower scales: the step is the one first taken at that scale, and nothing is kept for longer."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from halfstep import StepResult
from halfstep.amp import GradScaler
from halfstep.errors import DivergedError, StepOrderError, StepRefusedError

START = 2.0**16


class Loop:
    """A small net whose loss has an fp16 part that overflows at START. `backward` says how a loss is differentiated."""

    def __init__(self, on_overflow: str, start: float = START, strategy: str = "stock", watch: bool = True, checkpointed: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = AdamW(self.net.parameters(), lr=0.01)
        self.scaler = GradScaler(init_scale=start, strategy=strategy, on_overflow=on_overflow)
        self.checkpointed = checkpointed
        if watch:
            self.scaler.watch(self.net)
            self.scaler.watch(self.optimizer)

    def loss(self, factor: float = 30.0) -> Tensor:
        x = torch.randn(8, 3, requires_grad=True)
        y = checkpoint(self.net, x, use_reentrant=False) if self.checkpointed else self.net(x)
        return (y.half().float() * factor).square().mean()

    def step(self) -> StepResult:
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return result

    def everything(self) -> list[Tensor]:
        states = [v for values in self.optimizer.state.values() for v in values.values()]
        return [t.detach().clone() for t in (*self.net.state_dict().values(), *states, torch.get_rng_state())]


Backward = Callable[[Loop], None]


def alone(loop: Loop) -> None:
    loop.scaler.scale(loop.loss()).backward()


def window(loop: Loop) -> None:
    for factor in (1.0, 30.0, 2.0):
        loop.scaler.scale(loop.loss(factor) / 3).backward()


def divided_after_scaling(loop: Loop) -> None:
    (loop.scaler.scale(loop.loss()) / 4).backward()


def weighted_sum(loop: Loop) -> None:
    (loop.scaler.scale(loop.loss()) * 0.5 + loop.scaler.scale(loop.loss(3.0)) * 2.0).backward()


def with_gradient(loop: Loop) -> None:
    loop.scaler.scale(loop.loss()).backward(gradient=torch.tensor(0.25))


def vector(loop: Loop) -> None:
    y = loop.net(torch.randn(8, 3)).half().float().squeeze(-1) * 30
    loop.scaler.scale(y).backward(gradient=torch.arange(8.0))


def scaled_for_a_log(loop: Loop) -> None:
    loss = loop.loss()
    assert float(loop.scaler.scale(loss).detach()) > 0
    loop.scaler.scale(loss).backward()


def twice(loop: Loop) -> None:
    scaled = loop.scaler.scale(loop.loss())
    scaled.backward(retain_graph=True)
    scaled.backward()


def thrown_away_first(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(1e3)).backward()
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()


def clipped(loop: Loop) -> None:
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.clip_grad_norm_(loop.net.parameters(), 0.1)


def clipped_by_value_afterwards(loop: Loop) -> None:
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_value_(loop.net.parameters(), 0.01)


BACKWARDS: list[Backward] = [
    alone,
    window,
    divided_after_scaling,
    weighted_sum,
    with_gradient,
    vector,
    scaled_for_a_log,
    twice,
    thrown_away_first,
    clipped,
    clipped_by_value_afterwards,
]


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_replayed_step_is_the_step_first_taken_at_that_scale_however_its_backward_is_written(backward: Backward, watch: bool) -> None:
    replayed = Loop("replay", watch=watch)
    results = []
    for _ in range(3):
        backward(replayed)
        results.append(replayed.step())
        if results[-1].replays:
            replayed.scaler.update(START)
    assert all(results)
    assert results[0].replays >= 1
    told = Loop("skip", watch=watch)
    for result in results:
        told.scaler.update(result.scale)
        backward(told)
        again = told.step()
        assert (again.applied, again.scale, again.grad_norm) == (True, result.scale, result.grad_norm)
        assert again.loss == result.loss
    assert all(torch.equal(a, b) for a, b in zip(replayed.everything(), told.everything(), strict=True))


def test_replaying_checkpointed_blocks_moves_their_buffers_no_further() -> None:
    replayed = Loop("replay", checkpointed=True)
    alone(replayed)
    result = replayed.step()
    assert result.replays >= 1
    told = Loop("skip", start=result.scale, checkpointed=True)
    alone(told)
    assert told.step()
    assert all(torch.equal(a, b) for a, b in zip(replayed.everything(), told.everything(), strict=True))


def test_clipping_that_replays_clips_what_the_step_uses() -> None:
    loop = Loop("replay")
    clipped(loop)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in loop.net.parameters()))
    assert norm == pytest.approx(0.1, rel=1e-3)
    result = loop.step()
    assert result.replays >= 1
    assert result.clipped


class Big(torch.autograd.Function):
    """Saves a tensor for the backward pass and tells which."""

    repeatable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: list[Any]) -> Tensor:
        kept = torch.ones(1000)
        saved.append(weakref.ref(kept))
        ctx.save_for_backward(kept)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0][0], None


@pytest.mark.parametrize("how", ["applied", "replayed", "refused", "thrown away", "skipped"])
def test_graphs_are_let_go_when_the_step_is_taken_or_given_up(how: str) -> None:
    p, saved = nn.Parameter(torch.ones(2)), []
    optimizer = SGD([p], lr=0.1)
    scaler = GradScaler(init_scale=START, strategy="stock", on_overflow="skip" if how == "skipped" else "replay")
    factor = {"replayed": 60.0, "refused": math.nan}.get(how, 1.0)
    scaler.scale((Big.apply(p, saved).half().float() * factor / START).sum() * (START if how == "replayed" else 1.0)).backward()
    if how == "thrown away":
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
    else:
        result = scaler.step(optimizer)
        assert result.applied == (how != "refused")
    scaler.update()
    optimizer.zero_grad()
    if how == "thrown away":
        scaler.scale(p.sum()).backward()
    gc.collect()
    assert saved[0]() is None


def test_until_the_step_the_graph_is_kept() -> None:
    p, saved = nn.Parameter(torch.ones(2)), []
    scaler = GradScaler(on_overflow="replay")
    scaler.scale(Big.apply(p, saved).sum()).backward()
    gc.collect()
    assert saved[0]() is not None


@pytest.mark.parametrize("by", ["backward", "grad"])
def test_create_graph_is_refused(by: str) -> None:
    net = nn.Linear(3, 1)
    scaler = GradScaler(on_overflow="replay")
    scaled = scaler.scale(net(torch.randn(4, 3)).mean())
    calls = {
        "backward": lambda: scaled.backward(create_graph=True),
        "grad": lambda: torch.autograd.grad(scaled, list(net.parameters()), create_graph=True),
    }
    if by == "grad":  # torch says it: the losses are differentiated by themselves
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            calls[by]()
        return
    with pytest.raises(StepOrderError, match="create_graph=True") as caught:
        calls[by]()
    assert "on_overflow='skip'" in caught.value.remedy


@pytest.mark.parametrize("strategy", ["stock", "follow"])
def test_what_no_scale_mends_keeps_the_scale_and_the_following_steps(strategy: str) -> None:
    loop, plain = Loop("replay", 2.0**10, strategy), Loop("skip", 2.0**10, strategy)
    for i in range(4):
        handle = loop.net[0].weight.register_hook(lambda g: g * math.inf) if i == 1 else None
        for each in (loop, plain):
            if each is loop or i != 1:
                torch.manual_seed(i)
                each.scaler.scale(each.loss(1.0)).backward()
        if handle is not None:
            result = loop.step()
            handle.remove()
            assert (result.applied, result.reason) == (False, "overflow")
            assert result.replays >= 1
            assert "not to blame" in result.detail
            assert result.next_scale == loop.scaler.get_scale() == plain.scaler.get_scale()
        else:
            one, other = loop.step(), plain.step()
            assert one.applied
            assert one.scale == other.scale


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_bad_loss_is_not_replayed(factor: float) -> None:
    loop = Loop("replay")
    loop.scaler.scale(loop.loss(1.0) * factor).backward()
    result = loop.step()
    assert (result.reason, result.replays, loop.scaler.get_scale()) == ("nonfinite-loss", 0, START)


def test_raise_raises_with_the_result_and_changes_nothing() -> None:
    loop = Loop("raise")
    before = [p.detach().clone() for p in loop.net.parameters()]
    alone(loop)
    with pytest.raises(StepRefusedError, match="Nothing was changed") as caught:
        loop.scaler.step(loop.optimizer)
    result = caught.value.result
    assert (result.applied, result.reason, result.scale, result.next_scale) == (False, "overflow", START, START / 2)
    assert all(torch.equal(a, b) for a, b in zip(before, loop.net.parameters(), strict=True))
    assert not loop.optimizer.state
    loop.scaler.update()
    loop.optimizer.zero_grad()
    assert loop.scaler.get_scale() == START / 2
    loop.scaler.scale(loop.loss(0.1)).backward()
    assert loop.step()


def test_replay_runs_out_of_patience_too() -> None:
    loop = Loop("replay", 4.0)
    loop.scaler = GradScaler(init_scale=4.0, on_overflow="replay", patience=3)
    loop.net[0].weight.register_hook(lambda g: g * math.inf)

    def run() -> None:
        for _ in range(5):
            loop.scaler.scale(loop.loss(1.0)).backward()
            loop.step()

    with pytest.raises(DivergedError, match="3 steps in a row"):
        run()


def test_after_another_optimizer_has_used_its_gradients_nothing_is_replayed() -> None:
    """Running the backward passes again would undo its unscaling; the step is skipped, and the other's is right."""
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = SGD([one], lr=0.1), SGD([two], lr=0.1)
    scaler = GradScaler(init_scale=START, strategy="stock", on_overflow="replay")
    scaler.watch(first)
    scaler.watch(second)
    scaler.scale(one.sum()).backward()
    scaler.scale((two.half().float() * 4).sum()).backward()
    assert scaler.step(first)
    result = scaler.step(second)
    assert (result.reason, result.replays) == ("overflow", 0)
    scaler.update()
    assert torch.allclose(one.detach(), torch.full((2,), 0.9))
    assert torch.equal(two.detach(), torch.ones(2))
    assert scaler.get_scale() == START / 2
