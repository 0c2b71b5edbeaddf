"""Two models that train against each other: each optimizer has its own loss, scale, verdict and window."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Accelerator

F = nn.functional


class Plain:
    """What the script calls, done by torch alone, for windows of `n` micro-batches of equal size."""

    def __init__(self, n: int = 1) -> None:
        self.n = n

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.n).backward()


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizers(g: nn.Module, d: nn.Module):
    return torch.optim.Adam(g.parameters(), lr=1e-2), torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9)


def discriminator_loss(d: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    one = torch.ones(len(real), 1)
    return F.binary_cross_entropy_with_logits(d(real), one) + F.binary_cross_entropy_with_logits(d(fake.detach()), 1 - one)


def generator_loss(d: nn.Module, fake: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(d(fake), torch.ones(len(fake), 1))


def data(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, generator=generator), torch.randn(count, 3, generator=generator)


def train(accelerator, g, d, g_optimizer, d_optimizer, batches) -> None:
    for real, noise in batches:
        fake = g(noise)
        d_optimizer.zero_grad()
        accelerator.backward(discriminator_loss(d, real, fake))
        d_optimizer.step()
        g_optimizer.zero_grad()
        accelerator.backward(generator_loss(d, fake))
        g_optimizer.step()


def weights(*models: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for model in models for p in model.parameters()])


@pytest.mark.parametrize(("precision", "close"), [("no", 0.0), ("fp16", 5e-3), ("bf16", 3e-2)])
def test_both_train_as_by_hand(precision: str, close: float) -> None:
    batches = list(zip(*(part.split(4) for part in data()), strict=True))
    by_hand = pair()
    train(Plain(), *by_hand, *optimizers(*by_hand), batches)
    g, d = pair()
    start = weights(g, d)
    accelerator = Accelerator(precision, cpu=True)
    g, d, g_optimizer, d_optimizer = accelerator.prepare(g, d, *optimizers(g, d))
    train(accelerator, g, d, g_optimizer, d_optimizer, batches)
    assert (g_optimizer.applied, d_optimizer.applied) == (6, 6)
    assert float((weights(g, d) - weights(*by_hand)).abs().max()) <= close
    assert float((weights(g, d) - start).abs().max()) > 0.02


@pytest.mark.parametrize("bad", ["generator", "discriminator"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_step_that_one_must_leave_out_does_not_cost_the_other_its_step(bad: str, precision: str) -> None:
    g, d = pair()
    accelerator = Accelerator(precision, cpu=True)
    own = optimizers(g, d)
    schedules = [StepLR(o, 1) for o in own]
    g, d, g_optimizer, d_optimizer, *schedules = accelerator.prepare(g, d, *own, *schedules)
    real, noise = data(4)
    before = {"generator": weights(g), "discriminator": weights(d)}
    victim = g if bad == "generator" else d
    handle = next(victim.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    applied = {}
    accelerator.backward(discriminator_loss(d, real, g(noise)))
    applied["discriminator"] = d_optimizer.step().applied
    if bad == "discriminator":
        handle.remove()
    g_optimizer.zero_grad()
    accelerator.backward(generator_loss(d, g(noise)))
    applied["generator"] = g_optimizer.step().applied
    for schedule in schedules:
        schedule.step()
    assert applied == {"generator": bad != "generator", "discriminator": bad != "discriminator"}
    assert accelerator.optimizer_step_was_skipped
    assert (g_optimizer.step_was_skipped, d_optimizer.step_was_skipped) == (bad == "generator", bad == "discriminator")
    assert [s.last_epoch for s in schedules] == [int(bad != "generator"), int(bad != "discriminator")]
    after = {"generator": weights(g), "discriminator": weights(d)}
    assert {name: not torch.equal(before[name], after[name]) for name in before} == {name: name != bad for name in before}


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize(("micro", "size"), [(2, 12), (2, 10), (2, 2), (3, 10)])  # the last window is whole, or has one micro-batch, or two of three
def test_windows_of_several_keep_the_gradients_of_each(precision: str, micro: int, size: int) -> None:
    """`zero_grad` of one while the other's window goes on must not throw away what its micro-batches have given."""

    def run(window: int, batch: int):
        g, d = pair()
        accelerator = Accelerator(precision, cpu=True, gradient_accumulation_steps=window)
        own = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
        g, d, g_optimizer, d_optimizer, loader = accelerator.prepare(g, d, *own, DataLoader(TensorDataset(*data(size)), batch_size=batch))
        for real, noise in loader:
            with accelerator.accumulate(g, d):
                d_optimizer.zero_grad()
                accelerator.backward(d(real).square().mean())
                d_optimizer.step()
                g_optimizer.zero_grad()
                accelerator.backward(g(noise).square().mean())
                g_optimizer.step()
        return weights(g, d), g_optimizer.applied, d_optimizer.applied

    small, large = run(micro, 2), run(1, 2 * micro)
    assert small[1:] == large[1:] == (-(-size // (2 * micro)),) * 2
    assert torch.allclose(small[0], large[0], atol=1e-6 if precision == "no" else 2e-3)
    assert not torch.allclose(small[0], weights(*pair()), atol=4e-3)


def test_gradients_of_a_step_left_out_by_the_script_do_not_leak_into_the_next() -> None:
    g, _ = pair()
    accelerator = Accelerator(cpu=True)
    g, optimizer = accelerator.prepare(g, torch.optim.SGD(g.parameters(), lr=0.1))
    with accelerator.accumulate(g):
        accelerator.backward(g(torch.ones(2, 3)).sum() * 1e3)  # and no step
    before = weights(g)
    with accelerator.accumulate(g):
        optimizer.zero_grad()
        accelerator.backward(g(torch.ones(2, 3)).sum() * 1e-3)
        optimizer.step()
    assert 0 < float((weights(g) - before).abs().max()) < 1e-2
