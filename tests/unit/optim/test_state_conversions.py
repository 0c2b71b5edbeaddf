"""States in other formats: converted where that is exact, refused whole where it would round or does not fit."""

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from saved_runs import STORAGES, Run, equal
from torch import nn

from halfstep.errors import CheckpointError
from halfstep.optim import HALF, AdamW, attach, full_values, master_of


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_a_split24_run_goes_on_as_a_split_run_with_the_same_masters(dtype: torch.dtype, attached: bool, order: str) -> None:
    net = [nn.Parameter((torch.randn(5000) * 0.1).to(dtype)) for _ in range(2)]  # enough for residuals at the end of their range
    first = AdamW([net[0]], lr=1e-3, weights="split24")
    for step in range(5):
        net[0].grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).to(dtype)
        first.step()
    expected, bits, state = full_values(net[0]), net[0].detach().clone(), copy.deepcopy(first.state_dict())
    made = master_of(net[0])
    assert made is not None
    assert made.residual is not None
    assert int(made.residual.min()) == -128
    if attached:
        attach(net[1], "split")
    second = AdamW([net[1]], weights="split")
    if order == "optimizer first":
        second.load_state_dict(state)
    with torch.no_grad():
        net[1].copy_(bits)
    if order == "model first":
        second.load_state_dict(state)
    second.param_groups[0].update(lr=0.0, weight_decay=0.0)
    net[1].grad = torch.zeros(5000).to(dtype)
    second.step()
    off = (full_values(net[1]).double() - expected.double()).abs()
    ulp = torch.finfo(torch.float32).eps * expected.abs().double()
    assert bool((off <= ulp).all())  # a step writes masters anew, and split moves the tie above an even number by an ulp of fp32
    assert float((off == 0).double().mean()) > 0.99
    now = master_of(net[1])
    assert now is not None
    assert now.storage.name == "split"


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_16_bit_run_goes_on_in_fp32_from_its_masters(storage: str, dtype: torch.dtype, order: str) -> None:
    run = Run(storage, dtype=dtype).steps(0, 6)
    saved, expected = run.save(), run.values()
    resumed = Run(None, dtype=torch.float32).load(saved, order)
    resumed.optimizer.state_dict()  # takes the masters up, as the next step does
    assert equal([p.detach() for p in resumed.net.parameters()], expected)
    reference = Run(None, dtype=torch.float32)
    reference.net.load_state_dict(dict(zip(reference.net.state_dict(), expected, strict=True)))
    reference.optimizer.load_state_dict({k: v for k, v in saved["optimizer"].items() if k != "masters"})
    assert equal(resumed.steps(6, 9).bits(), reference.steps(6, 9).bits())


def test_a_bf16_run_does_not_go_on_in_fp16() -> None:
    start = torch.linspace(0.1, 1.0, 200)
    narrow, other = nn.Parameter(start.bfloat16()), nn.Parameter(torch.zeros(200).half())
    first, second = AdamW([narrow], weights="split"), AdamW([other], weights="split")
    narrow.grad = torch.ones(200).bfloat16()
    first.step()
    with torch.no_grad():
        other.copy_(narrow)  # exactly: fp16 has more bits
    with pytest.raises(CheckpointError, match="bfloat16 weight, and the weight is float16 here"):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(full_values(other), other.float())
    assert not second.state


def test_an_fp32_run_goes_on_in_16_bits() -> None:
    run = Run(None, dtype=torch.float32).steps(0, 4)
    saved = run.save()
    resumed = Run("split", dtype=torch.bfloat16).load(saved).steps(4, 6)
    assert all(p.dtype == torch.bfloat16 for name, p in resumed.net.named_parameters() if name != "norm")
    for (name, p), q in zip(resumed.net.named_parameters(), run.steps(4, 6).net.parameters(), strict=True):
        assert bool(((full_values(p) - q.detach()).abs() <= 2.0**-8 * q.detach().abs() + 1e-4).all()), name


@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_encoded_states_go_on_in_fp32_with_the_same_values(kept: str) -> None:
    run = Run("split", kept).steps(0, 5)
    saved = run.save()
    resumed = Run("split", "fp32").load(saved)
    for p, q in zip(run.net.parameters(), resumed.net.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            if p not in run.optimizer.state:
                continue
            values = resumed.optimizer.state[q][key]
            assert values.dtype == torch.float32
            assert torch.equal(values, run.optimizer.decoded(run.optimizer.state[p], key, p))
    resumed.steps(5, 6)
    assert all(t.dtype == torch.float32 for s in resumed.optimizer.state.values() for t in s.values())


REFUSED = {
    "fp32 states in int8": (("split", "fp32"), ("split", "int8"), "int8 would round"),
    "fp32 states in bf16": (("split", "fp32"), ("split", "bf16"), "bf16 would round"),
    "bf16 states in int8": (("split", "bf16"), ("split", "int8"), "int8 would round"),
    "int8 states in bf16": (("split", "int8"), ("split", "bf16"), "bf16 would round"),
    "split masters in split24": (("split", "fp32"), ("split24", "fp32"), "split24 would round"),
    "split masters in kahan": (("split", "fp32"), ("kahan", "fp32"), "kahan would round"),
    "split masters without": (("split", "fp32"), ("plain", "fp32"), "plain would round"),
    "kahan masters by chance": (("kahan", "fp32"), ("stochastic", "fp32"), "stochastic would round"),
    "kahan masters in split": (("kahan", "fp32"), ("split", "fp32"), "split would round"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("begun", [True, False])
def test_a_conversion_that_would_round_is_refused_and_changes_nothing(case: str, begun: bool) -> None:
    one, other, words = REFUSED[case]
    saved = Run(*one).steps(0, 4).save()
    target = Run(*other).steps(0, 2 if begun else 0)
    refused_whole(target, saved["optimizer"], words)


def refused_whole(target: Run, state: Mapping[str, Any], words: str) -> None:
    before, settings = target.bits(), [{k: v for k, v in g.items() if k != "params"} for g in copy.deepcopy(target.optimizer.param_groups)]
    about = target.optimizer.steps, target.optimizer.seed
    with pytest.raises(CheckpointError, match=words) as caught:
        target.optimizer.load_state_dict(state)
    assert caught.value.remedy
    assert equal(target.bits(), before)
    assert [{k: v for k, v in g.items() if k != "params"} for g in target.optimizer.param_groups] == settings
    assert (target.optimizer.steps, target.optimizer.seed) == about
    twin = copy.deepcopy(target)
    assert equal(target.steps(2, 5).bits(), twin.steps(2, 5).bits())


def damaged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(Run("split", "int8").steps(0, 4).save()["optimizer"])
    change(state)
    return state


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "one group less": lambda s: s["param_groups"].pop(),
    "one weight less": lambda s: s["param_groups"][1]["params"].pop(),
    "no groups": lambda s: s.pop("param_groups"),
    "another shape": lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"][:-1]),
    "another shape of fp32 states": lambda s: s["state"].update(
        {0: {"step": torch.ones(()), "exp_avg": torch.ones(13, 20), "exp_avg_sq": torch.ones(13, 20)}}
    ),
    "too few scales": lambda s: s["state"][0].update(exp_avg_scale=s["state"][0]["exp_avg_scale"][:-1]),
    "a residual of another shape": lambda s: s["masters"][0].update(residual=torch.zeros(3, dtype=torch.int16)),
    "a master of nobody": lambda s: s["masters"].update({99: s["masters"][0]}),
    "an unknown storage": lambda s: s["masters"][0].update(storage="splat"),
    "a missing residual": lambda s: s["masters"][0].pop("residual"),
    "a master without its digest": lambda s: s["masters"][0].pop("digest"),
    "a master of an unknown dtype": lambda s: s["masters"][0].update(dtype="float8"),
    "a master of an fp32 dtype": lambda s: s["masters"][0].update(dtype="float32"),
    "one moment only": lambda s: s["state"][0].pop("exp_avg_sq"),
    "no step count": lambda s: s["state"][0].pop("step"),
    "signed codes of a second moment": lambda s: s["state"][0].update(exp_avg_sq=s["state"][0]["exp_avg_sq"].to(torch.int8)),
    "a residual of another dtype": lambda s: s["masters"][0].update(residual=s["masters"][0]["residual"].to(torch.int8)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: str) -> None:
    refused_whole(Run("split", "int8").steps(0, 2), damaged(DAMAGES[damage]), ".")


def test_weights_of_another_step_begin_at_themselves_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("split").steps(0, 5)
    weights = copy.deepcopy(run.net.state_dict())
    state = run.steps(5, 8).save()["optimizer"]
    resumed = Run("split", seed=9)
    resumed.net.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "halfstep"):
        resumed.steps(8, 9)
    assert [r for r in caplog.records if "weights are others now" in r.message and "same step" in r.message]
    begun = Run("split", seed=9)
    begun.net.load_state_dict(weights)
    begun.optimizer.load_state_dict({k: v for k, v in state.items() if k != "masters"})
    assert equal(resumed.values()[:2], begun.steps(8, 9).values()[:2])  # a scalar may be where it was


def test_right_weights_are_taken_up_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    saved = Run("split").steps(0, 5).save()
    with caplog.at_level(logging.WARNING, "halfstep"):
        Run("split", seed=9).load(saved, "optimizer first").steps(5, 6)
    assert not [r for r in caplog.records if "others now" in r.message]
