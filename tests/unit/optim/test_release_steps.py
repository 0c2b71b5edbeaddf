"""Gradient release: steps that nobody closes, losses of other optimizers, backward passes that are no training, and what comes after `release`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from released import batch, bits, net, same
from torch import nn

from halfstep import Accelerator
from halfstep.amp import GradScaler
from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import SGD, AdamW, release


def loss_of(model: nn.Module, step: int, times: float = 1.0) -> torch.Tensor:
    return model(batch(step)).square().mean() * times


def test_a_loss_that_is_not_finite_holds_only_what_it_reaches() -> None:
    """A GAN: the discriminator's loss is NaN in the second round, before the generator's, which is good."""

    def told(released: bool, together: bool) -> list[Any]:
        torch.manual_seed(0)
        pair = nn.Linear(4, 9), net()
        accelerator = Accelerator(precision="bf16-mixed", cpu=True)
        generator, critic, first, second = accelerator.prepare(*pair, AdamW(pair[0].parameters()), AdamW(pair[1].parameters()))
        if released:
            accelerator.release(first)
            accelerator.release(second)
        results = []
        for step in range(3):
            critic.requires_grad_(True)
            noise = batch(step)[:, :4]
            accelerator.backward(critic(generator(noise).detach()).mean() * (float("nan") if step == 1 else 1.0))
            early = [] if together else [second.step()]
            critic.requires_grad_(False)
            accelerator.backward(critic(generator(noise)).square().mean())
            results += [(r.reason, r.loss) for r in (*early, *([second.step()] if together else []), first.step())]
            first.zero_grad()
            second.zero_grad()
        return [*results, *(p.detach() for p in (*generator.parameters(), *critic.parameters()))]

    for together in (False, True):
        plain, released = told(False, together), told(True, together)
        assert [r[0] for r in released[:6]] == ["applied", "applied", "nonfinite-loss", "applied", "applied", "applied"]
        if not together:  # else the generator's loss is that of a critic that has moved
            assert [r for r in plain[:6] if r[1] == r[1]] == [r for r in released[:6] if r[1] == r[1]]
            assert all(torch.equal(a, b) for a, b in zip(plain[6:], released[6:], strict=True))


def test_a_bad_loss_that_comes_last_through_a_pass_moves_nothing_that_it_reaches() -> None:
    model = net()
    first, second = SGD(model[:4].parameters(), lr=1e-2), SGD(model[4:].parameters(), lr=1e-2)
    release(first)
    release(second)
    scaler = GradScaler(enabled=False)
    for optimizer in (first, second):
        scaler.watch(optimizer)
    before = bits(model, first)[:4]
    hidden = model[:4](batch(0))
    bad = scaler.scale(hidden.mean() + float("nan"))  # reaches the first optimizer alone
    (bad + scaler.scale(model[4](hidden.detach()).mean())).backward()
    assert scaler.step(first).reason == "nonfinite-loss"
    assert same(before, bits(model, first)[:4])
    scaler.step(second)
    scaler.scale(loss_of(model, 1))  # never gone back through
    del bad
    scaler.scale(loss_of(model, 1)).backward()
    assert [scaler.step(o).reason for o in (first, second)] == ["applied", "applied"]


def test_a_bad_loss_whose_backward_pass_is_left_out_holds_nothing() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    release(optimizer)
    scaler = GradScaler(enabled=False)
    scaler.scale(loss_of(model, 0, float("nan")))
    scaler.scale(loss_of(model, 1)).backward()
    assert scaler.step(optimizer).reason == "applied"


def test_a_batch_whose_loss_is_not_finite_may_be_left_out_with_zero_grad() -> None:
    def trained(released: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if released:
            release(optimizer)
        scaler = GradScaler(enabled=False)
        for step in range(3):
            loss = loss_of(model, step, float("nan") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if loss.isfinite():
                assert scaler.step(optimizer)
            optimizer.zero_grad()
        return bits(model, optimizer)

    assert same(trained(False), trained(True))


class Bare:
    """A loop without a scaler."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self, optimizer: Any) -> Any:
        return optimizer.step()


@pytest.mark.parametrize("scaler", [GradScaler(enabled=False), Bare()], ids=["scaler", "bare"])
@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=1e-2), lambda p: torch.optim.RAdam(p, lr=1e-2)], ids=["twins", "copies"])
def test_a_backward_pass_that_fails_is_dropped_with_zero_grad(make: Callable[[Any], Any], scaler: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = make(model.parameters())
    release(optimizer)
    hook = model[2].weight.register_hook(lambda _: 1 / 0)
    before = bits(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.scale(loss_of(model, 0)).backward()
    hook.remove()
    moved = [n for n, p in enumerate(model.parameters()) if p.grad is None and not torch.equal(p, before[n])]
    assert moved[-2:] == [4, 5]
    optimizer.zero_grad()
    assert f"{len(moved)} parameters had been updated" in caplog.text
    scaler.scale(loss_of(model, 1)).backward()
    optimizer.zero_grad()  # undoes nothing: this pass has come to its end
    with pytest.raises(StepOrderError, match=r"zero_grad\(\) does not undo"):
        scaler.scale(loss_of(model, 2)).backward()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 3)).backward()
    told = scaler.step(optimizer)
    assert getattr(told, "reason", "applied") == "applied"
    assert bool(told)


def test_a_zero_grad_of_the_users_own_is_called_and_comes_back() -> None:
    model = net()
    optimizer: Any = AdamW(model.parameters())
    cleared: list[int] = []

    def clear(set_to_none: bool = True) -> None:
        cleared.append(1)
        AdamW.zero_grad(optimizer, set_to_none)

    optimizer.zero_grad = clear
    handle = release(optimizer)
    optimizer.zero_grad()
    handle.remove()
    assert (optimizer.zero_grad, cleared) == (clear, [1])


def test_zero_grad_does_not_undo_a_step_and_the_next_pass_says_so() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    release(optimizer)
    scaler = GradScaler(enabled=False)
    scaler.scale(loss_of(model, 0)).backward()
    optimizer.zero_grad()
    with pytest.raises(StepOrderError, match=r"zero_grad\(\) does not undo"):
        scaler.scale(loss_of(model, 1)).backward()


def test_a_step_without_gradients_other_than_zero_leaves_the_last_norm() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=1e-2)
    release(optimizer, clip="last", max_norm=0.02)
    scaler = GradScaler(enabled=False)
    norms = []
    for step in range(3):
        scaler.scale(loss_of(model, step, float(step != 1))).backward()
        result = scaler.step(optimizer)
        norms.append(optimizer.param_groups[0]["released_norm"])
        assert (result.grad_norm > 0, result.clipped) == (step != 1, True)
    assert norms[0] == norms[1] != norms[2]


@pytest.mark.parametrize("enabled", [False, True])
def test_a_backward_pass_of_no_scaled_loss_is_the_users_own(enabled: bool) -> None:
    """The gradient of inputs (saliency, adversarial examples), between two steps."""

    def trained(released: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if released:
            release(optimizer)
        scaler = GradScaler(enabled=enabled, init_scale=256.0, strategy="stock")
        for step in range(3):
            scaler.scale(loss_of(model, step)).backward()
            assert scaler.step(optimizer)
            scaler.update()
            before = bits(model, optimizer)
            inputs = batch(9).requires_grad_()
            model(inputs).sum().backward()
            assert same(before, bits(model, optimizer))
            assert inputs.grad is not None
            optimizer.zero_grad()
        return bits(model, optimizer)

    assert same(trained(False), trained(True))


def test_a_hook_before_the_step_is_refused_when_it_comes_after_the_release_too() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    release(optimizer)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    before = bits(model, optimizer)
    with pytest.raises(ConfigError, match="before its step"):
        loss_of(model, 0).backward()
    assert same(before, bits(model, optimizer))
    hook.remove()
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    assert optimizer.step().moved == 6


@pytest.mark.parametrize("max_norm", ["1", True, float("nan"), -1.0])
def test_what_is_no_norm_is_refused(max_norm: Any) -> None:
    with pytest.raises(ConfigError, match="no norm to clip to"):
        release(AdamW(net().parameters()), clip="last", max_norm=max_norm)


def test_a_step_that_was_going_on_at_remove_is_told_and_counted() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = release(optimizer)
    scaler = GradScaler(enabled=False)
    scaler.scale(loss_of(model, 0)).backward()
    handle.remove()
    result = scaler.step(optimizer)
    assert (result.reason, scaler.applied_steps(optimizer)) == ("applied", 1)
    assert not {"halfstep_release", "zero_grad"} & set(vars(optimizer))
    scaler.scale(loss_of(model, 1)).backward()
    assert model[0].weight.grad is not None
    assert scaler.step(optimizer).reason == "applied"
    again = release(optimizer)
    scaler.scale(loss_of(model, 2)).backward()
    again.remove()
    release(optimizer)  # before that step was closed: it is nobody's
    scaler.scale(loss_of(model, 3)).backward()
    assert scaler.step(optimizer).reason == "applied"
