from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.amp import autocast
from halfstep.tracing import Finding, Observation
from halfstep.tracing.underflow import Underflow


class Net(nn.Module):
    """Two linear layers; gradients are made small by `factor` behind the first one."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.factor = nn.Linear(16, 16), nn.Linear(16, 16), factor

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.b(x * self.factor + (x - x * self.factor).detach())  # of the size of x, with gradients that are not


def lost(model: nn.Module, scale: float, route: str = "torch", scaled: bool = False, dtype: torch.dtype = torch.float16) -> list[Finding]:
    found = Underflow(scaled)
    block = {
        "plain": torch.autocast("cpu", enabled=False),
        "torch": torch.autocast("cpu", dtype),
        "halfstep": autocast("cpu", dtype),
    }[route]
    x = torch.linspace(-1, 1, 128).reshape(8, 16)
    if route == "plain":
        model, x = model.to(dtype), x.to(dtype)
    with Observation(model, [found]):
        with block:
            out = model(x)
        (out.float().square().mean() * scale).backward()
    return found.findings()


@pytest.mark.parametrize("route", ["plain", "torch", "halfstep"])
def test_gradients_that_become_0_are_named_where_it_begins(route: str) -> None:
    (finding,) = lost(Net(), 1e-7, route)
    assert (finding.fault, finding.place.direction) == ("underflow", "backward")
    assert "of 128 gradients" in finding.what
    assert "fp16 begins at 5.96e-08" in finding.what
    (finding,) = lost(Net(1e-6), 1e-1, route)
    assert finding.place.module == ""  # at the product with the factor, in the forward pass of the model itself
    assert lost(Net(), 1.0, route) == []
    assert lost(Net(1e-6), 1e4, route) == []


def test_a_scale_that_is_at_work_has_it_in_hand() -> None:
    assert lost(Net(), 1e-7, scaled=True) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_bf16_begins_where_fp32_begins(dtype: torch.dtype) -> None:
    assert lost(Net(), 1e-7, dtype=dtype) == []


def test_zeros_that_are_zeros_in_fp32_too_are_none() -> None:
    model = Net()
    with torch.no_grad():
        model.a.bias.fill_(-9.0)  # no unit of the first layer is on
    assert lost(model, 1.0) == []
