"""Schedules follow the steps that moved the weights: skips and accumulation do not use them up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from halfstep import Accelerator


def prepared(accelerator: Accelerator, before: bool, make=lambda o: LambdaLR(o, lambda n: 1 / (1 + n))):
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    if before:
        return accelerator.prepare(net, optimizer, make(optimizer))
    net, optimizer = accelerator.prepare(net, optimizer)
    return net, optimizer, accelerator.prepare(make(optimizer))


def backward(accelerator: Accelerator, net: nn.Module, good: bool) -> None:
    """A pass whose gradients are finite or not, with a finite loss in both cases."""
    handle = net.weight.register_hook(lambda g: g if good else g * float("inf"))
    accelerator.backward(net(torch.ones(2, 3)).square().mean() * 1e-3)
    handle.remove()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=10), st.booleans(), st.sampled_from(["no", "fp16"]))
def test_the_schedule_advances_once_per_applied_step(good: list[bool], before: bool, precision: str) -> None:
    """Warnings are errors here, so torch's warning about the order of the two calls would fail this test."""
    accelerator = Accelerator(precision, cpu=True)
    net, optimizer, scheduler = prepared(accelerator, before)
    applied = 0
    for fine in good:
        backward(accelerator, net, fine)
        assert bool(optimizer.step()) is fine
        scheduler.step()
        optimizer.zero_grad()
        applied += fine
        assert scheduler.last_epoch == applied == optimizer.applied
        assert scheduler.get_last_lr() == [1 / (1 + applied)] == [optimizer.param_groups[0]["lr"]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 4))
def test_inside_a_window_the_schedule_holds_still(good: list[bool], window: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    net, optimizer, scheduler = prepared(accelerator, before=True)
    whole = [all(good[i : i + window]) for i in range(0, len(good) - window + 1, window)]
    for fine in good:
        with accelerator.accumulate(net):
            backward(accelerator, net, fine)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.last_epoch == sum(whole)


@pytest.mark.parametrize("bad", [{3}, {0}, {0, 1}, {7}, set(range(4, 8))])
def test_a_schedule_per_epoch_advances_after_every_epoch_in_which_the_weights_moved(bad: set[int]) -> None:
    accelerator = Accelerator("fp16", cpu=True)
    net, optimizer, scheduler = prepared(accelerator, before=True, make=lambda o: StepLR(o, 1, gamma=0.5))
    rates = []
    for epoch in range(2):
        for i in range(4):
            backward(accelerator, net, 4 * epoch + i not in bad)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == ([0.5, 0.5] if bad == set(range(4, 8)) else [0.5, 0.25])


SCHEDULES = {
    "step": lambda o: StepLR(o, 2, gamma=0.5),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=20),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(o, [ExponentialLR(o, 0.9), StepLR(o, 2)], milestones=[3]),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("before", [True, False])
def test_torchs_schedules_give_the_rates_they_give_alone(name: str, before: bool) -> None:
    accelerator = Accelerator(cpu=True)
    net, optimizer, scheduler = prepared(accelerator, before, SCHEDULES[name])
    plain = nn.Linear(3, 1)
    other = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.5)
    alone: LRScheduler = SCHEDULES[name](other)
    for _ in range(8):
        backward(accelerator, net, True)
        assert optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        other.step()
        alone.step()
        assert scheduler.get_last_lr() == alone.get_last_lr()


def test_a_plateau_schedule_gets_its_metric() -> None:
    accelerator = Accelerator(cpu=True)
    net, optimizer, scheduler = prepared(accelerator, True, lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0))
    for metric in (1.0, 1.0, 1.0):
        backward(accelerator, net, True)
        optimizer.step()
        scheduler.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_state_of_a_schedule_is_that_of_the_inner_one() -> None:
    accelerator = Accelerator(cpu=True)
    net, optimizer, scheduler = prepared(accelerator, before=True)
    backward(accelerator, net, True)
    optimizer.step()
    scheduler.step()
    assert scheduler.state_dict() == scheduler.scheduler.state_dict()
    twin = prepared(Accelerator(cpu=True), before=True)[2]
    twin.load_state_dict(scheduler.state_dict())
    assert twin.last_epoch == 1
    with pytest.raises(AttributeError):
        _ = scheduler.nothing_of_this_name


def test_schedules_of_two_optimizers_follow_their_own() -> None:
    accelerator = Accelerator(cpu=True)
    nets = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(n.parameters(), lr=1.0) for n in nets]
    schedules = [LambdaLR(o, lambda n: 1 / (1 + n)) for o in optimizers]
    *nets, a, b, first, second = accelerator.prepare(*nets, *optimizers, *schedules)
    backward(accelerator, nets[0], False)
    a.step()
    a.zero_grad()
    backward(accelerator, nets[1], True)
    b.step()
    first.step()
    second.step()
    assert (first.last_epoch, second.last_epoch) == (0, 1)


def test_with_a_prepared_loader_the_short_last_window_counts() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net, optimizer, scheduler = prepared(accelerator, before=True)
    loader = accelerator.prepare(DataLoader(torch.ones(8, 3), batch_size=1))
    for x in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(x).sum() * 1e-3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.last_epoch == 3
