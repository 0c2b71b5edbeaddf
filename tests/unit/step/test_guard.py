"""Scaled gradients are never used or edited unseen, and loops that do nothing of the kind hear nothing of it."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from halfstep import Accelerator, amp
from halfstep.amp import GradScaler
from halfstep.errors import ConfigError, StepOrderError

X = torch.tensor([[1.0, 2.0, 3.0], [3.0, -1.0, 0.5], [0.5, 0.0, 1.0], [1.0, 1.0, 2.0]])


class Lookahead(Optimizer):
    """In the style of other libraries: an Optimizer around another, with a step of its own."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.calls = inner, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.calls += 1
        if self.calls % 2 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Plain:
    """Not even an Optimizer: groups, step and zero_grad."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Momentum(Optimizer):
    """States that are tensors themselves, and not dictionaries of them."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = p.grad.clone() if p not in self.state else self.state[p] * 0.9 + p.grad
                p.sub_(self.state[p], alpha=group["lr"])


MAKERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "sgd": lambda ps: SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: AdamW(ps, lr=0.05),
    "fused": lambda ps: AdamW(ps, lr=0.05, fused=True),
    "lookahead": lambda ps: Lookahead(SGD(ps, lr=0.05)),
    "duck": lambda ps: Plain(SGD(ps, lr=0.05)),
    "own states": Momentum,
}


class Loop:
    """A model, an optimizer and either a scaler or none."""

    def __init__(self, maker: str = "sgd", scaled: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = MAKERS[maker](list(self.model.parameters()))
        self.scaler = GradScaler(**options) if scaled else None

    @property
    def weights(self) -> list[Tensor]:
        return list(self.model.parameters())

    def loss(self) -> Tensor:
        return self.model(X).square().mean()

    def backward(self, loss: Tensor | None = None, **options: Any) -> None:
        loss = self.loss() if loss is None else loss
        (self.scaler.scale(loss) if self.scaler else loss).backward(**options)

    def step(self) -> None:
        if self.scaler:
            assert self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def same_weights(one: Loop, other: Loop) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


def refused(call: Callable[[], Any], cause: str, remedy: str) -> None:
    with pytest.raises(StepOrderError) as caught:
        call()
    assert cause in caught.value.cause
    assert remedy in caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("maker", ["sgd", "adamw", "fused", "lookahead", "duck"])
def test_a_plain_step_on_scaled_gradients_is_refused_at_that_line_and_changes_nothing(maker: str) -> None:
    loop = Loop(maker)
    loop.scaler.name_parameters(loop.model.named_parameters())
    before = copy.deepcopy(loop.weights)
    loop.backward()
    refused(loop.optimizer.step, "the gradient of 0.weight is still multiplied by the loss scale", "scaler.step(optimizer)")
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights, strict=True))
    loop.step()


@pytest.mark.parametrize("maker", list(MAKERS))
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("place", ["after step", "before backward", "before forward"])
def test_loops_as_people_write_them_are_those_without_a_scaler(maker: str, set_to_none: bool, place: str) -> None:
    loops = [Loop(maker, scaled) for scaled in (True, False)]
    for loop in loops:
        for _ in range(4):
            if place == "before forward":
                loop.optimizer.zero_grad(set_to_none=set_to_none)
            loss = loop.loss()
            if place == "before backward":
                loop.optimizer.zero_grad(set_to_none=set_to_none)
            loop.backward(loss)
            loop.step()
            if place == "after step":
                loop.optimizer.zero_grad(set_to_none=set_to_none)
    assert same_weights(*loops)


@pytest.mark.parametrize("maker", ["lookahead", "duck"])
def test_unscaling_by_the_optimizer_inside_and_stepping_with_the_outer_one_divides_once(maker: str) -> None:
    loops = [Loop(maker, scaled) for scaled in (True, False)]
    for loop in loops:
        loop.backward()
        if loop.scaler:
            loop.scaler.unscale_(loop.optimizer.inner)
        nn.utils.clip_grad_norm_(loop.weights, 0.1)
        loop.step()
    assert same_weights(*loops)


def test_a_prepared_optimizer_that_is_given_to_the_scaler_is_refused_or_divided_once() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(X).mean())
    with contextlib.suppress(ConfigError):  # a refusal is right too
        accelerator.scaler.unscale_(optimizer)
    optimizer.step()
    assert torch.allclose(model.weight.grad[0], X.mean(0), rtol=1e-2), "divided by the loss scale once"


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_torchs_clips_on_scaled_gradients_are_refused_at_the_step_and_after_unscaling_they_are_right(clip: Callable[..., Any]) -> None:
    loops = [Loop(scaled=s) for s in (True, False)]
    loops[0].backward()
    clip(loops[0].weights, 1e-3)
    refused(lambda: loops[0].scaler.step(loops[0].optimizer), "was changed between backward() and unscaling", "scaler.clip_grad_norm_")
    loops[0].optimizer.zero_grad()
    for loop in loops:
        loop.backward()
        if loop.scaler:
            loop.scaler.unscale_(loop.optimizer)
        clip(loop.weights, 1e-3)
        loop.step()
    assert same_weights(*loops)


EDITS: dict[str, Callable[[Tensor], None]] = {
    "in place": lambda p: p.grad.add_(1.0),
    "replaced": lambda p: setattr(p, "grad", p.grad + 1.0),
}


@pytest.mark.parametrize("edit", list(EDITS))
@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_edits_of_scaled_gradients_are_refused_by_unscale_clip_and_step(edit: str, watch: bool, steps_before: int) -> None:
    for use in ("unscale_", "clip", "amp.clip", "step"):
        loop = Loop()
        if watch:
            loop.scaler.watch(loop.optimizer)
        for _ in range(steps_before):
            loop.backward()
            loop.step()
            loop.optimizer.zero_grad()
        before = copy.deepcopy(loop.weights)
        loop.backward()
        EDITS[edit](loop.weights[2])
        calls = {
            "unscale_": lambda loop=loop: loop.scaler.unscale_(loop.optimizer),
            "clip": lambda loop=loop: loop.scaler.clip_grad_norm_(loop.weights, 1.0),
            "amp.clip": lambda loop=loop: amp.clip_grad_norm_(loop.weights, 1.0),
            "step": lambda loop=loop: loop.scaler.step(loop.optimizer),
        }
        refused(calls[use], "was changed between backward() and unscaling", "with scaler.edits()")
        assert all(torch.equal(a, b) for a, b in zip(before, loop.weights, strict=True))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_edits_that_are_announced_are_used(how: str) -> None:
    loops = [Loop(scaled=s) for s in (True, False)]
    for loop in loops:
        loop.backward()
        loop.backward()
        with loop.scaler.edits() if loop.scaler else torch.no_grad():
            for p in loop.weights:
                if how == "in place":
                    p.grad.div_(2)
                else:
                    p.grad = p.grad / 2
        loop.step()
    assert same_weights(*loops)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_not_cleared_after_a_step_are_refused(set_to_none: bool) -> None:
    loop = Loop()
    loop.backward()
    loop.step()

    def again() -> None:
        loop.backward()
        loop.scaler.step(loop.optimizer)

    with pytest.raises(StepOrderError) as caught:
        again()
    assert caught.value.remedy
    loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.scaler.update()
    loop.backward()
    loop.step()


def test_accumulation_over_several_losses_and_backward_passes_is_summed() -> None:
    loops = [Loop(scaled=s) for s in (True, False)]
    for loop in loops:
        for _ in range(3):
            loop.backward(loop.loss() / 3)
            loop.backward(loop.model(X).mean() / 3)
            loop.backward((loop.loss() + loop.model(-X).square().mean()) / 3, retain_graph=True)
        loop.step()
    assert same_weights(*loops)


def test_two_scalers_in_one_process_know_their_own_gradients_only() -> None:
    one, two = Loop(init_scale=2.0**8, strategy="stock"), Loop(init_scale=2.0**12, strategy="stock")
    one.backward()
    two.backward()
    refused(one.optimizer.step, "still multiplied", "scaler.step")
    one.step()
    refused(two.optimizer.step, "still multiplied", "scaler.step")
    two.step()
    assert same_weights(one, two)
    both = Loop(), Loop()
    for loop in both:
        loop.backward()
    with pytest.raises(ConfigError, match="several GradScalers"):
        amp.clip_grad_norm_([*both[0].weights, *both[1].weights], 1.0)


@pytest.mark.parametrize("watch", [True, False])
def test_the_documented_gradient_penalty_is_right(watch: bool) -> None:
    """torch's recipe: scaled gradients by autograd.grad, unscaled by hand, a penalty on them, and the sum scaled."""
    loops = [Loop(scaled=s) for s in (True, False)]
    if watch:
        loops[0].scaler.watch(loops[0].optimizer)
    for loop in loops:
        for _ in range(3):
            loop.optimizer.zero_grad()
            loss = loop.loss()
            scaled = loop.scaler.scale(loss) if loop.scaler else loss
            grads = torch.autograd.grad(scaled, loop.weights, create_graph=True)
            inverse = 1.0 / loop.scaler.get_scale() if loop.scaler else 1.0
            penalty = sum((g * inverse).square().sum() for g in grads).sqrt()
            loop.backward(loss + penalty)
            if loop.scaler and watch:
                assert loop.scaler.step(loop.optimizer).loss == pytest.approx(float((loss + penalty).detach()))
                loop.scaler.update()
            else:
                loop.step()
    for mine, theirs in zip(loops[0].weights, loops[1].weights, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("watch", [True, False])
def test_adversarial_training_raises_no_alarm_and_is_that_without_a_scaler(set_to_none: bool, watch: bool) -> None:
    def run(scaled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        judge, maker = nn.Linear(3, 1), nn.Linear(3, 3)
        first, second = Adam(judge.parameters(), lr=0.05), Adam(maker.parameters(), lr=0.05)
        scaler = GradScaler(strategy="stock", enabled=scaled)
        if watch:
            scaler.watch(first)
            scaler.watch(second)
        for _ in range(4):
            first.zero_grad(set_to_none)
            real = nn.functional.softplus(-judge(X)).mean()
            fake = nn.functional.softplus(judge(maker(X).detach())).mean()
            scaler.scale(real).backward()
            scaler.scale(fake).backward()
            assert scaler.step(first)
            second.zero_grad(set_to_none)
            scaler.scale(nn.functional.softplus(-judge(maker(X))).mean()).backward()
            assert scaler.step(second)
            scaler.update()
        return [*judge.parameters(), *maker.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_one_weight_in_two_optimizers_is_unscaled_once() -> None:
    weights = []
    for scaled in (True, False):
        p = nn.Parameter(torch.ones(2))
        one, two, scaler = SGD([p], lr=0.1), SGD([p], lr=0.2), GradScaler(enabled=scaled)
        for _ in range(2):
            one.zero_grad()
            scaler.scale((p * p).sum()).backward()
            assert scaler.step(one)
            assert scaler.step(two)
            scaler.update()
        weights.append(p.detach())
    assert torch.equal(*weights)


def test_plain_losses_and_plain_steps_beside_a_scaler_are_left_alone() -> None:
    """Other models in the process, hand-made gradients, LBFGS, hooks, an average of the weights."""
    loop, other = Loop(), nn.Linear(3, 1)
    loop.backward()
    plain = LBFGS(other.parameters(), lr=0.1, max_iter=2)

    def closure() -> Tensor:
        plain.zero_grad()
        loss = other(X).square().mean()
        loss.backward()
        return loss

    plain.step(closure)
    average = torch.optim.swa_utils.AveragedModel(loop.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    loop.step()
    average.update_parameters(loop.model)
    for p in loop.weights:
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(loop.weights)
    loop.optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, loop.weights, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_plain_loop_may_follow_scaled_gradients_that_were_thrown_away(set_to_none: bool) -> None:
    loops = [Loop(), Loop(scaled=False)]
    loops[0].backward()
    for loop in loops:
        loop.optimizer.zero_grad(set_to_none)
        loop.loss().backward()
        loop.optimizer.step()
    assert same_weights(*loops)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_tensor_hooks_and_checkpoints_are_no_edits(reentrant: bool | None) -> None:
    loops = [Loop(scaled=s) for s in (True, False)]
    for loop in loops:
        loop.weights[0].register_hook(lambda g: g * 0.5)
        if loop.scaler:
            loop.scaler.watch(loop.optimizer)
        for _ in range(2):
            x = X.clone().requires_grad_()
            loop.optimizer.zero_grad()
            loop.backward((loop.model(x) if reentrant is None else checkpoint(loop.model, x, use_reentrant=reentrant)).square().mean())
            loop.step()
    assert same_weights(*loops)
