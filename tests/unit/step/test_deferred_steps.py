"""Verdicts that are read later: everything ends as if they had been read at once, whatever comes between."""

import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from halfstep import Accelerator, StepResult
from halfstep import checkpoint as checkpoints
from halfstep.amp import GradScaler
from halfstep.errors import DivergedError, HalfstepError
from halfstep.step.deferred import Pending, can_defer

MAKERS: dict[str, Any] = {
    "adamw": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "adam": lambda ps: Adam(ps, lr=0.01, fused=True, weight_decay=0.1),
    "momentum": lambda ps: SGD(ps, lr=0.01, momentum=0.9, fused=True),
    "sgd": lambda ps: SGD(ps, lr=0.01, fused=True),
    "amsgrad": lambda ps: AdamW(ps, lr=0.01, amsgrad=True, fused=True),
}


class Loop:
    """A model with BatchNorm, a schedule, an average and a counter."""

    def __init__(self, maker: str, deferred: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer: Optimizer = MAKERS[maker](self.model.parameters())
        self.scaler = GradScaler(deferred=deferred, **{"growth_interval": 3, **options})
        self.scaler.watch(self.model)
        self.schedule = self.scaler.follow(lr_scheduler.ExponentialLR(self.optimizer, 0.9))
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.scaler.on_applied(self.optimizer, self.after)
        self.results: list[StepResult] = []

    def after(self) -> None:
        for mean, p in zip(self.average, self.model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)

    def step(self, op: dict[str, Any]) -> None:
        x = op["x"]
        self.scaler.scale(self.model(x).square().mean() * op["factor"]).backward()
        if op["clip"] == "scaler":
            self.scaler.clip_grad_norm_(self.model.parameters(), 0.05)
        elif op["clip"] == "unscale":
            self.scaler.unscale_(self.optimizer)
        elif op["clip"] == "torch":
            self.scaler.unscale_(self.optimizer)
            for p in self.model.parameters():
                p.grad.mul_(0.5)
        self.results.append(self.scaler.step(self.optimizer))
        if op["read"]:
            assert self.results[-1].reason
        self.scaler.update(op["update"])
        self.schedule.step()
        self.optimizer.zero_grad(op["to_none"])

    def everything(self) -> dict[str, Any]:
        self.scaler.get_scale()
        return {
            "scaler": self.scaler.state_dict(),
            "weights": [p.detach().clone() for p in self.model.state_dict().values()],
            "states": copy.deepcopy(self.optimizer.state_dict()),
            "schedule": copy.deepcopy(self.schedule.state_dict()),
            "average": self.average,
            "bad": self.scaler.bad_steps,
            "applied": self.scaler.applied_steps(self.optimizer),
        }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def ops(seed: int, count: int, update: bool) -> list[dict[str, Any]]:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(6, 3, generator=generator),
            "factor": chance.choice([1.0] * 6 + [math.nan, math.inf, 1e30]),
            "clip": chance.choice(["no", "no", "scaler", "unscale", "torch"]),
            "read": chance.random() < 0.2,
            "update": chance.choice([None] * 5 + [2.0**8]) if update else None,
            "to_none": chance.random() < 0.5,
        }
        for _ in range(count)
    ]


FIELDS = ("applied", "reason", "clipped", "scale", "next_scale", "replays")


def check(maker: str, seed: int, update: bool = False, **options: Any) -> Loop:
    loops = [Loop(maker, deferred, **options) for deferred in (True, False)]
    for op in ops(seed, 14, update):
        for loop in loops:
            loop.step(op)
    mine, theirs = (loop.everything() for loop in loops)
    for name in mine:
        assert same(mine[name], theirs[name]), (name, mine[name], theirs[name])
    for i, (one, other) in enumerate(zip(loops[0].results, loops[1].results, strict=True)):
        for name in FIELDS:
            assert getattr(one, name) == getattr(other, name), (i, name)
        assert same(one.loss, other.loss)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5, nan_ok=True) or not one.applied
        assert bool(one.culprits) == bool(other.culprits)
    return loops[0]


@pytest.mark.parametrize("maker", list(MAKERS))
@pytest.mark.parametrize("options", [{"strategy": "stock"}, {"strategy": "follow"}, {"enabled": False}], ids=["stock", "follow", "off"])
def test_random_sequences_end_as_those_whose_verdicts_are_read_at_once(maker: str, options: dict[str, Any]) -> None:
    for seed in range(2):
        check(maker, seed, **options)


@pytest.mark.parametrize("options", [{"strategy": "stock"}, {"strategy": "follow"}], ids=["stock", "follow"])
def test_a_scale_that_is_set_while_a_verdict_is_on_its_way_stays_set(options: dict[str, Any]) -> None:
    for seed in range(2):
        check("adamw", seed, update=True, **options)
    loop = Loop("sgd", True, strategy="stock")
    x = torch.randn(6, 3)
    loop.step({"x": x, "factor": 1e30, "clip": "no", "read": False, "update": 1024.0, "to_none": True})
    loop.step({"x": x, "factor": 1.0, "clip": "no", "read": False, "update": None, "to_none": True})
    assert loop.scaler.get_scale() == 1024.0


def test_something_was_deferred() -> None:
    loop = Loop("sgd", True)
    op = ops(0, 1, False)[0] | {"factor": 1.0, "clip": "no", "read": False}
    loop.step(op)
    assert type(loop.results[0]).__name__ == "DeferredResult"
    assert loop.results[0] == loop.results[0].settled()
    assert hash(loop.results[0]) == hash(loop.results[0].settled())
    assert "reason='applied'" in repr(loop.results[0])


@pytest.mark.parametrize("strategy", ["stock", "follow"])
def test_everything_that_tells_about_a_step_has_settled_it(strategy: str) -> None:
    """Each way of asking, by itself, right after a step whose verdict is not read."""
    asks: dict[str, tuple[Any, Any]] = {
        "bad_steps": (lambda loop: loop.scaler.bad_steps, 1),
        "get_scale": (lambda loop: loop.scaler.get_scale() < loop.results[0].scale, True),
        "state_dict": (lambda loop: loop.scaler.state_dict()["bad_steps"], 1),
        "applied_steps": (lambda loop: loop.scaler.applied_steps(loop.optimizer), 3),
        "schedule": (lambda loop: loop.schedule.state_dict()["last_epoch"], 3),
        "bool": (lambda loop: bool(loop.results[-1]), False),
    }
    x = torch.randn(6, 3)
    for name, (ask, expected) in asks.items():
        loop = Loop("sgd", True, strategy=strategy, growth_interval=100)
        for factor in (1.0, 1.0, 1.0, 1e30):
            loop.step({"x": x, "factor": factor, "clip": "no", "read": False, "update": None, "to_none": True})
        assert ask(loop) == expected, name


def test_a_schedule_that_is_saved_between_steps_is_not_one_behind() -> None:
    loop, x = Loop("sgd", True), torch.randn(6, 3)
    for done in range(1, 4):
        loop.step({"x": x, "factor": 1.0, "clip": "no", "read": False, "update": None, "to_none": True})
        assert loop.schedule.state_dict()["last_epoch"] == done


def test_a_checkpoint_of_an_accelerator_holds_the_schedule_of_its_last_step(tmp_path: Any) -> None:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    accelerator.scaler._engine.state.deferred = True  # as on a GPU
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0, fused=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 2)).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    parts = checkpoints.load(accelerator.save_state(tmp_path / "c")).parts
    assert parts["scheduler"]["last_epoch"] == 3
    assert parts["optimizer"]["param_groups"][0]["lr"] == 0.125


@pytest.mark.parametrize("where", ["next loss", "reading"])
def test_diverged_error_arrives_and_names_the_parameter(where: str) -> None:
    loop, x = Loop("sgd", True, patience=3, enabled=False), torch.randn(6, 3)
    op = {"x": x, "factor": 1e30, "clip": "no", "read": False, "update": None, "to_none": True}

    def run() -> None:
        for _ in range(4):
            loop.step(op | {"read": where == "reading"})

    before = copy.deepcopy(dict(loop.model.named_parameters()))
    with pytest.raises(DivergedError) as caught:
        run()
    assert len(loop.results) == 3
    assert "weight" in caught.value.cause
    assert caught.value.result.reason == "overflow"
    assert same(before, dict(loop.model.named_parameters()))


def test_a_nan_learning_rate_is_refused_before_anything_is_launched() -> None:
    for maker in ("sgd", "adamw"):
        loop, x = Loop(maker, True), torch.randn(6, 3)
        op = {"x": x, "factor": 1.0, "clip": "no", "read": False, "update": None, "to_none": True}
        loop.step(op)
        loop.optimizer.param_groups[0]["lr"] = math.nan
        before = copy.deepcopy(loop.model.state_dict())
        with pytest.raises(HalfstepError, match="lr of parameter group 0 is nan"):
            loop.step(op)
        assert all(torch.equal(before[n], p) for n, p in loop.model.named_parameters())


def test_two_optimizers_are_told_apart() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizers = [SGD([p], lr=0.1, fused=True) for p in (one, two)]
    scaler = GradScaler(deferred=True, strategy="stock")
    for optimizer in optimizers:
        scaler.watch(optimizer)
    for i in range(4):
        scaler.scale(one.sum() * (math.nan if i == 1 else 1.0)).backward()
        scaler.scale(two.sum() * (math.nan if i == 2 else 1.0)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert [scaler.applied_steps(o) for o in optimizers] == [3, 3]
    assert torch.allclose(one, two)


def test_a_first_step_of_an_optimizer_with_states_is_not_deferred() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    for maker, at_first in (("adamw", False), ("momentum", False), ("sgd", True)):
        optimizer = MAKERS[maker]([p])
        assert can_defer(optimizer) == at_first
        optimizer.step()
        assert can_defer(optimizer)
    assert not can_defer(AdamW([p]))


def test_a_pending_step_is_found_out_once_and_what_waits_runs_once_and_in_order() -> None:
    found: list[str] = []
    pending = Pending(lambda: found.append("found") or StepResult(True, "applied"))
    pending.then(lambda: found.append("first"))
    pending.then(lambda: found.append("second"))
    assert not pending.is_settled
    assert pending.settle() is pending.settle()
    pending.then(lambda: found.append("third"))
    assert found == ["found", "first", "second", "third"]
