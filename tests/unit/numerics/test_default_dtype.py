"""Nothing depends on torch's default dtype of the moment, which loading a model changes: what is made is fp32 because it says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from halfstep import numerics
from halfstep.amp import GradScaler
from halfstep.numerics import blocks
from halfstep.optim import AdamW, FusedAdamW
from halfstep.step.verdict import gather


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def other(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def values(n: int) -> torch.Tensor:
    return torch.randn(n, dtype=torch.float32, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("signed", [True, False])
def test_states_in_8_bits(other: torch.dtype, signed: bool) -> None:
    x = values(300) if signed else values(300).square()
    expected = blocks.encode(x, signed)
    restored = blocks.decode(*expected, signed, x.shape)
    torch.set_default_dtype(other)
    codes, scales = blocks.encode(x, signed)
    assert torch.equal(codes, expected[0])
    assert scales.dtype == torch.float32
    assert torch.equal(scales, expected[1])
    again = blocks.decode(codes, scales, signed, x.shape)
    assert again.dtype == torch.float32
    assert torch.equal(again, restored)


def test_what_is_measured_on_gradients(other: torch.dtype) -> None:
    gradients = [values(40), values(7).half()]
    expected = gather(gradients, 1.0, None, sense=True)
    share = numerics.subnormal_share(gradients, 6e-5, torch.device("cpu"))
    torch.set_default_dtype(other)
    found = gather(gradients, 1.0, None, sense=True)
    assert found.values.dtype == torch.float32
    assert torch.equal(found.values, expected.values)
    assert torch.equal(numerics.subnormal_share(gradients, 6e-5, torch.device("cpu")), share)
    assert numerics.largest([], torch.device("cpu")).dtype == numerics.norm([], torch.device("cpu")).dtype == torch.float32


def trained(kind: type[torch.optim.Optimizer], scaled: bool) -> list[torch.Tensor]:
    model = nn.Linear(6, 4, dtype=torch.float32)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(p.numel()).view(p.shape) * (i + 1))
    optimizer = kind(model.parameters(), lr=0.1)
    scaler = GradScaler(enabled=scaled, init_scale=8.0, strategy="stock")
    for i in range(3):
        scaler.scale(model(values(12 + i).repeat(6)[:12].view(2, 6)).square().mean()).backward()
        assert scaler.step(optimizer, max_norm=0.5)
        scaler.update()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", [AdamW, FusedAdamW])
def test_steps(other: torch.dtype, kind: type[torch.optim.Optimizer], scaled: bool) -> None:
    expected = trained(kind, scaled)
    torch.set_default_dtype(other)
    for a, b in zip(trained(kind, scaled), expected, strict=True):
        assert torch.equal(a, b)
