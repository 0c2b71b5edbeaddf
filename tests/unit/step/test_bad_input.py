"""What cannot work is refused where it is given, with its cause, the names and numbers in it, and a remedy of one line."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam

from halfstep import Accelerator
from halfstep.amp import GradScaler
from halfstep.errors import CheckpointError, ConfigError, HalfstepError


def refused(call: Callable[[], Any], *words: str, kind: type[HalfstepError] = ConfigError) -> HalfstepError:
    """The error; it names all of `words`, and cause and remedy are one line each, of one sentence or two."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    for word in words:
        assert word in error.cause, f"{word!r} is not in {error.cause!r}"
    for part in (error.cause, error.remedy):
        assert part
        assert "\n" not in part
        assert len(part) < 330
        assert part == part.strip()
    assert error.remedy.endswith((".", ")", "?"))
    assert str(error) == f"{error.cause}. {error.remedy}"
    return error


def weight(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=dtype))


SCALERS: dict[str, dict[str, Any]] = {"follow": {}, "stock": {"strategy": "stock"}, "off": {"enabled": False}, "replay": {"on_overflow": "replay"}}


@pytest.mark.parametrize("value", [0.0, -2.0, 3.0, 0.0001, math.nan, math.inf, 2.0**33])
@pytest.mark.parametrize("name", ["init_scale", "floor", "ceiling"])
def test_scales_that_are_no_power_of_two_or_out_of_range(name: str, value: float) -> None:
    for strategy in ("follow", "stock"):
        error = refused(lambda strategy=strategy: GradScaler(strategy=strategy, **{name: value}))
        assert f"{value:g}" in error.cause


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"init_scale": 4.0, "floor": 8.0}, ["4", "8"]),
        ({"init_scale": 65536.0, "ceiling": 1024.0}, ["65536", "1024"]),
        ({"growth_factor": 0.5}, ["0.5"]),
        ({"growth_factor": 0.0}, ["growth"]),
        ({"growth_factor": 1.5}, ["1.5"]),
        ({"backoff_factor": 0.0}, ["backoff"]),
        ({"backoff_factor": 2.0}, ["2"]),
        ({"growth_interval": 0}, ["0"]),
        ({"patience": 0}, ["0"]),
        ({"strategy": "folow"}, ["folow"]),
        ({"on_overflow": "skp"}, ["skp"]),
    ],
    ids=str,
)
def test_settings_of_a_scaler_that_contradict_each_other_or_are_unknown(settings: dict[str, Any], words: list[str]) -> None:
    refused(lambda: GradScaler(**settings), *words)


@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, math.nan, math.inf, 2.0**40])
def test_a_new_scale_that_cannot_be_one_changes_nothing(value: float) -> None:
    scaler = GradScaler()
    refused(lambda: scaler.update(value), f"{value:g}")
    assert scaler.get_scale() == 65536.0
    refused(lambda: GradScaler(floor=4.0).update(2.0), "new_scale=2", "[4,")


NO_LOSSES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a number": (lambda: 3.0, ["float"]),
    "None": (lambda: None, ["NoneType"]),
    "text": (lambda: "loss", ["str"]),
    "a mapping": (lambda: {"loss": weight().sum()}, ["dict"]),
    "a list with a number": (lambda: [weight().sum(), 1.0], ["float"]),
    "an object": (object, ["object"]),
    "integers": (lambda: torch.tensor(1), ["int64"]),
    "booleans": (lambda: torch.tensor(True), ["bool"]),
    "complex": (lambda: weight(torch.complex64).sum(), ["complex64"]),
    "detached": (lambda: weight().sum().detach(), ["no graph", "detached"]),
    "frozen": (lambda: nn.Linear(2, 1).requires_grad_(False)(torch.ones(1, 2)).sum(), ["no graph", "frozen"]),
    "meta": (lambda: nn.Parameter(torch.ones(2, device="meta")).sum(), ["meta"]),
}


@pytest.mark.parametrize("scaler", list(SCALERS))
@pytest.mark.parametrize("kind", list(NO_LOSSES))
def test_what_is_no_loss_is_refused_by_name(kind: str, scaler: str) -> None:
    make, words = NO_LOSSES[kind]
    refused(lambda: GradScaler(**SCALERS[scaler]).scale(make()), *words)


@pytest.mark.parametrize("scaler", list(SCALERS))
def test_a_loss_under_no_grad_is_told_so(scaler: str) -> None:
    p = weight()
    with torch.no_grad():
        refused(lambda: GradScaler(**SCALERS[scaler]).scale(p.sum()), "torch.no_grad()")


@pytest.mark.parametrize("scaler", list(SCALERS))
def test_a_refused_loss_leaves_the_scaler_usable(scaler: str) -> None:
    p = weight()
    one, optimizer = GradScaler(**SCALERS[scaler]), SGD([p], lr=1.0)
    for make, _ in NO_LOSSES.values():
        with pytest.raises(ConfigError):
            one.scale(make())
    one.scale(p.sum()).backward()
    result = one.step(optimizer)
    assert (result.applied, result.loss) == (True, 2.0)
    assert torch.equal(p.detach(), torch.zeros(2))


@pytest.mark.parametrize("scaler", list(SCALERS))
def test_a_vector_loss_is_torchs_to_refuse_and_works_with_a_gradient(scaler: str) -> None:
    p = weight()
    one, optimizer = GradScaler(**SCALERS[scaler]), SGD([p], lr=1.0)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        one.scale(p * 2).backward()
    one.scale(p * 2).backward(gradient=torch.tensor([1.0, 0.25]))
    assert one.step(optimizer)
    assert torch.equal(p.detach(), torch.tensor([-1.0, 0.5]))


def test_a_loss_on_another_device_than_the_scalers() -> None:
    refused(lambda: GradScaler("cuda").scale(weight().sum()), "'cuda'", "'cpu'")
    scaler = GradScaler()
    scaler.scale(weight().sum())
    refused(lambda: scaler.scale(nn.Parameter(torch.ones(2, device="meta")).sum()), "'cpu'", "meta")


NO_OPTIMIZERS: dict[str, Callable[[], Any]] = {"a module": lambda: nn.Linear(2, 2), "None": lambda: None, "a list": lambda: [weight()]}


@pytest.mark.parametrize("kind", list(NO_OPTIMIZERS))
@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_what_is_no_optimizer_raises_and_harms_nothing(kind: str, method: str) -> None:
    p = weight()
    scaler, optimizer = GradScaler(), SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    with pytest.raises((HalfstepError, AttributeError, TypeError)):
        getattr(scaler, method)(NO_OPTIMIZERS[kind]())
    assert scaler.step(optimizer)
    assert torch.equal(p.detach(), torch.zeros(2))


def test_an_optimizer_of_another_model_is_told_which_parameters_the_loss_reaches() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(3, 1)
    scaler, optimizer = GradScaler(), SGD(other.parameters(), lr=0.1)
    scaler.name_parameters([*model.named_parameters(), *((f"other.{n}", p) for n, p in other.named_parameters())])
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    result = scaler.step(optimizer)
    assert (result.applied, result.reason) == (False, "no-gradients")
    for word in ("other.weight", "other.bias", "reach 2 other parameters", "weight, for example", "another model"):
        assert word in result.detail


def test_frozen_parameters_only_are_told_so() -> None:
    frozen, head = nn.Linear(2, 1).requires_grad_(False), nn.Linear(1, 1)
    scaler, optimizer = GradScaler(), SGD(frozen.parameters(), lr=0.1)
    scaler.scale(head(frozen(torch.ones(1, 2))).sum()).backward()
    assert "they are frozen (requires_grad=False)" in scaler.step(optimizer).detail


def test_an_optimizer_without_a_backward_pass_is_told_so() -> None:
    p = weight()
    scaler, optimizer = GradScaler(), SGD([p], lr=0.1)
    assert "no loss was seen" in scaler.step(optimizer).detail
    scaler.scale(p.sum())
    assert "no backward pass was run" in scaler.step(optimizer).detail


def test_an_optimizer_made_before_the_parameters_were_replaced_is_refused_by_prepare() -> None:
    changes: dict[str, Callable[[nn.Module], nn.Module]] = {
        "copied": copy.deepcopy,
        "cast and back": lambda m: copy.deepcopy(m).double().float(),
    }
    for change in changes.values():
        accelerator = Accelerator(mixed_precision="no", cpu=True)
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        changed = change(model)
        refused(lambda a=accelerator, m=changed, o=optimizer: a.prepare(m, o), "fp32 tensor on cpu for weight")


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_optimizer_states_on_another_device_are_named_with_both_devices(make: Callable[..., Optimizer]) -> None:
    model = nn.Linear(2, 1)
    scaler, optimizer = GradScaler(), make(model.parameters())
    scaler.name_parameters(model.named_parameters())
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if optimizer.state:
            break
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.state[model.bias]["exp_avg_sq"] = optimizer.state[model.bias]["exp_avg_sq"].to("meta")
    before = copy.deepcopy(model.state_dict())
    error = refused(lambda: scaler.step(optimizer), "bias is on cpu", "exp_avg_sq on meta")
    assert "Move the model first" in error.remedy
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tensor", [False, True])
def test_settings_of_an_optimizer_that_would_write_nan(name: str, value: float, tensor: bool) -> None:
    if tensor and name == "weight_decay":
        return  # torch takes a tensor for lr only
    p = weight()
    scaler, optimizer = GradScaler(), Adam([p], lr=torch.tensor(0.1) if tensor else 0.1, foreach=False)
    optimizer.param_groups[0][name] = torch.tensor(value) if tensor else value
    scaler.scale(p.sum()).backward()
    refused(lambda: scaler.step(optimizer), f"{name} of parameter group 0 is {value:g}")
    assert torch.equal(p.detach(), torch.ones(2))


def test_sparse_gradients_work_and_bad_ones_are_named() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    scaler, optimizer = GradScaler(), SparseAdam(table.parameters(), lr=0.1)
    scaler.name_parameters(table.named_parameters())
    for factor in (1.0, 1e30):
        before = table.weight.detach().clone()
        scaler.scale((table(torch.tensor([1, 1, 2])) * factor).sum()).backward()
        assert table.weight.grad.is_sparse
        result = scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert result.applied == (factor == 1.0)
        assert torch.equal(before, table.weight) != result.applied
    assert [c.name for c in result.culprits] == ["weight"]


def test_complex_gradients_work_and_bad_ones_are_named() -> None:
    p = nn.Parameter(torch.tensor([3.0 + 4.0j, 1.0]))
    scaler, optimizer = GradScaler(), Adam([p], lr=0.1)
    scaler.name_parameters([("phase", p)])
    scaler.scale(p.abs().square().sum()).backward()
    result = scaler.step(optimizer)
    assert result.applied
    assert result.grad_norm == pytest.approx(math.sqrt(4 * 26))
    scaler.update()
    optimizer.zero_grad()
    before = p.detach().clone()
    scaler.scale((p.imag * 1e30).sum()).backward()
    result = scaler.step(optimizer)
    assert (result.reason, [c.name for c in result.culprits]) == ("overflow", ["phase"])
    assert torch.equal(p.detach(), before)


def test_clipping_that_cannot_work() -> None:
    p = weight()
    scaler = GradScaler()
    scaler.scale(p.sum()).backward()
    for value in (-1.0, math.nan):
        refused(lambda value=value: scaler.clip_grad_norm_([p], value), f"max_norm={value}")
    assert float(scaler.clip_grad_norm_([], 1.0)) == 0.0


def test_states_that_cannot_be_gone_on_from() -> None:
    for state in ({"scale": 0.0}, {"scale": math.nan}, {"growth_factor": 2.0}):
        refused(lambda state=state: GradScaler(strategy="stock").load_state_dict(state), kind=CheckpointError)
    refused(lambda: GradScaler(strategy="stock").load_state_dict({}), kind=CheckpointError)
    refused(lambda: GradScaler(enabled=False).get_growth_factor(), "this scaler has none")
