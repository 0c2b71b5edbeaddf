"""Steps that divide by the loss scale and clip in the optimizer's own pass: the same weights as by hand, gradients left alone."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import StepResult
from halfstep.amp import GradScaler
from halfstep.errors import ConfigError, StepOrderError
from halfstep.kernels import cpu_kernels
from halfstep.optim import HALF, AdamW, attach, full_values, master_of, wrap

SCALED: dict[str, Any] = {"strategy": "stock", "init_scale": 1024.0}
OPTIMIZERS = {
    "AdamW": lambda ps: AdamW(ps, lr=1e-2),
    "int8": lambda ps: AdamW(ps, lr=1e-2, states="int8"),
    "wrapped": lambda ps: wrap(torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
}


def net(dtype: torch.dtype | None, storage: str = "split") -> nn.Sequential:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    for p in made.parameters():
        if dtype is not None:
            attach(p, storage, dtype)
    return made


def loss_of(model: nn.Module, seed: int, size: float = 3.0) -> Tensor:
    p = next(model.parameters())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return (model(x.to(p.dtype)).float() * size).square().mean()


class Run:
    """Some steps, clipped to `max_norm` in one of several ways."""

    def __init__(self, way: str, max_norm: float, make: Any, dtype: torch.dtype | None, steps: int = 4, micro: int = 1, **settings: Any) -> None:
        self.model = net(dtype)
        self.optimizer: Optimizer = make(self.model.parameters())
        self.scaler = GradScaler(**settings)
        self.scaler.watch(self.optimizer)
        self.results: list[StepResult] = []
        self.left: list[list[Tensor]] = []  # gradients after each step
        self.made: list[list[Tensor]] = []  # and before
        for step in range(steps):
            for number in range(micro):
                self.scaler.scale(loss_of(self.model, 10 * step + number)).backward()
            self.made.append([g.clone() for g in self.gradients()])
            self.results.append(self.step(way, max_norm))
            self.left.append([g.clone() for g in self.gradients()])
            self.scaler.update()
            self.optimizer.zero_grad()

    def gradients(self) -> Iterable[Tensor]:
        return (p.grad for p in self.model.parameters() if p.grad is not None)

    def step(self, way: str, max_norm: float) -> StepResult:
        if way == "late":
            return self.scaler.step(self.optimizer, max_norm=max_norm)
        if way == "scaler":
            self.scaler.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return self.scaler.step(self.optimizer)

    def bits(self) -> list[Tensor]:
        found = []
        for p in self.model.parameters():
            master = master_of(p)
            found += [p.detach(), *([] if master is None or master.residual is None else [master.residual])]
            found += [t for _, t in sorted(self.optimizer.state[p].items()) if isinstance(t, Tensor)]
        return [t.clone() for t in found]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("way", ["scaler", "torch"])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("micro", [1, 3])
def test_without_kernels_a_late_clip_is_a_clip_bit_for_bit(micro: int, max_norm: float, way: str, make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 gradients are widened before a clip by hand, so both multiply the same fp32 numbers by the same fp32 coefficient."""
    monkeypatch.setenv("HALFSTEP_KERNELS", "off")
    late, by_hand = (Run(w, max_norm, OPTIMIZERS[make], torch.float16, micro=micro, **SCALED) for w in ("late", way))
    assert [r.grad_norm for r in late.results] == pytest.approx([r.grad_norm for r in by_hand.results], rel=2.0**-22)
    assert [r.clipped for r in late.results] == [r.clipped for r in by_hand.results] == [max_norm < 1] * 4
    exact = [a.grad_norm == b.grad_norm for a, b in zip(late.results, by_hand.results, strict=True)]
    assert equal(late.bits(), by_hand.bits()) or not all(exact)
    if way == "scaler":
        assert equal(late.bits(), by_hand.bits())


@pytest.mark.skipif(cpu_kernels() is None, reason="without numba, or with HALFSTEP_KERNELS=off, norms are torch's")
@pytest.mark.parametrize("way", ["scaler", "torch"])
def test_with_kernels_the_norm_and_the_coefficient_are_within_an_ulp(way: str) -> None:
    """The kernel adds squares up in fp64, torch in fp32."""
    late, by_hand = (Run(w, 0.5, OPTIMIZERS["AdamW"], torch.float16, steps=1, **SCALED) for w in ("late", way))
    exact = math.sqrt(sum(float((g.double() / 1024).square().sum()) for g in late.made[0]))
    for run in (late, by_hand):
        assert run.results[0].grad_norm == pytest.approx(exact, rel=2.0**-22)
    for a, b in zip(late.model.parameters(), by_hand.model.parameters(), strict=True):
        torch.testing.assert_close(late.optimizer.state[a]["exp_avg"], by_hand.optimizer.state[b]["exp_avg"], rtol=2.0**-21, atol=0.0)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_late_clip_of_bf16_gradients_is_the_one_of_fp32_gradients(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand a clip rounds bf16 gradients to bf16 once more; on the way in it does not."""
    monkeypatch.setenv("HALFSTEP_KERNELS", kernels)
    late = Run("late", 0.5, OPTIMIZERS["AdamW"], torch.bfloat16, steps=1, enabled=False)
    norm = late.results[0].grad_norm
    assert norm is not None
    coefficient = float(0.5 / (torch.tensor(norm, dtype=torch.float32) + 1e-6))
    for p, g in zip(late.model.parameters(), late.made[0], strict=True):
        expected = (g.float() * coefficient).mul_(torch.tensor(1 - 0.9))
        assert torch.equal(late.optimizer.state[p]["exp_avg"], expected)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALF)
def test_a_late_step_leaves_gradients_as_they_were_made(dtype: torch.dtype, make: str) -> None:
    settings = SCALED if dtype == torch.float16 else {"enabled": False}
    run = Run("late", 0.5, OPTIMIZERS[make], dtype, **settings)
    assert all(run.results)
    assert all(equal(a, b) for a, b in zip(run.left, run.made, strict=True))
    assert {g.dtype for gs in run.left for g in gs} == {dtype}


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_fp32_weights_are_clipped_late_too(make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", "off")
    late, by_hand = (Run(way, 0.5, OPTIMIZERS[make], None, **SCALED) for way in ("late", "scaler"))
    assert equal(late.bits(), by_hand.bits())
    assert all(equal(a, b) for a, b in zip(late.left, late.made, strict=True))


def test_a_clip_before_and_one_in_the_step_both_act() -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(**SCALED)
    s.watch(optimizer)
    s.scale(loss_of(model, 0)).backward()
    s.unscale_(optimizer)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    result = s.step(optimizer, max_norm=0.5)
    assert result.clipped
    total = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert total == pytest.approx(0.5, rel=1e-4)
    assert result.grad_norm == pytest.approx(math.sqrt(sum(float(g.double().square().sum()) for g in before)), rel=1e-5)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_norm_that_is_none_is_refused_and_nothing_moves(max_norm: float) -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(**SCALED)
    s.scale(loss_of(model, 0)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match="no norm"):
        s.step(optimizer, max_norm=max_norm)
    assert equal([p.detach() for p in model.parameters()], before)


def test_a_norm_with_a_closure_is_refused() -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(**SCALED)
    with pytest.raises(ConfigError, match="closure"):
        s.step(optimizer, lambda: None, max_norm=1.0)


def test_an_optimizer_that_fails_in_its_step_leaves_gradients_that_can_be_used() -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters(), lr=1e-2), GradScaler(**SCALED)
    s.scale(loss_of(model, 0)).backward()
    made = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.weights = "kahan"  # the masters are split ones
    with pytest.raises(ConfigError, match="split master already"):
        s.step(optimizer, max_norm=0.5)
    assert equal([p.grad for p in model.parameters() if p.grad is not None], made)
    optimizer.weights = None
    result = s.step(optimizer, max_norm=0.5)
    assert result
    reference = Run("late", 0.5, OPTIMIZERS["AdamW"], torch.float16, steps=1, **SCALED)
    assert equal([p.detach() for p in model.parameters()], [p.detach() for p in reference.model.parameters()])


def test_two_steps_for_one_backward_pass_are_refused() -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(**SCALED)
    s.scale(loss_of(model, 0)).backward()
    s.step(optimizer, max_norm=0.5)
    with pytest.raises(StepOrderError):
        s.step(optimizer, max_norm=0.5)
    s.update()
    with pytest.raises(StepOrderError):
        s.step(optimizer, max_norm=0.5)


def test_gradients_that_are_not_cleared_are_not_added_to() -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(**SCALED)
    s.scale(loss_of(model, 0)).backward()
    assert s.step(optimizer, max_norm=0.5)
    s.update()
    s.scale(loss_of(model, 1)).backward()
    with pytest.raises(StepOrderError, match="zero_grad"):
        s.step(optimizer, max_norm=0.5)


# --- replay


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_replayed_step_is_one_first_taken_at_that_scale(make: str, max_norm: float | None, micro: int) -> None:
    def taken(init: float, mode: Any) -> tuple[StepResult, list[Tensor]]:
        model = net(torch.float16)
        optimizer, s = OPTIMIZERS[make](model.parameters()), GradScaler(strategy="stock", init_scale=init, on_overflow=mode)
        for number in range(micro):
            s.scale(loss_of(model, number)).backward()
        result = s.step(optimizer, max_norm=max_norm)
        return result, [t.clone() for p in model.parameters() for t in (p.detach(), master_of(p).residual)]  # type: ignore[union-attr]

    replayed, bits = taken(2.0**24, "replay")
    assert replayed
    assert replayed.replays > 0
    assert replayed.scale < 2.0**24
    first, expected = taken(replayed.scale, "skip")
    assert first.replays == 0
    assert first.scale == replayed.scale
    assert first.grad_norm == replayed.grad_norm
    assert first.clipped == replayed.clipped == (max_norm is not None)
    assert equal(bits, expected)


def test_an_overflow_with_a_late_clip_lowers_the_scale_and_names_the_weight() -> None:
    model = net(torch.float16)
    optimizer, s = AdamW(model.parameters()), GradScaler(strategy="stock", init_scale=2.0**24)
    s.name_parameters(model.named_parameters())
    s.scale(loss_of(model, 0)).backward()
    result = s.step(optimizer, max_norm=0.5)
    s.update()
    assert result.reason == "overflow"
    assert not result.clipped
    assert result.culprits[0].name in dict(model.named_parameters())
    assert s.get_scale() == 2.0**23
    assert not optimizer.state


def test_a_subclass_with_a_step_of_its_own_is_stepped_without_a_factor() -> None:
    class Counted(AdamW):
        steps_seen = 0

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.steps_seen += 1
            return super().step(closure)

    values = []
    for kind in (AdamW, Counted):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2).half()
        optimizer, scaler = kind(net.parameters(), lr=1e-2), GradScaler(init_scale=1024.0, strategy="stock")
        scaler.scale(net(torch.ones(3, 4).half()).float().square().mean()).backward()
        assert scaler.step(optimizer, max_norm=1e6)
        values.append(full_values(net.weight))
    assert torch.equal(*values)
