"""Steps that evaluate a closure: each evaluation is unscaled and judged, and a bad one puts everything back, bit for bit."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from halfstep import Accelerator, StepResult
from halfstep.amp import GradScaler
from halfstep.errors import DivergedError, HalfstepError, StepOrderError, StepRefusedError


class SAM(Optimizer):
    """Sharpness-aware: a step up along the gradient, another evaluation there, back down, then the step of an optimizer inside."""

    def __init__(self, params: Iterable[Tensor], rho: float = 0.05, set_to_none: bool = True) -> None:
        super().__init__(params, {"rho": rho})
        self.inner, self.set_to_none = SGD(self.param_groups, lr=0.05, momentum=0.9), set_to_none

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in held]))
        for p in held:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        self.zero_grad(self.set_to_none)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.copy_(self.state[p].pop("old"))
        self.inner.step()

    def step(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


MAKERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "lbfgs": lambda ps: LBFGS(ps, lr=0.1, max_iter=3),
    "strong-wolfe": lambda ps: LBFGS(ps, lr=0.5, max_iter=2, line_search_fn="strong_wolfe"),
    "sam": SAM,
    "sam-zeroing": lambda ps: SAM(ps, set_to_none=False),
    "adam": lambda ps: Adam(ps, lr=0.05),
    "fused": lambda ps: Adam(ps, lr=0.05, fused=True),
}
MODES: dict[str, dict[str, Any]] = {
    "follow": {},
    "stock": {"strategy": "stock", "init_scale": 2.0**10},
    "off": {"enabled": False},
    "replay": {"on_overflow": "replay"},
    "deferred": {"deferred": True},
}


class Loop:
    """A small regression under a closure; `bad` is the number of the evaluation, of all, that is spoiled, and `value` by what."""

    def __init__(
        self, make: Callable[[list[Tensor]], Optimizer], bad: int | None = None, value: float = math.nan, clip: bool = False, **options: Any
    ):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=bad is not None), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer, self.scaler = make(list(self.net.parameters())), GradScaler(**options)
        self.scaler.watch(self.net)
        self.x, self.evaluations, self.bad, self.value, self.clip = torch.randn(8, 3), 0, bad, value, clip

    def loss(self) -> Tensor:
        self.evaluations += 1
        loss = (self.net(self.x).squeeze(-1) - self.x.sum(1)).square().mean()
        return loss * self.value if self.evaluations == self.bad else loss

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.clip_grad_norm_(self.net.parameters(), 0.1)
        return loss

    def plain(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        return loss

    def step(self, keyword: bool = False) -> StepResult:
        result = self.scaler.step(self.optimizer, closure=self.closure) if keyword else self.scaler.step(self.optimizer, self.closure)
        self.scaler.update()
        return result

    def everything(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        inner = getattr(self.optimizer, "inner", self.optimizer)
        return copy.deepcopy(self.net.state_dict()), copy.deepcopy([self.optimizer.state_dict(), inner.state_dict()])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(MAKERS))
def test_steps_with_a_closure_are_those_without_scaling(name: str, mode: str) -> None:
    scaled, plain = Loop(MAKERS[name], **MODES[mode]), Loop(MAKERS[name])
    for i in range(4):
        result = scaled.step(keyword=i % 2 == 1)
        plain.optimizer.step(plain.plain)
        assert result.applied
        assert result.grad_norm is not None
    assert scaled.evaluations == plain.evaluations
    for mine, theirs in zip(scaled.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["lbfgs", "sam", "adam"])
def test_clipping_inside_a_closure_acts_on_unscaled_gradients(name: str) -> None:
    scaled, plain = Loop(MAKERS[name], clip=True), Loop(MAKERS[name], clip=True)
    for _ in range(3):
        assert scaled.step()
        plain.optimizer.step(plain.plain)
    for mine, theirs in zip(scaled.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("mode", "value"), [("follow", math.nan), ("follow", 1e30), ("off", math.inf), ("replay", math.nan), ("deferred", math.nan)])
@pytest.mark.parametrize("name", list(MAKERS))
def test_a_bad_evaluation_anywhere_puts_weights_states_and_buffers_back(name: str, mode: str, value: float) -> None:
    """1e30: the loss is finite, its gradients are above 2^60."""
    counted = Loop(MAKERS[name], bad=-1, **MODES[mode])
    counted.step()
    first = counted.evaluations
    counted.step()
    for bad in range(first + 1, counted.evaluations + 1):
        loop = Loop(MAKERS[name], bad=bad, value=value, **MODES[mode])
        assert loop.step()
        before = loop.everything()
        result = loop.step()
        assert (result.applied, result.reason) == (False, "overflow" if value == 1e30 else "nonfinite-loss"), bad
        assert result.culprits
        assert same(before, loop.everything()), f"evaluation {bad - first}"
        assert loop.step(), "and the next step goes on"
        assert loop.scaler.bad_steps == 0


@pytest.mark.parametrize("name", ["lbfgs", "sam", "adam"])
def test_an_overflow_in_the_first_step_of_all_leaves_no_states(name: str) -> None:
    loop = Loop(MAKERS[name], bad=1)
    weights, states = loop.everything()
    assert not loop.step()
    assert same((weights, states), loop.everything())


@pytest.mark.parametrize("evaluation", [1, 2, 3])
def test_a_scale_that_is_too_large_is_lowered_by_the_evaluation_that_overflows(evaluation: int) -> None:
    """Only gradients overflow, and only at that scale: under "replay" the step is applied, under "skip" it is refused and the scale falls."""

    def run(on_overflow: str) -> tuple[StepResult, Tensor, float]:
        p = nn.Parameter(torch.ones(3))
        optimizer, count = LBFGS([p], lr=0.01, max_iter=4), [0]
        scaler = GradScaler(strategy="stock", init_scale=2.0**12, on_overflow=on_overflow)

        def closure() -> Tensor:
            optimizer.zero_grad()
            count[0] += 1
            loss = (p.half().float() * (64.0 if count[0] == evaluation else 1.0)).square().sum()
            scaler.scale(loss).backward()
            return loss

        result = scaler.step(optimizer, closure)
        scaler.update()
        return result, p.detach().clone(), scaler.get_scale()

    result, weights, scale = run("skip")
    assert (result.reason, scale) == ("overflow", 2.0**11)
    assert torch.equal(weights, torch.ones(3))
    result, weights, scale = run("replay")
    assert result.applied, result
    assert result.replays >= 1
    assert scale < 2.0**12
    assert bool((weights < 1).all())


def test_gradients_made_before_the_closure_are_unscaled_for_optimizers_that_use_them() -> None:
    class Early(SAM):
        def step(self, closure: Callable[[], Any]) -> None:
            self.first_step()
            closure()
            self.second_step()

    scaled, plain = Loop(Early), Loop(Early)
    for _ in range(3):
        scaled.closure()
        assert scaled.step()
        plain.plain()
        with torch.enable_grad():
            plain.optimizer.step(plain.plain)
    for mine, theirs in zip(scaled.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_closure_that_forgets_to_scale_is_refused_with_the_remedy_and_changes_nothing() -> None:
    for name in ("lbfgs", "sam", "adam"):
        loop = Loop(MAKERS[name])
        assert loop.step()
        before = loop.everything()
        with pytest.raises(StepOrderError, match="a loss that was not scaled") as caught:
            loop.scaler.step(loop.optimizer, loop.plain)
        assert "scaler.scale(loss).backward()" in caught.value.remedy
        assert same(before, loop.everything())


@pytest.mark.parametrize("at", [1, 2])
def test_an_error_of_the_users_in_a_later_evaluation_comes_through_and_changes_nothing(at: int) -> None:
    for name in ("lbfgs", "sam"):
        loop = Loop(MAKERS[name])
        assert loop.step()
        before, last = loop.everything(), loop.evaluations + at

        def closure(loop: Loop = loop, last: int = last) -> Tensor:
            if loop.evaluations + 1 == last:
                raise KeyError("mine")
            return loop.closure()

        with pytest.raises(KeyError, match="mine"):
            loop.scaler.step(loop.optimizer, closure)
        assert same(before, loop.everything()), name


def test_settings_that_would_write_nan_are_refused_with_a_closure_too() -> None:
    for make in (lambda ps: SGD(ps, lr=0.1), lambda ps: LBFGS(ps, lr=0.1)):
        loop = Loop(make)
        loop.optimizer.param_groups[0]["lr"] = math.nan
        before = loop.everything()[0]
        with pytest.raises(HalfstepError, match="lr of parameter group 0 is nan"):
            loop.step()
        assert same(before, loop.everything()[0])


def test_bad_closures_in_a_row_end_in_diverged_error_and_raise_raises() -> None:
    for options, error in (({"patience": 3}, DivergedError), ({"on_overflow": "raise"}, StepRefusedError)):
        p = nn.Parameter(torch.ones(2))
        optimizer, scaler = Adam([p]), GradScaler(**options)

        def closure(p: Tensor = p, scaler: GradScaler = scaler) -> Tensor:
            loss = p.sum() * math.nan
            scaler.scale(loss).backward()
            return loss

        def many(optimizer: Optimizer = optimizer, scaler: GradScaler = scaler, closure: Callable[[], Tensor] = closure) -> None:
            for _ in range(3):
                scaler.step(optimizer, closure)
                scaler.update()
                optimizer.zero_grad()

        with pytest.raises(error) as caught:
            many()
        assert not caught.value.result
        assert torch.equal(p.detach(), torch.ones(2))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("name", ["lbfgs", "strong-wolfe", "sam", "adam"])
@pytest.mark.parametrize("keyword", [False, True])
def test_prepared_optimizers_take_closures(name: str, precision: str, keyword: bool) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(precision=precision, cpu=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, MAKERS[name](list(model.parameters())))
    x, bad = torch.randn(16, 3), [False]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x).squeeze(-1) - x.sum(1)).square().mean() * (math.nan if bad[0] else 1.0)
        accelerator.backward(loss)
        return loss

    first = float(closure().detach())
    optimizer.zero_grad()
    for _ in range(10):
        result = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert isinstance(result, StepResult)
        assert result
    before = copy.deepcopy(model.state_dict())
    bad[0] = True
    assert optimizer.step(closure).reason == "nonfinite-loss"
    assert same(before, copy.deepcopy(model.state_dict()))
    bad[0] = False
    assert float(closure().detach()) < first
