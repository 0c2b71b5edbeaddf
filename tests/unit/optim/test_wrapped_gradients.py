"""Gradients of a wrapped optimizer: factors, formats, flags, and parameters without one."""

from typing import Any

import pytest
import torch
from odd_optimizers import close, feed
from odd_optimizers import tensors as made
from torch import nn, optim

from halfstep import amp
from halfstep.optim import attach, full_values, master_of
from halfstep.optim.wrap import Wrapped, wrap

SHAPES = ((4, 5), (6,), (2, 2, 3), ())


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return made(dtype, SHAPES)


def adamw(held: Any, **options: Any) -> Wrapped:
    return wrap(optim.AdamW(held, lr=0.01), weights="split", **options)


def test_parameters_without_a_gradient_and_frozen_ones_stay() -> None:
    held = tensors()
    frozen, idle = held[0].requires_grad_(False), held[1]
    kept = [p.detach().clone() for p in held]
    wrapped = adamw(held, bucket_bytes=1)
    for step in range(2):
        feed(held, step)
        frozen.grad = idle.grad = None
        wrapped.step()
    assert torch.equal(frozen, kept[0])
    assert torch.equal(idle, kept[1])
    assert master_of(frozen) is None
    assert frozen not in wrapped.state
    assert not torch.equal(held[2], kept[2])


def test_a_step_with_no_gradients_at_all_changes_nothing() -> None:
    held = tensors()
    wrapped = adamw(held)
    kept = [p.detach().clone() for p in held]
    wrapped.step()
    assert all(torch.equal(p, q) for p, q in zip(held, kept, strict=True))
    assert not wrapped.state


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)])
def test_a_factor_multiplies_gradients_on_the_way_in(factor: Any) -> None:
    one, other = tensors(torch.float32), tensors()
    plain, wrapped = optim.Adam(one, lr=0.01, eps=1e-3), wrap(optim.Adam(other, lr=0.01, eps=1e-3))
    feed(one)
    feed(other)
    for p in one:
        p.grad *= 0.25
    kept = [(p.grad, p.grad.clone()) for p in other]
    plain.step()
    wrapped.step(factor=factor)
    assert all(close(p, q) for p, q in zip(one, other, strict=True))
    assert all(p.grad is g and torch.equal(g, was) for p, (g, was) in zip(other, kept, strict=True))


def test_a_small_factor_loses_nothing_of_fp16_gradients() -> None:
    """2^-20 of an fp16 gradient is no fp16 number: the product is made in fp32."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float16))
    wrapped = wrap(optim.SGD([weight], lr=2.0**8))
    weight.grad = torch.tensor([2.0**-12], dtype=torch.float16)
    wrapped.step(factor=2.0**-20)
    assert float(full_values(weight)) == 1.0 - 2.0**-24


def test_fp32_gradients_of_16_bit_weights_are_taken_as_they_are() -> None:
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    wrapped = wrap(optim.SGD([weight], lr=1.0))
    weight.grad = torch.tensor([2.0**-20 + 2.0**-23])
    wrapped.step()
    assert float(full_values(weight)) == 1.0 - 2.0**-20 - 2.0**-23


def test_complex_and_double_weights_stay_what_they_are() -> None:
    def held() -> list[Any]:
        draws = torch.Generator().manual_seed(0)
        return [
            nn.Parameter(torch.randn(3, 2, generator=draws, dtype=torch.complex64)),
            nn.Parameter(torch.randn(4, generator=draws, dtype=torch.float64)),
            nn.Parameter(torch.randn(5, generator=draws)),
        ]

    one, other = held(), held()
    plain, wrapped = optim.AdamW(one, lr=0.01), wrap(optim.AdamW(other, lr=0.01), states="int8", bucket_bytes=1)
    for _ in range(3):
        for p, q in zip(one, other, strict=True):
            p.grad = torch.ones_like(p) * 0.5
            q.grad = torch.ones_like(q)
        plain.step()
        wrapped.step(factor=0.5)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert torch.allclose(one[2], other[2], atol=1e-4)
    assert wrapped.state[other[0]]["exp_avg"].dtype == torch.complex64
    assert wrapped.state[other[2]]["exp_avg"].dtype == torch.int8


def test_a_scaled_step_is_applied_or_refused() -> None:
    model = nn.Linear(4, 3)
    attach(model.weight, "split", torch.float16)
    wrapped = wrap(optim.AdamW(model.parameters(), lr=0.01), weights="split")
    scaler = amp.GradScaler("cpu")
    before = full_values(model.weight).clone()
    for bad in (False, True):
        with amp.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(5, 4)).square().mean() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        was = full_values(model.weight).clone()
        result = scaler.step(wrapped)
        assert bool(result) is not bad
        assert torch.equal(full_values(model.weight), was) is bad
        scaler.update()
        wrapped.zero_grad()
    assert not torch.equal(full_values(model.weight), before)
    assert wrapped.steps == 1


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"capturable": False, "maximize": True}])
def test_flags_act_on_the_fp32_copy(flags: dict[str, bool]) -> None:
    one, other = tensors(torch.float32), tensors()
    plain, wrapped = optim.Adam(one, lr=0.01, **flags), wrap(optim.Adam(other, lr=0.01, **flags))  # type: ignore[arg-type]
    for step in range(3):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert all(close(p, q) for p, q in zip(one, other, strict=True))
