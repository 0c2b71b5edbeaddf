"""Averages of weights in fp32: they move, they are put in and taken out exactly, and they resume."""

import copy

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import EMA, AdamW, attach, full_values, master_of


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(dtype)


def trained(net: nn.Module, average: EMA, steps: int, lr: float = 1e-5) -> None:
    optimizer = AdamW(net.parameters(), lr=lr)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        average.update()


def test_the_average_of_16_bit_weights_follows_their_masters() -> None:
    net, wide = model(), model(torch.float32)
    wide.load_state_dict({k: v.float() for k, v in net.state_dict().items()})
    average, reference = halfstep.ema(net, 0.99), halfstep.ema(wide, 0.99)
    trained(net, average, 50)
    trained(wide, reference, 50)
    for name, values in average.averages.items():
        assert values.dtype == torch.float32
        assert float((values - reference.averages[name]).abs().max()) <= 50 * 2.0**-23
        assert bool((values != dict(model().named_parameters())[name].float()).all())


@pytest.mark.parametrize("storage", ["split", "split24", "kahan"])
def test_what_is_put_in_is_taken_out_bit_for_bit(storage: str) -> None:
    net = model()
    for p in net.parameters():
        attach(p, storage)
    average = EMA(net, 0.5)
    trained(net, average, 5, lr=1e-2)
    before = [(p.detach().clone(), full_values(p)) for p in net.parameters()]
    with average.applied() as seen:
        assert seen is net
        for name, p in net.named_parameters():
            assert torch.equal(p.detach(), average.averages[name].bfloat16())
    for p, (weight, master) in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.detach(), weight)
        assert torch.equal(full_values(p), master)
    assert all(m._copy is None for p in net.parameters() if (m := master_of(p)) is not None), "no memory was taken for good"


def test_it_is_put_back_after_an_error_too() -> None:
    net = model(torch.float32)
    average = EMA(net)
    average.update()
    with torch.no_grad():
        net[0].weight.add_(1.0)
    weight = net[0].weight.detach().clone()

    def fail() -> None:
        with average.applied():
            assert not torch.equal(net[0].weight, weight)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert torch.equal(net[0].weight, weight)


def test_it_resumes_bit_for_bit() -> None:
    net = model()
    average = EMA(net, 0.9)
    trained(net, average, 3)
    saved = copy.deepcopy(average.state_dict())
    other = EMA(net, 0.5)
    other.load_state_dict(saved)
    average.update()
    other.update()
    assert other.decay == 0.9
    assert other.updates == average.updates == 4
    assert all(torch.equal(a, b) for a, b in zip(average.averages.values(), other.averages.values(), strict=True))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="decay=1"):
        EMA(model(), 1.0)
    average = EMA(model())
    with pytest.raises(ConfigError, match="no average yet"), average.applied():
        pass
    average.update()
    other = EMA(nn.Linear(6, 5))
    with pytest.raises(CheckpointError, match="another model"):
        other.load_state_dict(average.state_dict())
    with pytest.raises(CheckpointError, match="no averages"):
        other.load_state_dict({})
    assert not other.averages


def test_a_weight_that_came_later_stays_as_it_is() -> None:
    net = model(torch.float32)
    average = EMA(net)
    with torch.inference_mode():
        average.update()
    net.append(nn.Linear(2, 2))
    with average.applied():
        pass
    average.update()
    assert "2.weight" in average.averages
