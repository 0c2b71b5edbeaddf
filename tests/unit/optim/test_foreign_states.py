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


# --- FusedAdamW, and torch's classes in a wrap: who takes whose state, and why others do not

TAKERS: dict[str, tuple[Callable[[Params], Any], set[str]]] = {
    "FusedAdamW": (FusedAdamW, {"AdamW", "Adam", "our AdamW"}),
    "AdamW": (lambda ps: wrap(torch.optim.AdamW(ps)), {"AdamW", "Adam", "our AdamW"}),
    "Adam": (lambda ps: wrap(torch.optim.Adam(ps)), {"Adam", "Adam with decay", "our AdamW"}),
    "SGD": (lambda ps: wrap(torch.optim.SGD(ps)), {"SGD", "SGD without momentum", "our SGD"}),
    "RMSprop": (lambda ps: wrap(torch.optim.RMSprop(ps)), {"RMSprop"}),
    "Adamax": (lambda ps: wrap(torch.optim.Adamax(ps)), {"Adamax"}),
    "NAdam": (lambda ps: wrap(torch.optim.NAdam(ps)), {"NAdam"}),
    "Adagrad": (lambda ps: wrap(torch.optim.Adagrad(ps)), {"Adagrad"}),
}


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in copy.deepcopy(optimizer.param_groups)]


@pytest.mark.parametrize("taker", TAKERS)
def test_stock_classes_take_states_of_their_kind_and_refuse_all_others_whole(taker: str) -> None:
    make, fits = TAKERS[taker]
    for source, (theirs, _, _) in MAKERS.items():
        saved_by = theirs([nn.Parameter(torch.ones(3))])
        stepped(saved_by, 2)
        optimizer = make([nn.Parameter(torch.ones(3))])
        before, states = settings_of(optimizer), str(dict(optimizer.state))
        if source in fits:
            optimizer.load_state_dict(copy.deepcopy(saved_by.state_dict()))
            stepped(optimizer, 1)
            continue
        with pytest.raises(CheckpointError, match=r"does not keep|it is of another optimizer than|weight_decay=") as refused:
            optimizer.load_state_dict(copy.deepcopy(saved_by.state_dict()))
        assert taker in str(refused.value), source
        assert str(dict(optimizer.state)) == states, source
        assert settings_of(optimizer) == before
        stepped(optimizer, 1)


def test_settings_that_torch_adds_when_it_loads_tell_nothing() -> None:
    """One that was loaded once has `fused`, `differentiable` and others in its groups that it was not made with."""
    for make, theirs in ((FusedAdamW, AdamW), (lambda ps: wrap(torch.optim.AdamW(ps)), AdamW), (lambda ps: wrap(torch.optim.SGD(ps)), SGD)):
        source = theirs([nn.Parameter(torch.ones(3))])
        stepped(source, 1)
        optimizer = make([nn.Parameter(torch.ones(3))])
        before = settings_of(optimizer)
        optimizer.load_state_dict(source.state_dict())
        assert [group.keys() for group in settings_of(optimizer)] == [group.keys() for group in before]
        for key in ("fused", "amsgrad", "differentiable"):
            assert optimizer.param_groups[0].get(key) == before[0].get(key)
        stepped(optimizer, 1)


def test_fused_adamw_goes_on_with_the_values_of_encoded_moments_and_refuses_masters() -> None:
    for states in ("bf16", "int8"):
        p, q = (nn.Parameter(torch.linspace(-1, 1, 300)) for _ in range(2))
        source = AdamW([p], states=states)
        stepped(source, 3)
        optimizer = FusedAdamW([q])
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[q][key], source.decoded(source.state[p], key, p))
        stepped(optimizer, 1)
        assert float(optimizer.state[q]["step"]) == 4
    narrow = nn.Parameter(torch.ones(3).bfloat16())
    source = AdamW([narrow])
    stepped(source, 1)
    with pytest.raises(CheckpointError, match=r"masters of 1 16-bit weights, and FusedAdamW keeps none\. Use halfstep\.optim\.AdamW"):
        FusedAdamW([nn.Parameter(torch.ones(3))]).load_state_dict(source.state_dict())


# --- settings that are loaded

BAD: list[tuple[str, str, Any]] = [
    *((name, "lr", value) for name in ("AdamW", "SGD", "Lion", "FusedAdamW", "wrapped AdamW", "wrapped SGD") for value in (math.nan, -1.0, math.inf)),
    *((name, "weight_decay", math.nan) for name in ("AdamW", "SGD", "Lion", "FusedAdamW", "wrapped AdamW", "wrapped SGD")),
    *((name, "betas", (1.5, 0.9)) for name in ("AdamW", "Lion", "FusedAdamW", "wrapped AdamW")),
    *((name, "eps", -1e-8) for name in ("AdamW", "FusedAdamW", "wrapped AdamW")),
    ("SGD", "momentum", 1.5),
    ("SGD", "nesterov", True),
    *(("wrapped SGD", "momentum", value) for value in (-0.5, math.nan)),
]
LOADERS: dict[str, Callable[[Params], Any]] = OURS | {
    "SGD": SGD,
    "FusedAdamW": FusedAdamW,
    "wrapped AdamW": TAKERS["AdamW"][0],
    "wrapped SGD": TAKERS["SGD"][0],
}


@pytest.mark.parametrize("name", LOADERS)
def test_settings_that_no_step_can_be_taken_with_are_not_loaded(name: str) -> None:
    for who, key, value in BAD:
        if who != name:
            continue
        optimizer = LOADERS[name]([nn.Parameter(torch.ones(3))])
        stepped(optimizer, 1)
        before, settings = copy.deepcopy(optimizer.state_dict()["state"]), settings_of(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0][key] = value
        with pytest.raises(CheckpointError, match=r"group 0 of the saved state cannot be used: .*\. Use another checkpoint"):
            optimizer.load_state_dict(saved)
        assert settings_of(optimizer) == settings
        assert str(optimizer.state_dict()["state"]) == str(before)
        saved["param_groups"][0] = copy.deepcopy(optimizer.state_dict()["param_groups"][0]) | {"lr": -1e-19}  # where a schedule ends
        optimizer.load_state_dict(saved)


def test_pairs_that_come_as_lists_are_kept_as_pairs() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for make in (AdamW, Lion):
        optimizer = make([{"params": [p]}, {"params": [q], "betas": [0.5, 0.75]}], betas=[0.5, 0.625])  # type: ignore[arg-type]
        assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.625), (0.5, 0.75)]
        saved = optimizer.state_dict()
        saved["param_groups"][0]["betas"] = [0.25, 0.5]  # as JSON gives it
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["betas"] == (0.25, 0.5)


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
