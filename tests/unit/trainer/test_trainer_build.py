"""The optimizer and the schedules that the arguments describe."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import halfstep
from halfstep import TrainingArguments
from halfstep.errors import ConfigError
from halfstep.trainer.optimizers import make_optimizer
from halfstep.trainer.schedules import make_scheduler


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


@pytest.mark.parametrize(
    ("optim", "kind", "fused"), [("adamw_torch_fused", "FusedAdamW", True), ("adamw_torch", "AdamW", False), ("sgd", "SGD", None)]
)
def test_every_choice_of_optimizer(optim: str, kind: str, fused: bool | None) -> None:
    betas = {} if optim == "sgd" else {"adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 1e-3}
    optimizer = make_optimizer(model(), TrainingArguments(optim=optim, learning_rate=0.5, **betas))
    assert type(optimizer).__name__ == kind
    assert {g["lr"] for g in optimizer.param_groups} == {0.5}
    if kind == "AdamW":
        assert {(g["betas"], g["eps"], g["fused"]) for g in optimizer.param_groups} == {((0.8, 0.7), 1e-3, fused)}


@pytest.mark.parametrize(
    ("precision", "loaded", "kind"),
    [
        *((p, torch.float32, "torch") for p in ("fp32", "bf16-mixed", "fp16-mixed")),
        *((p, torch.bfloat16, "halfstep") for p in ("bf16-mixed", "fp16-mixed")),
        *((p, torch.float32, "halfstep") for p in ("bf16-lean", "fp16-lean", "bf16-true", "fp16-true", "bf16-mixed,states=int8", "fp32,states=bf16")),
    ],
)
def test_the_optimizer_that_is_chosen_is_torchs_for_fp32_weights_and_states_only(precision: str, loaded: torch.dtype, kind: str) -> None:
    args = TrainingArguments(precision=precision, learning_rate=0.5, adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-3, weight_decay=0.1, seed=7)
    optimizer = make_optimizer(model().to(loaded), args)
    assert type(optimizer) is (halfstep.optim.FusedAdamW if kind == "torch" else halfstep.optim.AdamW)
    assert kind != "torch" or isinstance(optimizer, torch.optim.AdamW)
    assert {(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups} == {(0.5, (0.8, 0.7), 1e-3)}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert kind == "torch" or optimizer.seed == 7


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_halfsteps_adamw_may_be_named(precision: str) -> None:
    assert type(make_optimizer(model(), TrainingArguments(optim="adamw_halfstep", precision=precision))) is halfstep.optim.AdamW


def test_weight_decay_is_for_matrices_only_and_frozen_parameters_are_left_out() -> None:
    net = model()
    net[2].weight.requires_grad_(False)
    optimizer = make_optimizer(net, TrainingArguments(weight_decay=0.1))
    decayed = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decayed == {id(net[0].weight): 0.1, id(net[0].bias): 0.0, id(net[1].weight): 0.0, id(net[1].bias): 0.0}


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model has no trainable parameter. Set requires_grad=True on those to train"):
        make_optimizer(model().requires_grad_(False), TrainingArguments())


def rates(kind: str, steps: int, **settings_: float) -> list[float]:
    args = TrainingArguments(lr_scheduler_type=kind, learning_rate=1.0, **settings_)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler, found = make_scheduler(optimizer, args, steps), []
    for _ in range(steps + 2):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["linear", "cosine", "constant", "constant_with_warmup"]), st.integers(1, 12), st.integers(0, 6))
def test_rates_are_those_of_transformers(kind: str, steps: int, warmup: int) -> None:
    from transformers import get_scheduler

    warmup = 0 if kind == "constant" else warmup
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs, expected = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=steps), []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(kind, steps, warmup_steps=warmup)[:steps] == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["linear", "cosine"]), st.integers(2, 20), st.floats(0, 1))
def test_the_rate_rises_once_to_the_given_one_and_falls_to_nothing(kind: str, steps: int, ratio: float) -> None:
    found = rates(kind, steps, warmup_ratio=ratio)
    peak = found.index(max(found))
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert found[-1] == pytest.approx(0.0, abs=1e-12) or ratio == 1
    assert max(found) == 1.0 or ratio > (steps - 1) / steps


def test_a_share_of_warm_up_is_rounded_up() -> None:
    assert rates("constant_with_warmup", 10, warmup_ratio=0.11) == [0.0, 0.5] + [1.0] * 10


def test_warm_up_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warm-up has no effect with lr_scheduler_type='constant'. Use constant_with_warmup"):
        rates("constant", 5, warmup_steps=2)
