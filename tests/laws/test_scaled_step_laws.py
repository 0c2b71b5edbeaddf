"""Laws of a scaled step, for each optimizer: scaling changes no bit, and a bad step changes nothing at all."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from halfstep import amp
from halfstep.amp import GradScaler
from halfstep.errors import DivergedError

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda ps: SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda ps: Adam(ps, lr=0.01, foreach=False),
    "adam-fused": lambda ps: Adam(ps, lr=0.01, fused=True),
    "adamw": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "adamw-foreach": lambda ps: AdamW(ps, lr=0.01, foreach=True),
    "adamw-fused": lambda ps: AdamW(ps, lr=0.01, fused=True),
}
USES = {"fp16": (True, torch.float32), "fp32": (False, torch.float32), "bf16": (False, torch.bfloat16)}  # scaler on, format of products


class Run:
    """A small regression under one scaler."""

    def __init__(self, optimizer: str, scaler: GradScaler | None, products: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = scaler
        self.products = products
        self.inputs, self.targets = torch.randn(16, 4), torch.randn(16, 2)
        if scaler is not None:
            scaler.name_parameters(self.model.named_parameters())

    def backward(self, seed: int) -> None:
        self.optimizer.zero_grad()
        rows = torch.randperm(16, generator=torch.Generator().manual_seed(seed))[:8]
        with amp.autocast("cpu", torch.bfloat16, enabled=self.products == torch.bfloat16):
            outputs = self.model(self.inputs[rows])
        loss = nn.functional.mse_loss(outputs.float(), self.targets[rows])
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def spoil(self, value: float) -> None:
        assert self.scaler is not None
        with self.scaler.edits():
            next(p.grad for p in self.model.parameters() if p.grad is not None)[0, 0] = value

    def everything(self) -> list[Any]:
        """Weights and optimizer states, flat."""
        state = copy.deepcopy(self.optimizer.state_dict()["state"])
        return [p.detach().clone() for p in self.model.parameters()] + [v for s in state.values() for v in s.values()]

    def good_step(self, seed: int) -> None:
        self.backward(seed)
        assert self.scaler is not None
        assert self.scaler.step(self.optimizer)
        self.scaler.update()


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("exponent", [0, 1, 10, 20])
def test_a_scaled_run_is_the_unscaled_one_bit_for_bit(optimizer: str, exponent: int) -> None:
    plain, scaled = Run(optimizer, None), Run(optimizer, GradScaler(init_scale=2.0**exponent))
    for seed in range(4):
        plain.backward(seed)
        plain.optimizer.step()
        scaled.good_step(seed)
        assert same(plain.gradients(), scaled.gradients()), "gradients stay readable, unscaled, after the step"
    assert same(plain.everything(), scaled.everything())


@pytest.mark.parametrize("exponent", range(21))
def test_unscaled_gradients_equal_those_of_an_unscaled_run(exponent: int) -> None:
    plain, scaled = Run("sgd", None), Run("sgd", GradScaler(init_scale=2.0**exponent))
    for seed in range(3):
        plain.backward(seed)
        scaled.backward(seed)
        assert all(torch.equal(s, p * 2.0**exponent) for s, p in zip(scaled.gradients(), plain.gradients(), strict=True))
        assert scaled.scaler is not None
        scaled.scaler.unscale_(scaled.optimizer)
        assert same(plain.gradients(), scaled.gradients())
        plain.optimizer.step()
        assert scaled.scaler.step(scaled.optimizer)
        scaled.scaler.update()


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("use", list(USES))
def test_checks_alone_change_no_bit(optimizer: str, use: str) -> None:
    """With scaling off the scaler only looks."""
    products = USES[use][1]
    plain, checked = Run(optimizer, None, products), Run(optimizer, GradScaler(enabled=False), products)
    for seed in range(3):
        plain.backward(seed)
        plain.optimizer.step()
        checked.good_step(seed)
    assert same(plain.everything(), checked.everything())


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("use", list(USES))
def test_an_overflow_changes_neither_weights_nor_states(optimizer: str, use: str) -> None:
    enabled, products = USES[use]
    run = Run(optimizer, GradScaler(enabled=enabled), products)
    assert run.scaler is not None
    run.good_step(0)
    for bad in (math.inf, -math.inf, math.nan, 1e30):
        before, scale = run.everything(), run.scaler.get_scale()
        run.backward(1)
        victim = run.model[2].weight.grad
        assert victim is not None
        with run.scaler.edits():
            victim[1, 3] = bad * scale
        result = run.scaler.step(run.optimizer)
        run.scaler.update()
        assert same(before, run.everything())
        assert not result
        assert result.applied is False
        assert result.reason == "overflow"
        assert [(c.name, c.direction) for c in result.culprits] == [("2.weight", "backward")]
        assert result.culprits[0].value == pytest.approx(abs(bad), nan_ok=True)
        assert result.loss is not None
        assert math.isfinite(result.loss)
        assert run.scaler.get_scale() == result.next_scale
        assert result.next_scale <= scale / 2 if enabled else result.next_scale == 1.0
    run.good_step(2)
    assert not same(before, run.everything())


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("use", list(USES))
def test_a_loss_that_is_not_finite_changes_nothing_and_leaves_the_scale(optimizer: str, use: str) -> None:
    enabled, products = USES[use]
    run = Run(optimizer, GradScaler(enabled=enabled), products)
    assert run.scaler is not None
    run.good_step(0)
    before, scale, state = run.everything(), run.scaler.get_scale(), run.scaler.state_dict()
    for bad in (math.inf, -math.inf, math.nan):
        run.optimizer.zero_grad()
        run.scaler.scale(run.model(run.inputs).sum() * 0 + bad).backward()  # the gradients are finite
        result = run.scaler.step(run.optimizer)
        run.scaler.update()
        assert same(before, run.everything())
        assert (result.applied, result.reason) == (False, "nonfinite-loss")
        assert [(c.name, c.direction) for c in result.culprits] == [("loss", "forward")]
        assert result.loss == pytest.approx(bad, nan_ok=True)
        assert run.scaler.get_scale() == result.next_scale == result.scale == scale
    assert run.scaler.state_dict() == (state | {"bad_steps": 3} if enabled else {})
    run.good_step(1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw-fused"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_healthy_step_after_thirty_bad_ones_gives_the_run_without_them(optimizer: str, enabled: bool) -> None:
    healthy, troubled = (Run(optimizer, GradScaler(enabled=enabled, init_scale=2.0**31)) for _ in range(2))
    healthy.good_step(0)
    troubled.good_step(0)
    for seed in range(30):
        troubled.backward(seed)
        troubled.spoil(math.nan)
        assert troubled.scaler is not None
        assert not troubled.scaler.step(troubled.optimizer)
        troubled.scaler.update()
    assert troubled.scaler is not None
    assert troubled.scaler.bad_steps == 30
    healthy.good_step(1)
    troubled.good_step(1)
    assert troubled.scaler.bad_steps == 0
    assert same(healthy.everything(), troubled.everything())
    assert all(bool(torch.isfinite(p).all()) for p in troubled.model.parameters())


@pytest.mark.parametrize("use", list(USES))
def test_a_run_of_bad_steps_ends_at_the_patience_with_good_weights(use: str) -> None:
    enabled, products = USES[use]
    run = Run("adamw", GradScaler(enabled=enabled), products)
    assert run.scaler is not None
    run.good_step(0)
    before = run.everything()
    taken = []

    def go_on() -> None:
        assert run.scaler is not None
        for seed in range(200):
            taken.append(seed)
            run.backward(seed)
            run.spoil(math.inf)
            run.scaler.step(run.optimizer)
            run.scaler.update()

    with pytest.raises(DivergedError) as caught:
        go_on()
    assert len(taken) == 50
    assert same(before, run.everything())
    assert (caught.value.result.applied, caught.value.result.reason) == (False, "overflow")
    for words in ("50 steps in a row", "overflow", "0.weight", "None of them changed the weights"):
        assert words in caught.value.cause
    for words in ("halfstep.trace", "learning rate", "patience of 50", "patience=", "max_bad_steps="):
        assert words in caught.value.remedy


def test_two_hundred_overflows_never_bring_the_scale_below_the_floor() -> None:
    run = Run("sgd", GradScaler(init_scale=2.0**16, floor=2.0**3, patience=1000, strategy="stock"))
    assert run.scaler is not None
    scales = []
    for seed in range(200):
        run.backward(seed)
        run.spoil(math.inf)
        result = run.scaler.step(run.optimizer)
        run.scaler.update()
        assert result.next_scale == run.scaler.get_scale()
        scales.append(run.scaler.get_scale())
    assert scales == [max(2.0**3, 2.0 ** (15 - i)) for i in range(200)]


def test_growth_stops_at_the_ceiling() -> None:
    run = Run("sgd", GradScaler(init_scale=2.0**10, growth_interval=2, ceiling=2.0**14, strategy="stock"))
    assert run.scaler is not None
    scales = []
    for seed in range(20):
        run.good_step(seed)
        scales.append(run.scaler.get_scale())
    assert scales == [min(2.0**14, 2.0 ** (10 + (i + 1) // 2)) for i in range(20)]
