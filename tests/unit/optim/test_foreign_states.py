"""States and settings that another optimizer made, or nobody: refused by name before anything changes, or taken with the numbers that they mean."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import SGD, AdamW, Lion, wrap
from halfstep.optim.fused import FusedAdamW

Params = list[nn.Parameter]
OURS: dict[str, Callable[[Params], Any]] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.5),
    "Lion": lambda ps: Lion(ps, lr=0.1),
}
MAKERS: dict[str, tuple[Callable[[Params], Optimizer], str, str]] = {  # the one of ours that takes its state, and why others do not
    "AdamW": (torch.optim.AdamW, "AdamW", "exp_avg|exp_avg_sq|eps"),
    "Adam": (torch.optim.Adam, "AdamW", "exp_avg|exp_avg_sq|eps"),
    "Adam with decay": (lambda ps: torch.optim.Adam(ps, weight_decay=0.1), "", "exp_avg|exp_avg_sq|eps|weight_decay=0.1 as a part"),
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9), "SGD", "momentum_buffer|momentum"),
    "SGD without momentum": (lambda ps: torch.optim.SGD(ps, lr=0.2), "SGD", "momentum"),
    "RMSprop": (torch.optim.RMSprop, "", "square_avg|alpha"),
    "Adamax": (torch.optim.Adamax, "", "exp_inf|exp_avg|eps"),
    "NAdam": (torch.optim.NAdam, "", "mu_product|momentum_decay"),
    "Adagrad": (torch.optim.Adagrad, "", "sum|eps"),
    "our AdamW": (OURS["AdamW"], "AdamW", "exp_avg|exp_avg_sq|eps"),
    "our Lion": (OURS["Lion"], "Lion", "exp_avg|lacks eps|betas"),
    "our SGD": (OURS["SGD"], "SGD", "momentum_buffer|momentum"),
}


def stepped(optimizer: Any, count: int) -> None:
    for i in range(count):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.5 + i)
        optimizer.step()


@pytest.mark.parametrize(
    ("source", "fresh"), [(s, f) for s in MAKERS for f in (False, True) if (s, f) != ("Adamax", True)]
)  # that has Adam's settings
def test_a_state_of_another_optimizer_is_refused_whole(source: str, fresh: bool) -> None:
    make, fits, words = MAKERS[source]
    theirs = make([nn.Parameter(torch.ones(3))])
    stepped(theirs, 0 if fresh else 2)
    for name, mine in OURS.items():
        p = nn.Parameter(torch.ones(3))
        optimizer = mine([p])
        before = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(theirs.state_dict())
        if name == fits:
            optimizer.load_state_dict(saved)
            assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
            stepped(optimizer, 1)
            continue
        with pytest.raises(CheckpointError, match=words) as refused:
            optimizer.load_state_dict(saved)
        assert name in str(refused.value)
        assert optimizer.state_dict() == before


def test_a_state_of_before_maximize_takes_what_the_optimizer_was_made_with() -> None:
    for name, keys in (("AdamW", ("maximize",)), ("SGD", ("maximize", "nesterov", "dampening")), ("Lion", ("maximize",))):
        whole, resumed = (OURS[name]([nn.Parameter(torch.ones(3))]) for _ in range(2))
        stepped(whole, 2)
        saved = copy.deepcopy(whole.state_dict())
        for key in keys:
            del saved["param_groups"][0][key]
        with torch.no_grad():
            resumed.param_groups[0]["params"][0].copy_(whole.param_groups[0]["params"][0])
        resumed.load_state_dict(saved)
        assert resumed.param_groups[0].keys() == whole.param_groups[0].keys()
        stepped(whole, 1)
        stepped(resumed, 1)
        assert torch.equal(whole.param_groups[0]["params"][0], resumed.param_groups[0]["params"][0])


def test_settings_of_the_users_own_come_with_the_state() -> None:
    for name, mine in OURS.items():
        optimizer = mine([nn.Parameter(torch.ones(3))])
        saved = optimizer.state_dict()
        saved["param_groups"][0] |= {"label": "head", "initial_lr": 0.5}
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["label"] == "head", name
        stepped(optimizer, 1)


WRONG: list[tuple[str, dict[str, Any]]] = [
    *((name, {"lr": lr}) for name in OURS for lr in ("a", None, True, -1.0, math.inf, torch.ones(2))),
    *((name, {"weight_decay": value}) for name in OURS for value in (None, -0.1, "a")),
    *((name, {"betas": value}) for name in ("AdamW", "Lion") for value in (0.9, None, "ab", ("a", "b"), (1.5, 0.9), (0.9,))),
    ("AdamW", {"eps": "1"}),
    *(("SGD", {"momentum": value}) for value in ("x", 1.5, 1, None)),
    ("SGD", {"dampening": "x"}),
]
CLASSES: dict[str, Any] = {"AdamW": AdamW, "SGD": SGD, "Lion": Lion}


@pytest.mark.parametrize("where", ["all", "a group", "a later group"])
def test_settings_that_no_step_can_be_taken_with_are_refused_everywhere(where: str) -> None:
    for name, wrong in WRONG:
        (key,) = wrong
        p = nn.Parameter(torch.ones(3))
        make = CLASSES[name]
        calls: dict[str, Callable[[], Any]] = {
            "all": partial(make, [p], **wrong),
            "a group": partial(make, [{"params": [p]} | wrong]),
            "a later group": partial(make([nn.Parameter(torch.ones(3))]).add_param_group, {"params": [p]} | wrong),
        }
        with pytest.raises(ConfigError, match=rf"^{key}=.* is out of range\. "):
            calls[where]()


def test_settings_that_are_numbers_of_other_kinds_are_taken() -> None:
    p = nn.Parameter(torch.ones(3))
    for lr in (1, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5).numpy()):
        for make in CLASSES.values():
            stepped(make([p], lr=lr), 1)
    stepped(AdamW([p], betas=[0, 0.5], eps=0), 1)


def test_a_misspelt_setting_of_a_group_is_refused_and_labels_are_not() -> None:
    p = nn.Parameter(torch.ones(3))
    for key, meant in (("lrr", "lr"), ("weight_deacy", "weight_decay"), ("beta", "betas")):
        with pytest.raises(ConfigError, match=f"key '{key}'.*'{meant}'"):
            AdamW([{"params": [p], key: 0.1}])
    labels = {"name": "head", "lr_scale": 0.5, "initial_lr": 0.1, "param_names": ["w"], "weight_decay_scale": 1.0, "lr_mult": 2, "layer": 3}
    assert labels.items() <= AdamW([{"params": [p]} | labels]).param_groups[0].items()


@pytest.mark.parametrize("seed", ["a", None, 1.5])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    for make in (AdamW, SGD, Lion):
        with pytest.raises(ConfigError, match=f"seed={seed!r} is not a whole number"):
            make([nn.Parameter(torch.ones(3))], seed=seed)
    with pytest.raises(ConfigError, match="whole number"):
        wrap(torch.optim.Adam([nn.Parameter(torch.ones(3))]), seed=seed)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf, "a", None])
def test_a_factor_that_would_spoil_every_weight_is_refused(factor: Any) -> None:
    makers: list[Callable[[Params], Any]] = [*OURS.values(), FusedAdamW, lambda ps: wrap(torch.optim.Adam(ps))]
    for make in makers:
        p = nn.Parameter(torch.ones(3))
        optimizer = make([p])
        p.grad = torch.ones(3)
        with pytest.raises(ConfigError, match=r"factor=.* is out of range"):
            optimizer.step(factor=factor)
        assert torch.equal(p.detach(), torch.ones(3))
        assert not getattr(optimizer, "steps", 0)


@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_was_resized_under_its_states_is_named(dtype: torch.dtype, states: str) -> None:
    """As `resize_token_embeddings` does it: the same parameter with another tensor in it."""
    first, table = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(8, 4, dtype=dtype))
    optimizer = Lion([first, table], lr=0.25, states=states)
    stepped(optimizer, 3)
    table.grad, table.data = None, torch.ones(10, 4, dtype=dtype)
    before = first.detach().clone()
    with pytest.raises(ConfigError, match=r"parameter 1 had 32 elements when its exp_avg was made, and has 40 of shape \(10, 4\) now\. Make"):
        stepped(optimizer, 1)
    assert optimizer.steps == 3
    assert torch.equal(first.detach(), before)
    stepped(Lion([first, table], lr=0.25, states=states), 1)
    assert torch.equal(table.detach(), torch.full((10, 4), 0.75, dtype=dtype))
