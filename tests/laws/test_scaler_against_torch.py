"""halfstep's GradScaler step by step against torch's own, and the exchange of their states."""

import contextlib
import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from halfstep.amp import GradScaler
from halfstep.errors import CheckpointError, ConfigError
from halfstep.policy import LossScale

OPTIMIZERS = {"sgd": lambda ps: SGD(ps, lr=0.05, momentum=0.9), "adamw": lambda ps: AdamW(ps, lr=0.01), "fused": lambda ps: AdamW(ps, fused=True)}
SETTINGS = {"init_scale": 2.0**12, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4}
TORCHS_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class Side:
    """One of two runs that see the same inputs and the same overflows."""

    def __init__(self, scaler: Any, optimizer: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 2)
        self.scaler = scaler
        self.optimizer: Optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, inputs: torch.Tensor, bad: float | None) -> float:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(inputs).square().mean()).backward()
        if bad is not None:
            assert self.model.bias.grad is not None
            with self.scaler.edits() if isinstance(self.scaler, GradScaler) else contextlib.nullcontext():
                self.model.bias.grad[1] = bad
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())


def torchs(**changes: Any) -> Any:
    return torch.amp.GradScaler("cpu", **(SETTINGS | changes))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_five_hundred_random_steps_agree_in_scale_and_weights(optimizer: str) -> None:
    ours, theirs = Side(GradScaler(**SETTINGS, strategy="stock"), optimizer), Side(torchs(), optimizer)
    chance, generator = random.Random(0), torch.Generator().manual_seed(7)
    scales = []
    for _ in range(500):
        inputs = torch.randn(4, 3, generator=generator)
        bad = chance.choice([math.inf, -math.inf, math.nan]) if chance.random() < 0.16 else None
        scale = ours.step(inputs, bad)
        assert scale == theirs.step(inputs, bad)
        assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
        scales.append(scale)
    assert len(set(scales)) > 8, "the scale must have gone up and down"
    assert min(scales) > 1.0
    assert max(scales) < 2.0**32
    assert set(ours.scaler.state_dict()) >= TORCHS_KEYS
    assert {k: ours.scaler.state_dict()[k] for k in TORCHS_KEYS} == theirs.scaler.state_dict()


def test_where_torchs_scale_leaves_the_bounds_ours_stays() -> None:
    ours, theirs = Side(GradScaler(init_scale=4.0, strategy="stock"), "sgd"), Side(torch.amp.GradScaler("cpu", init_scale=4.0), "sgd")
    for _ in range(6):
        inputs = torch.ones(1, 3)
        assert ours.step(inputs, math.inf) == max(1.0, theirs.step(inputs, math.inf))
    assert theirs.scaler.get_scale() < 1.0


@pytest.mark.parametrize("steps", [0, 3, 5])
def test_our_state_goes_on_in_torch_and_comes_back(steps: int) -> None:
    """Whoever holds the state, the next scales are the same."""
    ours, theirs = Side(GradScaler(**SETTINGS, strategy="stock"), "sgd"), Side(torchs(), "sgd")
    for i in range(steps):
        ours.step(torch.ones(1, 3), math.inf if i == 1 else None)
    theirs.scaler.load_state_dict(ours.scaler.state_dict())
    assert theirs.scaler.state_dict() == {k: ours.scaler.state_dict()[k] for k in TORCHS_KEYS}
    assert [ours.step(torch.ones(1, 3), None) for _ in range(6)] == [theirs.step(torch.ones(1, 3), None) for _ in range(6)]
    back = GradScaler(strategy="stock")
    back.load_state_dict(theirs.scaler.state_dict())
    assert {k: back.state_dict()[k] for k in TORCHS_KEYS} == theirs.scaler.state_dict()


def test_a_state_makes_a_round_trip_with_bounds_and_bad_steps() -> None:
    one = Side(
        GradScaler(init_scale=2.0**9, growth_factor=4.0, backoff_factor=0.25, growth_interval=7, floor=2.0, ceiling=2.0**20, strategy="stock"), "sgd"
    )
    for bad in (None, None, math.inf, None, math.inf, math.nan):
        one.step(torch.ones(1, 3), bad)
    other = GradScaler(strategy="stock")
    other.load_state_dict(one.scaler.state_dict())
    assert other.state_dict() == one.scaler.state_dict()
    assert other.bad_steps == 2
    assert other.get_scale() == 2.0**3
    assert (other.get_growth_factor(), other.get_backoff_factor(), other.get_growth_interval()) == (4.0, 0.25, 7)


@pytest.mark.parametrize("saved", [1000.0, 65535.0, 1.5, 3e9, 2.0**33, 0.25])
def test_a_scale_that_does_not_fit_is_rounded_into_the_bounds_with_a_warning(saved: float) -> None:
    scaler = GradScaler()
    with pytest.warns(UserWarning, match="not a power of two inside") as caught:
        scaler.load_state_dict(torchs(init_scale=saved).state_dict())
    expected = 2.0 ** math.floor(math.log2(min(max(saved, 1.0), 2.0**32)))
    assert scaler.get_scale() == expected
    assert f"{saved:g}" in str(caught[0].message)
    assert f"{expected:g}" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_fitting_scale_is_taken_over_without_a_word() -> None:
    scaler = GradScaler()
    scaler.load_state_dict(torchs(init_scale=2.0**20).state_dict())  # warnings are errors
    assert scaler.get_scale() == 2.0**20


@pytest.mark.parametrize("state", [{"growth_factor": 2.0}])
def test_a_state_without_a_scale_is_refused(state: dict[str, Any]) -> None:
    scaler = GradScaler()
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match="no loss scale") as caught:
        scaler.load_state_dict(state)
    assert "without a scaler" in caught.value.cause
    assert "init_scale" in caught.value.remedy
    assert scaler.state_dict() == before


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_the_state_of_a_run_that_had_failed_is_refused(scale: float) -> None:
    scaler = GradScaler()
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match="had failed") as caught:
        scaler.load_state_dict(before | {"scale": scale})
    assert f"{scale:g}" in caught.value.cause
    assert "older checkpoint" in caught.value.remedy
    assert scaler.state_dict() == before


def test_a_growth_factor_that_is_no_power_of_two_is_refused_and_nothing_changes() -> None:
    scaler = GradScaler()
    before = scaler.state_dict()
    with pytest.raises((CheckpointError, ConfigError), match=r"growth=1\.5"):
        scaler.load_state_dict(torchs(growth_factor=1.5).state_dict())
    assert scaler.state_dict() == before


def test_scaling_that_is_off_has_an_empty_state_and_ignores_states() -> None:
    scaler = GradScaler(enabled=False)
    assert scaler.state_dict() == {} == torch.amp.GradScaler("cpu", enabled=False).state_dict()
    scaler.load_state_dict({})
    scaler.load_state_dict(torchs().state_dict())
    assert scaler.get_scale() == 1.0


def test_a_static_scale_is_saved_and_taken_over() -> None:
    static = GradScaler.from_policy(LossScale("static", 1024.0))
    state = static.state_dict()
    assert state["scale"] == 1024.0
    other = GradScaler.from_policy(LossScale("static", 8.0))
    other.load_state_dict(state)
    assert other.get_scale() == 1024.0
    dynamic = GradScaler(growth_interval=9)
    dynamic.load_state_dict(state)
    assert dynamic.get_scale() == 1024.0
    assert dynamic.get_growth_interval() == 9
    static.load_state_dict(torchs(init_scale=2.0**5).state_dict())
    assert static.get_scale() == 32.0
