"""GradScaler's methods: what they accept, what they refuse and what they say."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from halfstep.amp import GradScaler
from halfstep.errors import ConfigError, StepOrderError
from halfstep.policy import PRESETS, LossScale, parse
from halfstep.step import Culprit, StepResult


def ready(**options: Any) -> tuple[nn.Parameter, SGD, GradScaler]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    return weight, SGD([weight], lr=0.5), GradScaler(**options)


def loss(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def test_the_defaults_are_torchs() -> None:
    ours, theirs = GradScaler(), torch.amp.GradScaler("cpu")
    assert ours.get_scale() == theirs.get_scale()
    assert ours.get_growth_factor() == theirs.get_growth_factor()
    assert ours.get_backoff_factor() == theirs.get_backoff_factor()
    assert ours.get_growth_interval() == theirs.get_growth_interval()
    assert ours.is_enabled()


@pytest.mark.parametrize("shape", [list, tuple, iter])
def test_every_loss_of_a_list_is_scaled(shape: Any) -> None:
    losses = [torch.tensor(1.5, requires_grad=True), torch.tensor(-2.0, requires_grad=True)]
    scaled = GradScaler(init_scale=8.0, strategy="stock").scale(shape(losses))
    assert isinstance(scaled, tuple if shape is tuple else list)
    assert [s.item() for s in scaled] == [12.0, -16.0]


def test_lists_in_lists_are_scaled() -> None:
    scaled = GradScaler(init_scale=2.0, strategy="stock").scale([loss(1.0), (loss(2.0), loss(3.0))])
    assert [scaled[0].item(), *(s.item() for s in scaled[1])] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("loss", [3.0, None, {"loss": torch.tensor(1.0)}, "loss"], ids=["float", "None", "dict", "str"])
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        GradScaler().scale(loss)
    assert type(loss).__name__ in caught.value.cause
    assert "loss tensor" in caught.value.remedy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_loss_is_scaled_in_fp32(dtype: torch.dtype) -> None:
    """60000 times 65536 does not fit fp16."""
    loss = torch.tensor(60000.0, dtype=dtype, requires_grad=True)
    scaled = GradScaler(strategy="stock").scale(loss)
    assert scaled.dtype == torch.float32
    assert scaled.item() == loss.item() * 65536.0
    scaled.backward()
    assert loss.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_losses_keep_their_format(dtype: torch.dtype) -> None:
    assert GradScaler().scale(torch.ones((), dtype=dtype, requires_grad=True)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_with_scaling_off_the_loss_is_handed_through(dtype: torch.dtype) -> None:
    loss = torch.ones((), dtype=dtype, requires_grad=True)
    assert GradScaler(enabled=False).scale(loss) is loss


def test_a_model_in_fp64_can_be_stepped() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer, scaler = SGD([weight], lr=0.5), GradScaler()
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer).applied
    assert torch.equal(weight.detach(), torch.full((2,), 0.5, dtype=torch.float64))


def test_the_device_is_that_of_the_first_loss() -> None:
    scaler = GradScaler()
    assert scaler.device is None
    scaler.scale(loss(1.0))
    assert scaler.device == "cpu"
    with pytest.raises(ConfigError, match="'cpu'"):
        scaler.scale(torch.ones((), device="meta"))


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_device_that_is_not_the_losss_is_refused(device: str, enabled: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        GradScaler(device, enabled=enabled).scale(torch.ones(()))
    assert repr(device) in caught.value.cause
    assert "'cpu'" in caught.value.cause
    assert "Leave the device out" in caught.value.remedy


def test_a_name_that_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="banana") as caught:
        GradScaler("banana").scale(torch.ones(()))
    assert caught.value.remedy


def test_the_device_may_be_given() -> None:
    assert GradScaler("cpu", init_scale=4.0, strategy="stock").scale(loss(1.0)).item() == 4.0


def test_a_closure_without_a_scaled_loss_is_refused() -> None:
    weight, optimizer, scaler = ready()
    for given in (optimizer, LBFGS([weight])):
        with pytest.raises(StepOrderError, match="the closure made gradients of a loss that was not scaled") as caught:
            scaler.step(given, lambda: weight.sum())
        assert "scaler.scale(loss).backward()" in caught.value.remedy
    assert torch.equal(weight.detach(), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("patience", [0, -1])
def test_no_patience_is_refused(patience: int) -> None:
    with pytest.raises(ConfigError, match=f"patience of {patience}") as caught:
        GradScaler(patience=patience)
    assert "1 or more" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"init_scale": 1000.0}, "1024"),
        ({"growth_factor": 1.5}, "growth"),
        ({"backoff_factor": 0.3}, "backoff"),
        ({"growth_interval": 0}, "1 or more"),
    ],
    ids=str,
)
def test_settings_that_would_round_gradients_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GradScaler(**options)
    assert word in str(caught.value)


def test_setters_change_one_setting_each() -> None:
    scaler = GradScaler(init_scale=64.0, floor=2.0, ceiling=2.0**10)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(3)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 3)
    state = scaler.state_dict()
    assert (state["scale"], state["floor"], state["ceiling"]) == (64.0, 2.0, 2.0**10)
    for setter, value in ((scaler.set_growth_factor, 3.0), (scaler.set_backoff_factor, 2.0), (scaler.set_growth_interval, 0)):
        with pytest.raises(ConfigError):
            setter(value)  # type: ignore[operator]
    assert scaler.state_dict() == state


@pytest.mark.parametrize("scaler", [GradScaler(enabled=False), GradScaler.from_policy(LossScale("static", 8.0))], ids=["off", "static"])
def test_growth_belongs_to_a_dynamic_scale(scaler: GradScaler) -> None:
    for call in (scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval, lambda: scaler.set_growth_interval(4)):
        with pytest.raises(ConfigError, match="dynamic loss scale") as caught:
            call()
        assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "enabled", "scale"),
    [("fp32", False, 1.0), ("bf16-mixed", False, 1.0), ("fp16-mixed", True, 65536.0), ("fp16-mixed,scale=static:128", True, 128.0)],
)
def test_a_policy_makes_its_scaler(text: str, enabled: bool, scale: float) -> None:
    scaler = GradScaler.from_policy(parse(text).scale, patience=3)
    assert (scaler.is_enabled(), scaler.get_scale()) == (enabled, scale)


def test_a_policys_window_and_bounds_reach_the_scaler() -> None:
    state = GradScaler.from_policy(parse("fp16-mixed,scale=dynamic:64,scale_window=5,scale_floor=2,scale_ceiling=256").scale).state_dict()
    assert (state["growth_interval"], state["floor"], state["ceiling"], state["scale"]) == (5, 2.0, 256.0, 64.0)
    assert GradScaler.from_policy(PRESETS["fp16-mixed"].scale).state_dict() == GradScaler().state_dict()


@pytest.mark.parametrize("value", [1024.0, torch.tensor(1024.0), torch.tensor([1024.0])], ids=["float", "tensor", "vector"])
def test_update_sets_a_new_scale(value: float | Tensor) -> None:
    scaler = GradScaler()
    scaler.update(value)
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("value", [1000.0, 0.0, -2.0, math.inf, math.nan, 2.0**33])
def test_update_refuses_what_is_no_loss_scale(value: float) -> None:
    scaler = GradScaler()
    with pytest.raises(ConfigError, match="new_scale") as caught:
        scaler.update(value)
    assert caught.value.remedy
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("value", [2.0, 2.0**12])
def test_update_keeps_the_scale_between_floor_and_ceiling(value: float) -> None:
    scaler = GradScaler(init_scale=64.0, floor=8.0, ceiling=1024.0)
    with pytest.raises(ConfigError, match="new_scale") as caught:
        scaler.update(value)
    assert caught.value.remedy
    assert scaler.get_scale() == 64.0


def test_update_without_scaling_does_nothing() -> None:
    scaler = GradScaler(enabled=False)
    scaler.update()
    scaler.update(1024.0)
    assert scaler.get_scale() == 1.0


def test_a_result_is_frozen_and_true_exactly_when_applied() -> None:
    weight, optimizer, scaler = ready(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    result = scaler.step(optimizer)
    assert bool(result) is result.applied is True
    assert result.reason == "applied"
    assert (result.scale, result.next_scale, result.culprits, result.clipped) == (4.0, 4.0, (), False)
    assert result.loss == 3.0
    assert result.grad_norm == pytest.approx(math.sqrt(2.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.applied = False  # type: ignore[misc]
    assert result == dataclasses.replace(result, loss_tensor=None)
    assert not StepResult(False, "overflow", culprits=(Culprit("w", "backward", math.inf),))
    assert StepResult(False, "stopped").loss is None


def test_the_loss_of_a_result_is_the_sum_of_the_unscaled_losses() -> None:
    weight, optimizer, scaler = ready()
    for factor in (1.0, 10.0):
        scaler.scale(weight.sum() * factor).backward()
    assert scaler.step(optimizer).loss == 33.0
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer).loss == float((torch.tensor([1.0, 2.0]) - 0.5 * 11.0).sum())


def test_a_bad_parameter_is_called_by_its_best_name() -> None:
    """The given name, else the name in the optimizer, else its place and shape."""
    for named, expected in (("given", "head.weight"), ("optimizer", "weight"), ("nobody", "param_groups[0]['params'][1] of shape (2,)")):
        first, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        optimizer = SGD([("other", first), ("weight", bad)] if named != "nobody" else [first, bad], lr=0.1)
        scaler = GradScaler()
        if named == "given":
            scaler.name_parameters([("head.weight", bad)])
        scaler.scale(bad.sum()).backward()
        assert bad.grad is not None
        with scaler.edits():
            bad.grad[0] = math.nan
        assert [c.name for c in scaler.step(optimizer).culprits] == [expected]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))], ids=["deepcopy", "pickle"])  # noqa: S301  our own bytes
def test_a_copy_goes_on_counting(way: Any) -> None:
    weight, optimizer, scaler = ready(init_scale=8.0, strategy="stock")
    for value in (1.0, 1.0, math.inf):
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    made = way(scaler)
    assert (made.steps, made.bad_steps, made.get_scale()) == (scaler.steps, scaler.bad_steps, scaler.get_scale()) == (2, 1, 8.0)
