"""Gradient release with tied weights, activation checkpoints, several backward passes and optimizers, compiled models; and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from released import batch, bits, net, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.amp import GradScaler
from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import AdamW, Lion, Release, release, wrap


def test_a_tied_weight_is_updated_once_with_the_sum() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(30, 12)
            self.head = nn.Linear(12, 30, bias=False)
            self.head.weight = self.table.weight
            self.alone = nn.Linear(12, 12)  # not reached in odd steps

        def forward(self, x: Tensor, odd: int) -> Tensor:
            h = self.table(x)
            return self.head(h if odd else self.alone(self.alone(h)))  # and used twice

    def trained(released: bool) -> list[Tensor]:
        model = Tied()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if released:
            release(optimizer)
        for step in range(4):
            x = torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(x, step % 2).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(model, optimizer)

    assert same(trained(False), trained(True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_of_layers_that_are_used_once(reentrant: bool) -> None:
    def trained(released: bool) -> list[Tensor]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if released:
            release(optimizer)
        for step in range(3):
            checkpoint(model, batch(step).requires_grad_(), use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(model, optimizer)

    assert same(trained(False), trained(True))


def test_a_second_gradient_in_one_step_is_refused() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    handle = release(optimizer, model)
    loss = model(batch(0)).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises((StepOrderError, RuntimeError), match=r"another gradient of it has come|inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    for backward in range(2):
        with handle.accumulating() if not backward else torch.enable_grad():
            model(batch(0)).square().mean().backward()
    assert optimizer.step().numbers == tuple(range(6))


def test_gradients_that_the_last_backward_pass_has_not_reached_are_used_too() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = release(optimizer)
    with handle.accumulating():
        model(batch(0)).square().mean().backward()
    model[4](torch.randn(2, 33)).square().mean().backward()  # the last layer alone
    assert model[0].weight.grad is not None
    assert optimizer.step().moved == 6
    assert model[0].weight.grad is None


def test_probes_of_the_loss_scale_move_nothing() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release(optimizer)
    before = model[0].weight.detach().clone()
    scaler = GradScaler()  # finds its scale by backward passes of its own
    loss = scaler.scale(model(batch(0)).square().mean())
    assert scaler.get_scale() > 1024
    assert torch.equal(before, model[0].weight)
    loss.backward()
    assert not torch.equal(before, model[0].weight)
    assert scaler.step(optimizer)
    with pytest.raises(StepOrderError, match="scaled loss"):
        optimizer.step()


def test_several_optimizers_step_each_on_its_own_weights() -> None:
    def trained(released: bool) -> list[Tensor]:
        model = net()
        pair = AdamW(model[0].parameters(), lr=1e-2), Lion(model[2:].parameters(), lr=1e-3)
        if released:
            release(pair[0])  # the other one keeps its gradients
        scaler = GradScaler(init_scale=256.0, strategy="stock")
        for step in range(3):
            scaler.scale(model(batch(step)).square().mean()).backward()
            assert (model[0].weight.grad is None) == released
            assert all(scaler.step(o) for o in pair)
            scaler.update()
            for o in pair:
                o.zero_grad()
        return bits(model[0], pair[0]) + bits(model[2], pair[1])

    assert same(trained(False), trained(True))


def test_a_compiled_model(fresh_compiler: None) -> None:
    def trained(released: bool) -> list[Tensor]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if released:
            release(optimizer)
        call = torch.compile(model, backend="aot_eager")
        for step in range(2):
            call(batch(step)).square().mean().backward()
            assert all((p.grad is None) == released for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return bits(model, optimizer)

    assert same(trained(False), trained(True))


# --- what is refused


class Global(torch.optim.SGD):
    """A step that depends on the norm over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1e-2)
        super().step()


def clipped(**settings: Any) -> Callable[[], Release]:
    return lambda: release(AdamW(net().parameters()), **settings)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "exact clipping": (clipped(clip="global", max_norm=1.0), "known only when they are used up.*per_parameter, last|per_parameter"),
    "a norm without a mode": (clipped(max_norm=1.0), r"per_parameter or last"),
    "a mode without a norm": (clipped(clip="last"), "without max_norm"),
    "no norm": (clipped(clip="last", max_norm=0.0), "no norm to clip to"),
    "after_bad": (clipped(after_bad="all"), "after_bad='all'"),
    "LBFGS": (lambda: release(torch.optim.LBFGS(net().parameters())), "one by one"),
    "a global norm": (lambda: release(Global(net().parameters(), lr=0.1)), "act on each other"),
    "differentiable": (lambda: release(torch.optim.SGD(net().parameters(), lr=0.1, differentiable=True)), "differentiable"),
    "no optimizer": (lambda: release(net()), "not a torch.optim.Optimizer"),  # type: ignore[arg-type]
    "parallel": (lambda: release(AdamW((m := net()).parameters()), nn.DataParallel(m)), "backward pass has ended"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_at_set_up(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        make()


def test_hooks_before_the_step_a_second_release_and_a_late_wrap_are_refused() -> None:
    model = net()
    hooked, stock = AdamW(model.parameters()), torch.optim.SGD(net().parameters(), lr=0.1)
    hook = hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="before its step"):
        release(hooked)
    hook.remove()
    release(hooked)
    with pytest.raises(ConfigError, match="released already"):
        release(hooked)
    with pytest.raises(ConfigError, match="another handle"):
        release(AdamW(model.parameters()))
    release(stock)
    with pytest.raises(ConfigError, match="Wrap it first"):
        wrap(stock)


def test_what_needs_gradients_is_refused_with_the_modes() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    release(optimizer)
    scaler = GradScaler(enabled=False)
    scaler.scale(model(batch(0)).sum()).backward()
    for call in (
        lambda: scaler.clip_grad_norm_(model.parameters(), 1.0),
        lambda: scaler.clip_grad_value_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.step(optimizer, max_norm=1.0),
    ):
        with pytest.raises(ConfigError, match="clip='per_parameter' or 'last'"):
            call()
    for named in ({"stalled": True}, {"closure": lambda: None}):
        with pytest.raises(ConfigError, match=next(iter(named))):
            scaler.step(optimizer, **named)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="factor="):
        optimizer.step(factor=0.5)
    assert scaler.step(optimizer)


def test_replay_is_refused_when_the_two_meet() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    release(optimizer)
    scaler = GradScaler(on_overflow="replay")
    with pytest.raises(ConfigError, match="half applied"):
        scaler.scale(model(batch(0)).sum())
    with pytest.raises(ConfigError, match="half applied"):
        scaler.watch(optimizer)
