"""Gradient release: steps inside the backward pass give the bits of plain steps, and a bad gradient never reaches its weight."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from released import Make, batch, bits, net, same
from torch import Tensor, nn

from halfstep.amp import GradScaler
from halfstep.optim import CODECS, RELEASES, AdamW, FusedAdamW, Lion, handle_of, release, wrap


def run(make: Make, dtype: torch.dtype, released: bool, scaled: bool = False, window: int = 1, steps: int = 4) -> tuple[list[Tensor], list[Any]]:
    """Bits, and (reason, norm, loss, scale) of each step. The loop is the same with and without release."""
    model = net(dtype)
    optimizer = make(model)
    handle = release(optimizer, model) if released else None
    scaler = GradScaler(enabled=scaled, init_scale=1024.0, strategy="stock")
    schedule = scaler.follow(torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), optimizer)
    results = []
    for step in range(steps):
        for part in range(window):
            held = handle.accumulating() if handle is not None and part + 1 < window else torch.enable_grad()
            with held:
                scaler.scale(model(batch(step * window + part).to(dtype)).float().square().mean() / window).backward()
        assert all((p.grad is None) == released for p in model.parameters())
        result = scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        results.append((result.reason, result.grad_norm, result.loss, result.scale))
    return bits(model, optimizer), results


STORAGES = ["split", "split24", "kahan", "stochastic", "plain"]
HALF = torch.bfloat16


@pytest.mark.parametrize("states", CODECS)
@pytest.mark.parametrize(("storage", "dtype"), [("fp32", torch.float32), *((s, d) for s in STORAGES for d in (HALF, torch.float16))])
def test_released_steps_of_adamw_are_plain_steps_bit_for_bit(storage: str, dtype: torch.dtype, states: str) -> None:
    weights = None if storage == "fp32" else storage

    def make(model: nn.Module) -> Any:
        return AdamW(model.parameters(), lr=1e-2, weights=weights, states=states, seed=3)

    scaled = dtype == torch.float16
    plain, released = run(make, dtype, False, scaled), run(make, dtype, True, scaled)
    assert same(plain[0], released[0])
    assert plain[1] == released[1]
    assert [r[0] for r in released[1]] == ["applied"] * 4


OTHERS: dict[str, tuple[Make, torch.dtype]] = {
    "groups": (lambda m: AdamW([{"params": m[0].parameters(), "lr": 3e-2}, {"params": m[2:].parameters(), "weight_decay": 0.3}]), torch.float32),
    "lion": (lambda m: Lion(m.parameters(), lr=1e-3), torch.float32),
    "torch AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), torch.float32),
    "torch fused AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True), torch.float32),
    "FusedAdamW": (lambda m: FusedAdamW(m.parameters(), lr=1e-2), torch.float32),
    "momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True), torch.float32),
    "wrapped RMSprop": (lambda m: wrap(torch.optim.RMSprop(m.parameters(), lr=1e-3), weights="split24", states="int8"), HALF),
    "wrapped NAdam": (lambda m: wrap(torch.optim.NAdam(m.parameters(), lr=1e-3), weights="split"), HALF),
    "wrapped fp32": (lambda m: wrap(torch.optim.Adagrad(m.parameters(), lr=1e-2)), torch.float32),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("window", [1, 2])
def test_released_steps_of_any_optimizer_are_plain_steps_bit_for_bit(name: str, window: int) -> None:
    make, dtype = OTHERS[name]
    plain, released = run(make, dtype, False, window=window), run(make, dtype, True, window=window)
    assert same(plain[0], released[0])
    for a, b in zip(plain[1], released[1], strict=True):
        assert (a[0], a[2]) == (b[0], b[2])
        assert a[1] == pytest.approx(b[1], rel=1e-6)  # torch adds up squares in fp32


def test_a_loop_without_a_scaler_closes_its_books_by_step() -> None:
    model, plain = net(), net()
    optimizer, stock = AdamW(model.parameters(), lr=1e-2), AdamW(plain.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    handle = release(optimizer)
    assert "6 parameters of AdamW" in str(handle)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    for step in range(3):
        for group in stock.param_groups:
            group["lr"] = 1e-2 * 0.5**step
        for one, who in ((model, optimizer), (plain, stock)):
            one(batch(step)).square().mean().backward()
            told = who.step()
            who.zero_grad()
            assert (told is None) == (who is stock)
            if told is not None:
                assert told.applied
                assert told.numbers == tuple(range(6))
        schedule.step()
    assert same(bits(model, optimizer), bits(plain, stock))
    assert (optimizer.steps, len(stepped)) == (3, 3)
    assert not optimizer.step()  # nothing was there
    assert optimizer.steps == 3


def test_what_was_released_comes_back() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    handle = release(optimizer)
    assert handle_of(model[0].weight) is handle
    handle.remove()
    assert handle_of(model[0].weight) is None
    assert str(handle) == "gradient release, removed"
    model(batch(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)
    release(optimizer).remove()
    assert not [h for h in RELEASES if h is handle]


def test_nobody_steps_once_the_optimizer_is_gone() -> None:
    model = net()
    release(AdamW(model.parameters(), lr=1.0))
    before = model[0].weight.detach().clone()
    model(batch(0)).sum().backward()
    assert torch.equal(before, model[0].weight)
    assert model[0].weight.grad is not None
    wrapped: Any = wrap(torch.optim.Adagrad(model.parameters()))
    release(wrapped)
    del wrapped
    gc.collect()  # a wrapped optimizer and the one inside hold each other
    assert handle_of(model[0].weight) is None


def test_copies_of_weights_and_optimizers_are_not_released() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    handle = release(optimizer)
    twin, packed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    assert handle_of(twin[0].weight) is handle_of(packed[0].weight) is None
    other = copy.deepcopy(optimizer)
    assert "halfstep_release" not in vars(other)
    wrapped = wrap(torch.optim.Adagrad(net().parameters()))
    release(wrapped)
    assert "halfstep_release" not in vars(copy.deepcopy(wrapped))
    assert handle.optimizer is optimizer


class Spoils(torch.autograd.Function):
    """Hands `value` down as the gradient."""

    repeatable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(grad, ctx.value), None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**70])
@pytest.mark.parametrize("after_bad", ["tensor", "rest"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_bad_gradient_never_reaches_its_weight_and_is_named(value: float, after_bad: Any, scaled: bool) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release(optimizer, model, after_bad=after_bad)
    scaler = GradScaler(enabled=scaled, init_scale=4.0, strategy="stock", patience=2)
    before = bits(model, optimizer)
    hidden = Spoils.apply(model[1](model[0](batch(0))), value)
    scaler.scale(model[2:](hidden).square().mean()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    assert (bool(result), result.reason) == (True, "partly")
    assert [c.name for c in result.culprits] == ["0.bias", "0.weight"] or [c.name for c in result.culprits] == ["0.weight", "0.bias"]
    assert "2 of 6 parameters stayed as they were" in result.detail
    assert result.next_scale == (2.0 if scaled else 1.0)
    kept = model[0].weight, model[0].bias
    assert all(torch.equal(p, q) for p, q in zip(kept, before[:2], strict=True))
    assert all(p not in optimizer.state or not optimizer.state[p] for p in kept)
    assert not torch.equal(model[2].weight, before[2])
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert scaler.bad_steps == 1
    assert scaler.applied_steps(optimizer) == 1
    scaler.scale(model(batch(1)).square().mean()).backward()
    assert scaler.step(optimizer).reason == "applied"
    assert scaler.bad_steps == 0


def test_after_a_bad_gradient_the_rest_of_the_step_can_be_left_out() -> None:
    """The gradient of the last layer's weight comes first, and is the bad one."""

    def moved(after_bad: Any) -> list[bool]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        release(optimizer, after_bad=after_bad)
        before = [p.detach().clone() for p in model.parameters()]
        model[4].bias.register_hook(lambda g: g * float("nan"))
        model(batch(0)).square().mean().backward()
        optimizer.step()
        return [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]

    assert moved("tensor") == [True] * 5 + [False]
    assert not any(moved("rest")[:4])


def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release(optimizer, model)
    scaler = GradScaler(enabled=False)
    before = bits(model, optimizer)
    scaler.scale(model(batch(0)).square().mean() + float("inf")).backward()  # its gradients are finite
    result = scaler.step(optimizer)
    assert (bool(result), result.reason, result.culprits[0].name) == (False, "nonfinite-loss", "loss")
    assert same(before, bits(model, optimizer))
    assert optimizer.steps == 0
    scaler.scale(model(batch(0)).square().mean()).backward()
    assert scaler.step(optimizer)


def test_clipping_per_parameter_is_a_clip_of_each() -> None:
    model, plain = net(), net()
    optimizer, stock = AdamW(model.parameters(), lr=1e-2), AdamW(plain.parameters(), lr=1e-2)
    release(optimizer, clip="per_parameter", max_norm=0.01)
    scaler = GradScaler(enabled=False)
    for step in range(3):
        scaler.scale(model(batch(step)).square().mean()).backward()
        assert scaler.step(optimizer).clipped
        plain(batch(step)).square().mean().backward()
        for p in plain.parameters():
            torch.nn.utils.clip_grad_norm_([p], 0.01)
        stock.step()
        stock.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_clipping_by_the_last_norm_goes_on_after_a_checkpoint() -> None:
    def steps(count: int, state: Any = None) -> tuple[Any, Any, list[Any]]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        release(optimizer, clip="last", max_norm=0.02)
        scaler, results = GradScaler(enabled=False), []
        for step in range(optimizer.steps, count):
            scaler.scale(model(batch(step)).square().mean()).backward()
            results.append(scaler.step(optimizer))
        return model, optimizer, results

    model, optimizer, results = steps(4)
    assert all(r.clipped for r in results)
    assert optimizer.param_groups[0]["released_norm"] == results[-1].grad_norm
    half, its_optimizer, _ = steps(2)
    resumed, other, _ = steps(4, (half.state_dict(), copy.deepcopy(its_optimizer.state_dict())))
    assert same(bits(model, optimizer), bits(resumed, other))
