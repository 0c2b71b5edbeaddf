"""Weights as they stand, and copies of them that are out of date, each beside a healthy twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.amp import autocast, bind
from halfstep.optim import wrap
from halfstep.policy import parse
from halfstep.tracing import Finding, Observation
from halfstep.tracing.weights import Weights

CPU = torch.device("cpu")


def found(model: nn.Module, call: Callable[[], object] = lambda: None, compute: torch.dtype | None = None) -> list[Finding]:
    detector = Weights(compute)
    with Observation(model, [detector]):
        call()
    return detector.findings()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named_and_counted(value: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert found(model) == []
    with torch.no_grad():
        model[1].weight[0, 0] = value
    (finding,) = found(model)
    assert (finding.fault, finding.place.module, finding.place.kind) == ("weights", "1", "Linear")
    assert "weight has 1 non-finite weights of 16" in finding.what


def test_a_statistic_that_is_not_finite_is_reported_and_a_mask_of_inf_is_none() -> None:
    model = nn.BatchNorm1d(4)
    assert model.running_var is not None
    model.running_var[1] = float("inf")
    assert [f.fault for f in found(model)] == ["weights"]
    masked = nn.Linear(4, 4)
    masked.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    assert found(masked) == []


def test_fp16_weights_within_twice_of_the_limit_are_near_and_fp32_ones_beyond_it_overflow() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0] = 40000.0
    assert found(model) == []
    assert found(model, compute=torch.bfloat16) == []
    (near,) = found(model, compute=torch.float16)
    assert (near.fault, "40000, 61% of fp16's limit of 65504" in near.what) == ("near", True)
    half = [f.fault for f in found(nn.Linear(4, 4).requires_grad_(False).half())]
    assert half == []
    assert [f.fault for f in found(model.requires_grad_(False).half())] == ["near"]
    wide = nn.Linear(4, 4)
    with torch.no_grad():
        wide.weight[0, 0] = 70000.0
    assert [f.fault for f in found(wide, compute=torch.float16)] == ["overflow"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trainable_16_bit_weights_without_masters_are_one_finding(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    (finding,) = found(model)
    assert (finding.fault, finding.place.module) == ("masters", "0")
    assert f"4 trainable {'bf16' if dtype == torch.bfloat16 else 'fp16'} weights have nothing beside them (first: 0.weight)" in finding.what
    assert f"1/{256 if dtype == torch.bfloat16 else 2048}" in finding.what
    assert found(nn.Sequential(nn.Linear(4, 4)).to(dtype).requires_grad_(False)) == []
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(2, 4, dtype=dtype)).float().sum().backward()
    optimizer.step()
    assert found(model) == []


@pytest.mark.parametrize("policy", ["bf16-lean", "bf16-true", "fp16-true", "fp16-mixed"])
def test_a_model_under_a_policy_has_masters_or_fp32_weights(policy: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    bind(model, parse(policy), CPU)
    assert found(model, lambda: model(torch.ones(2, 16))) == []


class Kept(nn.Module):
    """A layer that keeps a cast of its weight."""

    def __init__(self, name: str = "narrow", turned: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))
        self.register_buffer(name, (self.weight.detach().mT if turned else self.weight.detach()).bfloat16().contiguous())


@pytest.mark.parametrize("turned", [False, True])
def test_a_kept_cast_that_is_out_of_date_is_stale(turned: bool) -> None:
    model = nn.Sequential(Kept(turned=turned))
    assert found(model) == []
    with torch.no_grad():
        model[0].weight.mul_(1.05)
    (finding,) = found(model)
    assert (finding.fault, finding.place.module, finding.place.kind) == ("stale", "0", "Kept")
    assert "narrow is a bf16 copy of weight from before weight changed" in finding.what


def test_a_stale_cast_in_an_attribute_or_a_list_is_found_and_an_average_or_another_tensor_is_none() -> None:
    model = nn.Linear(8, 8)
    model.casts = [model.weight.detach().half()]
    assert found(model) == []
    with torch.no_grad():
        model.weight.add_(0.01)
    assert [f.fault for f in found(model)] == ["stale"]
    model.casts = [torch.randn(8, 8).half()]
    assert found(model) == []  # it has nothing to do with the weight
    average = Kept("ema_weight")
    with torch.no_grad():
        average.weight.mul_(1.05)
    assert found(average) == []


def test_a_cast_that_outlives_a_change_of_its_weight_is_stale_and_one_made_anew_is_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    x = torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().pow(2).sum().backward()
        optimizer.step()

    def in_one_block() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step()
            step()

    def in_blocks() -> None:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step()

    def in_ours() -> None:
        with autocast("cpu", torch.bfloat16):
            step()
            step()

    (finding,) = found(model, in_one_block)
    assert (finding.fault, finding.place.module) == ("stale", "0")
    assert "a bf16 cast of 0.weight is used that was made before the weight changed (1 writes ago)" in finding.what
    assert found(model, in_blocks) == []
    assert found(model, in_ours) == []


@pytest.mark.parametrize("how", ["mul_", "lerp_", "foreach"])
def test_an_average_kept_in_16_bits_is_reported_and_in_fp32_is_not(how: str) -> None:
    def update(dtype: torch.dtype, decay: float) -> Callable[[], object]:
        average, weight = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
        if how == "mul_":
            return lambda: average.mul_(decay).add_(weight, alpha=1 - decay)
        if how == "lerp_":
            return lambda: average.lerp_(weight, 1 - decay)
        return lambda: torch._foreach_mul_([average], decay)

    model = nn.Identity()
    (finding,) = found(model, update(torch.bfloat16, 0.999))
    assert finding.fault == "masters"
    assert "0.999 is kept in bf16" in finding.what or "0.001 is kept in bf16" in finding.what
    assert found(model, update(torch.float32, 0.999)) == []
    assert found(model, update(torch.bfloat16, 0.9)) == []


def test_ops_on_activations_are_no_averages() -> None:
    x: Tensor = torch.ones(4).bfloat16()
    assert found(nn.Identity(), lambda: (x * 0.999, torch.lerp(x, x, 0.001), x.clone().mul_(0.5))) == []
