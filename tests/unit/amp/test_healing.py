"""A hand-written loop whose model overflows in the forward pass: the module is named, and held in fp32 where that was asked for."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import halfstep
from halfstep import StepResult, amp
from halfstep.amp import GradScaler, pin, pins
from halfstep.errors import DivergedError, StepRefusedError

X = torch.linspace(-1, 1, 48).reshape(6, 8)


class Net(nn.Module):
    """`wo` passes fp16's range by far, its output is normed. BatchNorm and dropout have a state."""

    def __init__(self, size: float = 1e6) -> None:
        super().__init__()
        self.a, self.bn, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.wo, self.norm, self.head = nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4)
        with torch.no_grad():
            self.wo.weight.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.wo(self.drop(self.bn(self.a(x))))))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301  our own bytes


def net(size: float = 1e6) -> Net:
    torch.manual_seed(0)
    return Net(size)


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    with amp.autocast("cpu", torch.float16):
        return F.mse_loss(model(x).float(), X[:, :4])


def optimizer_of(*models: nn.Module) -> SGD:
    return SGD([p for model in models for p in model.parameters()], lr=0.05)


def step(scaler: GradScaler, optimizer: SGD, *losses: Callable[[], Tensor]) -> StepResult:
    optimizer.zero_grad()
    for loss in losses:
        scaler.scale(loss()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def state(*models: nn.Module) -> list[Tensor]:
    return [t.clone() for model in models for t in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("deferred", [None, True])
@pytest.mark.parametrize("on_overflow", ["skip", "replay"])
def test_the_module_is_pinned_and_the_next_step_is_applied(on_overflow: Any, deferred: bool | None, enabled: bool) -> None:
    model = net()
    optimizer, scaler = optimizer_of(model), GradScaler(heal="pin", on_overflow=on_overflow, deferred=deferred, enabled=enabled)
    scaler.watch(model)
    before, scale = state(model), scaler.get_scale()
    bad = step(scaler, optimizer, lambda: loss_of(model))
    assert (bad.applied, bad.reason, bad.pinned, bad.replays) == (False, "forward-overflow", ("wo",), 0)
    assert (bad.culprits[0].name, bad.culprits[0].direction) == ("wo", "forward")
    assert "wo (Linear)" in bad.detail
    assert bad.next_scale == scale
    assert same(state(model), before)  # weights, and BatchNorm's statistics
    (held,) = pins(model)
    assert (held.module, held.step) == ("wo", 1)
    assert "fp16" in held.why
    for _ in range(3):
        good = step(scaler, optimizer, lambda: loss_of(model))
        assert (good.applied, good.pinned) == (True, ())
        assert math.isfinite(good.loss)


def test_looking_leaves_random_states_where_they_were() -> None:
    after = []
    for watched in (True, False):
        model = net()
        optimizer, scaler = optimizer_of(model), GradScaler(heal="pin", enabled=False)
        if watched:
            scaler.watch(model)
        torch.manual_seed(5)
        assert not step(scaler, optimizer, lambda model=model: loss_of(model))
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


@pytest.mark.parametrize("size", [1e6, 1.0])
def test_the_step_after_the_pin_is_that_of_a_module_pinned_beforehand(size: float) -> None:
    one, other = net(size), net(size)
    pin(other, "wo")
    first, second = GradScaler(heal="pin", init_scale=256.0, strategy="stock"), GradScaler(init_scale=256.0, strategy="stock")
    mine, theirs = optimizer_of(one), optimizer_of(other)
    first.watch(one)
    if size > 1:
        assert step(first, mine, lambda: loss_of(one)).pinned == ("wo",)
    else:
        pin(one, "wo")
    for k in range(3):
        torch.manual_seed(k)
        assert step(first, mine, lambda: loss_of(one))
        torch.manual_seed(k)
        assert step(second, theirs, lambda: loss_of(other))
    assert same(state(one), state(other))


def test_without_pin_the_module_is_named_and_patience_runs_out() -> None:
    model = net()
    optimizer, scaler = optimizer_of(model), GradScaler(patience=5)
    scaler.watch(model)
    scaler.note_checkpoint("runs/checkpoint-40")
    for _ in range(4):
        result = step(scaler, optimizer, lambda: loss_of(model))
        assert not result
        assert not result.pinned
    with pytest.raises(DivergedError) as caught:
        step(scaler, optimizer, lambda: loss_of(model))
    assert pins(model) == ()
    text = str(caught.value)
    for part in ("5 steps in a row", "forward-overflow", "since the first step of this run", "wo (", "runs/checkpoint-40", "patience"):
        assert part in text
    assert [text.index(f"{i}. ") for i in (1, 2, 3)] == sorted(text.index(f"{i}. ") for i in (1, 2, 3))
    assert text.index("heal='pin'") < text.index("bf16") < text.index("Go on from runs/checkpoint-40")


def test_the_first_bad_step_is_named_without_pin() -> None:
    model = net()
    optimizer, scaler = optimizer_of(model), GradScaler()
    scaler.watch(model)
    result = step(scaler, optimizer, lambda: loss_of(model))
    assert (result.reason, result.culprits[0].name, result.pinned, pins(model)) == ("forward-overflow", "wo", (), ())


def test_raise_raises_for_a_forward_pass_and_not_for_gradients() -> None:
    model = net()
    optimizer, scaler = optimizer_of(model), GradScaler(heal="raise")
    scaler.watch(model)
    before = state(model)
    with pytest.raises(StepRefusedError, match=r"wo \(Linear\)") as caught:
        step(scaler, optimizer, lambda: loss_of(model))
    assert caught.value.result.culprits[0].name == "wo"
    assert same(state(model), before)
    small, scaler = net(1.0), GradScaler(heal="raise")
    scaler.watch(small)
    handle = small.head.weight.register_hook(lambda g: g * math.inf)
    other = optimizer_of(small)
    assert step(scaler, other, lambda: loss_of(small)).reason == "overflow"
    handle.remove()


def test_a_model_that_nobody_watches_is_refused_with_a_hint() -> None:
    model = net()
    result = step(GradScaler(heal="pin"), optimizer_of(model), lambda: loss_of(model))
    assert (result.applied, result.reason, result.pinned) == (False, "nonfinite-loss", ())
    assert "watch(model)" in result.detail


def test_a_loss_that_overflows_outside_of_the_model_is_not_held_against_it() -> None:
    model = net(1.0)
    scaler = GradScaler(heal="pin")
    scaler.watch(model)
    result = step(scaler, optimizer_of(model), lambda: loss_of(model) * math.inf)
    assert (result.reason, result.pinned, pins(model)) == ("nonfinite-loss", (), ())
    assert "it is the loss" in result.detail


def test_data_that_is_not_finite_is_named_and_nothing_pinned() -> None:
    model = net()
    scaler = GradScaler(heal="pin")
    scaler.watch(model)
    x = X.clone()
    x[2, 3] = math.nan
    result = step(scaler, optimizer_of(model), lambda: loss_of(model, x))
    assert (result.reason, result.culprits[0].name, pins(model)) == ("nonfinite-loss", "input x", ())


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_in_an_accumulation_window_the_bad_micro_batch_is_found(bad: int) -> None:
    model = net(2e4)  # overflows on large inputs only: without a BatchNorm to level them
    model.bn = nn.Identity()
    optimizer, scaler = optimizer_of(model), GradScaler(heal="pin")
    scaler.watch(model)
    batches = [X * (1e3 if i == bad else 1e-2) for i in range(3)]
    losses = [lambda x=x: loss_of(model, x) for x in batches]
    result = step(scaler, optimizer, *losses)
    assert (result.reason, result.pinned) == ("forward-overflow", ("wo",))
    assert step(scaler, optimizer, *losses)


def test_two_models_in_one_loss_are_both_looked_into() -> None:
    one, two = net(), net()
    optimizer, scaler = optimizer_of(one, two), GradScaler(heal="pin")
    scaler.watch(one)
    scaler.watch(two)
    result = step(scaler, optimizer, lambda: loss_of(one) + loss_of(two))
    assert result.reason == "forward-overflow"
    assert [p.module for p in (*pins(one), *pins(two))] == ["wo", "wo"]
    assert step(scaler, optimizer, lambda: loss_of(one) + loss_of(two))


@pytest.mark.parametrize("first", ["good", "bad"])
def test_a_pass_of_another_model_does_not_hide_the_bad_one(first: str) -> None:
    """Each step ends a window: what the other optimizer's step came from is still to be looked into."""
    good, bad = net(1.0), net()
    optimizers, scaler = {"good": optimizer_of(good), "bad": optimizer_of(bad)}, GradScaler(heal="pin")
    scaler.watch(good)
    scaler.watch(bad)
    scaler.scale(loss_of(good)).backward()
    scaler.scale(loss_of(bad)).backward()
    order = [first, *({"good", "bad"} - {first})]
    results = {name: scaler.step(optimizers[name]) for name in order}
    scaler.update()
    assert results["good"].applied
    assert results["bad"].pinned == ("wo",)


def test_evaluation_between_backward_and_step_is_not_looked_into() -> None:
    model = net()
    optimizer, scaler = optimizer_of(model), GradScaler(heal="pin")
    scaler.watch(model)
    scaler.scale(loss_of(model)).backward()
    with torch.no_grad():
        loss_of(model.eval(), X * math.nan)
    model.train()
    assert scaler.step(optimizer).pinned == ("wo",)


def test_a_forward_method_that_refuses_a_second_run_is_said() -> None:
    class Once(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls > 1:
                raise RuntimeError("the iterator is used up")
            return super().forward(x)

    torch.manual_seed(0)
    model = Once()
    scaler = GradScaler(heal="pin")
    scaler.watch(model)
    before, hooks = state(model), [list(part._forward_hooks) for part in model.modules()]
    result = step(scaler, optimizer_of(model), lambda: loss_of(model))
    assert (result.applied, result.pinned) == (False, ())
    assert "the iterator is used up" in result.detail
    assert same(state(model), before)
    assert [list(part._forward_hooks) for part in model.modules()] == hooks


def test_code_of_the_models_own_forward_method_is_named_and_not_pinned() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return (y * 1e4) * 1e4 * 1e-8

    model = Own()
    optimizer, scaler = optimizer_of(model), GradScaler(heal="pin", patience=2)
    scaler.watch(model)
    result = step(scaler, optimizer, lambda: loss_of(model))
    assert (result.reason, result.culprits[0].name, pins(model)) == ("forward-overflow", "forward of Own", ())
    assert "submodule" in result.detail
    with pytest.raises(DivergedError) as caught:
        step(scaler, optimizer, lambda: loss_of(model))
    assert "fp32=forward" not in str(caught.value)  # a pattern that names no module is no remedy


def test_a_bad_step_of_a_model_that_nobody_watches_blames_no_earlier_pass() -> None:
    watched, other = net(), net(1.0)
    scaler = GradScaler(heal="skip")
    scaler.watch(watched)
    assert step(scaler, optimizer_of(watched), lambda: loss_of(watched)).culprits[0].name == "wo"
    result = step(scaler, optimizer_of(other), lambda: loss_of(other) * math.nan)
    assert (result.reason, result.culprits[0].name) == ("nonfinite-loss", "loss")


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_copies_of_a_watched_model_tell_nobody(clone) -> None:
    model = net(1.0)
    scaler = GradScaler(heal="pin")
    scaler.watch(model)
    twin = clone(model)
    with torch.no_grad():
        twin.wo.weight.mul_(1e6)
    loss_of(twin)
    result = step(scaler, optimizer_of(model), lambda: loss_of(model) * math.inf)
    assert result.culprits[0].name == "loss"
    assert pins(twin) == ()


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_a_copied_scaler_heals_as_the_first_does(clone) -> None:
    model, scaler = net(), clone(GradScaler(heal="pin"))
    scaler.watch(model)
    assert step(scaler, optimizer_of(model), lambda: loss_of(model)).pinned == ("wo",)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="heal='pinn'"):
        GradScaler(heal="pinn")


def test_a_model_that_its_user_cast_is_named_and_not_pinned() -> None:
    """The fp32 output of a pinned module would not suit the 16-bit layer after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.mul_(1000)
        model[2].weight.mul_(1000)
    model.half()
    scaler = GradScaler(heal="pin", enabled=False)
    scaler.watch(model)
    optimizer = halfstep.optim.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    result = step(scaler, optimizer, lambda: model(torch.randn(4, 8).half()).float().mean())
    assert (result.applied, result.pinned, result.culprits[0].name) == (False, (), "2")
