"""The policy's storage is for 16-bit weights: an optimizer that has only the fp32 ones of a lean model trains them as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ConfigError
from halfstep.optim import with_masters
from halfstep.policy import parse


@pytest.mark.parametrize("kind", [halfstep.optim.AdamW, torch.optim.AdamW], ids=["ours", "torch's"])
@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean"])
def test_norms_alone_are_trained_on_a_frozen_16_bit_base(precision: str, kind: type) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(torch.bfloat16 if precision.startswith("bf16") else torch.float16)
    for part in (net[0], net[2]):
        part.requires_grad_(False)
    accelerator = halfstep.Accelerator(precision=precision, cpu=True)
    model, optimizer = accelerator.prepare(net, kind(net[1].parameters(), lr=0.1))
    before = [p.detach().clone() for p in net[1].parameters()]
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    assert optimizer.step()
    assert all(p.dtype == torch.float32 and not torch.equal(p, was) for p, was in zip(net[1].parameters(), before, strict=True))


MAKERS = {
    "ours": lambda ps, **asked: halfstep.optim.AdamW(ps, **asked),
    "wrapped": lambda ps, **asked: halfstep.optim.wrap(torch.optim.AdamW(ps), **asked),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_policy_is_for_all_weights_of_a_model_and_an_optimizer_may_have_only_fp32_ones(kind: str) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = MAKERS[kind]([p], policy="bf16-lean")
    p.grad = torch.ones(4)
    optimizer.step()
    assert bool((p < 1).all())
    assert optimizer.state[p]["exp_avg"].dtype == torch.int8
    with pytest.raises(ConfigError, match=r"made with weights=split, and the precision bf16-lean,weights=kahan has weights=kahan"):
        optimizer.follow(parse("bf16-lean,weights=kahan"))
    asked = MAKERS[kind]([p], policy="bf16-lean", weights="split")
    with pytest.raises(ConfigError, match=r"weights=split has no effect: all 1 parameters"):
        asked.step()


def test_an_optimizer_that_was_wrapped_for_a_policy_of_its_model_may_follow_another() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = with_masters(torch.optim.AdamW([p]), parse("bf16-lean"))
    assert (optimizer.weights, optimizer.codec.name) == ("split", "int8")
    optimizer.follow(parse("bf16-lean,weights=kahan,states=bf16"))
    assert (optimizer.weights, optimizer.codec.name) == ("kahan", "bf16")


def test_a_storage_that_was_asked_for_and_has_no_effect_is_refused() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    with pytest.raises(ConfigError, match="weights=split has no effect: all 1 parameters of this AdamW are fp32"):
        halfstep.optim.AdamW([p], weights="split").step()
