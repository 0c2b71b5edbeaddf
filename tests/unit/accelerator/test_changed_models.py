"""A model that was cast, moved, extended or whose parameters were replaced since prepare() is noticed at the next step, by name."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from halfstep import Accelerator
from halfstep.accelerator.facts import Memory
from halfstep.errors import ConfigError, HalfstepError

X = torch.ones(4, 2)


def ready(precision: str = "fp16-mixed", steps: int = 1) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(precision=precision, cpu=True)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, loss: Callable[[], Tensor] | None = None) -> Any:
    accelerator.backward(model(X).float().square().mean() if loss is None else loss())
    result = optimizer.step()
    optimizer.zero_grad()
    return result


def refused(call: Callable[[], Any], *words: str) -> HalfstepError:
    with pytest.raises(ConfigError) as caught:
        call()
    for word in words:
        assert word in caught.value.cause, caught.value.cause
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("part", ["all", "1"])
@pytest.mark.parametrize(("dtype", "text"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_a_cast_model_is_named_with_both_formats_and_not_stepped(dtype: torch.dtype, text: str, part: str, steps: int) -> None:
    accelerator, model, optimizer = ready(steps=steps)
    (model if part == "all" else model[1]).to(dtype)
    before = copy.deepcopy(model.state_dict())
    refused(lambda: step(accelerator, model, optimizer), f"{'0' if part == 'all' else '1'}.weight was fp32", f"is {text} now")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_model_cast_to_fp64_is_named_too() -> None:
    accelerator, model, optimizer = ready("fp32")
    model.double()
    refused(lambda: step(accelerator, model, optimizer, lambda: model(X.double()).square().mean()), "0.weight was fp32", "is float64 now")


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed", "fp32"])
def test_a_moved_model_is_named_with_both_devices(precision: str) -> None:
    accelerator, model, optimizer = ready(precision)
    model.to("meta")
    refused(lambda: step(accelerator, model, optimizer, lambda: model(X.to("meta")).square().mean()), "cpu", "meta")


def test_a_cast_that_was_undone_has_rounded_the_weights() -> None:
    accelerator, model, optimizer = ready()
    model.half()
    model.float()
    refused(lambda: step(accelerator, model, optimizer), "rounded to 16 bits since the last step")


def test_a_new_parameter_that_nobody_updates_is_named() -> None:
    accelerator, model, optimizer = ready()
    model.extra = nn.Linear(1, 1, bias=False)
    refused(lambda: step(accelerator, model, optimizer, lambda: model.extra(model(X).float()).mean()), "extra.weight was added")


def test_a_new_parameter_that_gets_no_gradient_or_has_an_optimizer_is_welcome() -> None:
    accelerator, model, optimizer = ready()
    model.extra = nn.Linear(1, 1, bias=False)
    model[0].register_parameter("frozen", nn.Parameter(torch.ones(1), requires_grad=False))
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    before = model.extra.weight.detach().clone()
    assert step(accelerator, model, optimizer, lambda: model.extra(model[1](model[0](X)).float()).mean())
    assert not torch.equal(before, model.extra.weight)


def test_a_removed_parameter_is_no_fault() -> None:
    accelerator, model, optimizer = ready()
    model[0].bias = None
    assert step(accelerator, model, optimizer)


@pytest.mark.parametrize("how", ["module", "parameter"])
def test_a_parameter_replaced_after_prepare_is_not_left_untrained_in_silence(how: str) -> None:
    """A new head of the same shape: the optimizer still has the old one."""
    accelerator, model, optimizer = ready()
    if how == "module":
        model[1] = nn.Linear(3, 1)
    else:
        model[1].weight = nn.Parameter(torch.ones(1, 3))
    refused(lambda: step(accelerator, model, optimizer), "1.weight")


def test_parameters_replaced_before_prepare_are_not_left_untrained_in_silence() -> None:
    torch.manual_seed(0)
    accelerator, model = Accelerator(mixed_precision="fp16", cpu=True), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = AdamW(model.parameters())
    model[1] = nn.Linear(3, 1)

    def run() -> None:
        step(accelerator, *accelerator.prepare(model, optimizer))

    refused(run, "1.weight")


def test_weights_that_are_tied_before_prepare_leave_an_unused_one_in_the_optimizer_and_train() -> None:
    accelerator, model = Accelerator(mixed_precision="fp16", cpu=True), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    model[1].weight = model[0].weight
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model[0].weight.detach().clone()
    assert step(accelerator, model, optimizer)
    assert not torch.equal(before, model[1].weight)


def test_frozen_parameters_only_are_refused_at_the_loss() -> None:
    accelerator, model = Accelerator(mixed_precision="fp16", cpu=True), nn.Linear(2, 1).requires_grad_(False)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    refused(lambda: step(accelerator, model, optimizer), "no graph", "all 2 parameters of Linear are frozen")


def test_parameters_that_are_unfrozen_later_train() -> None:
    torch.manual_seed(0)
    accelerator, model = Accelerator(mixed_precision="fp16", cpu=True), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    assert step(accelerator, model, optimizer)
    assert not torch.equal(before, model[0].weight)


def test_a_second_optimizer_of_other_parameters_is_no_orphan() -> None:
    accelerator, _, _ = ready()
    other = nn.Parameter(torch.ones(2))
    prepared = accelerator.prepare(SGD([other], lr=0.1))
    accelerator.backward(other.square().sum())
    assert prepared.step()
    assert torch.allclose(other.detach(), torch.full((2,), 0.8))


def test_memory_at_the_address_of_memory_that_is_gone_is_another() -> None:
    """malloc may give out the block that was freed last, so a weight that was cast there and back may lie where it lay: here it is made to."""
    block = np.zeros(16, dtype=np.float32)
    p = nn.Parameter(torch.from_numpy(block))
    place, address = Memory(p), p.data_ptr()
    assert place.holds(p)
    assert place.holds(p.data.view(4, 4))
    p.data = p.data.half()
    assert not place.holds(p)
    p.data = torch.from_numpy(block)
    assert p.data_ptr() == address
    assert not place.holds(p)
