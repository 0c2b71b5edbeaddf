"""Hooks around the step of halfstep's optimizers run as torch runs them: all of them, once, in order; nowhere but there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.optim import SGD, AdamW, FusedAdamW, Lion
from halfstep.optim.copies import bare_step
from halfstep.optim.quiet import clear

KINDS = (AdamW, SGD, Lion, FusedAdamW)


def made(kind: Callable[..., Any]) -> Any:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 0.5)
    return kind([p], lr=0.1)


def listen(optimizer: Any, heard: list[str]) -> Callable[[], None]:
    handles = [
        register_optimizer_step_pre_hook(lambda *_: heard.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: heard.append("all, after")),
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
    ]
    return lambda: [handle.remove() for handle in handles] and None


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, torch.optim.AdamW])
def test_each_runs_once_and_in_torchs_order(kind: Callable[..., Any], profiled: bool) -> None:
    optimizer, heard = made(kind), list[str]()
    done = listen(optimizer, heard)
    with torch.autograd.profiler.profile(enabled=profiled) as profile:
        optimizer.step()
    done()
    assert heard == ["all, before", "before", "after", "all, after"]
    assert not profiled or f"Optimizer.step#{kind.__name__}.step" in {event.key for event in profile.key_averages()}


class Own(AdamW):
    """A subclass with a step of its own, which torch puts the hooks around."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        """Count, and step."""
        self.counted = getattr(self, "counted", 0) + 1
        return super().step(closure, factor=factor)


def test_a_subclass_with_a_step_of_its_own_has_them_once_too() -> None:
    optimizer, heard = made(Own), list[str]()
    done = listen(optimizer, heard)
    optimizer.step()
    done()
    assert heard == ["all, before", "before", "after", "all, after"]
    assert optimizer.counted == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_change_what_the_step_is_given(kind: Callable[..., Any]) -> None:
    optimizer, twin = made(kind), made(kind)
    optimizer.register_step_pre_hook(lambda self, given, named: (given, named | {"factor": 0.25}))
    optimizer.step()
    twin.step(factor=0.25)
    assert torch.equal(optimizer.param_groups[0]["params"][0], twin.param_groups[0]["params"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_bare_step_has_none(kind: Callable[..., Any]) -> None:
    optimizer, heard = made(kind), list[str]()
    done = listen(optimizer, heard)
    bare_step(optimizer)(optimizer)
    done()
    assert not heard
    assert bool((optimizer.param_groups[0]["params"][0] != 1).all())


class Noting(torch.optim.SGD):
    """Its zero_grad is its own."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Note that, and clear."""
        self.noted = set_to_none
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Noting, SGD])
def test_clearing_is_what_the_optimizers_own_method_does(kind: Callable[..., Any], set_to_none: bool) -> None:
    optimizer = made(kind)
    p = optimizer.param_groups[0]["params"][0]
    clear(optimizer, set_to_none)
    assert p.grad is None if set_to_none else bool((p.grad == 0).all())
    assert getattr(optimizer, "noted", set_to_none) is set_to_none
    assert hasattr(optimizer, "noted") == (kind is Noting)


def test_a_zero_grad_on_the_optimizer_itself_is_called() -> None:
    optimizer, called = made(torch.optim.SGD), list[bool]()
    optimizer.zero_grad = called.append
    clear(optimizer)
    assert called == [True]
