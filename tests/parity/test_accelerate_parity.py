"""`halfstep.Accelerator` beside `accelerate.Accelerator` in fp32: one script, the same losses and weights step by step, unrounded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import halfstep

CLOSE, STEPS = 1e-5, 50


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """accelerate keeps the settings of a process's first accelerator."""
    for state in (AcceleratorState, GradientState):
        state._reset_state(*([True] if state is AcceleratorState else []))
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@dataclass
class Job:
    """What a script is about. samples: not a multiple of the batch, so the last batch of a pass is short."""

    samples: int = 58
    batch: int = 4
    accumulate: int = 1
    max_norm: float | None = None
    clip_value: float | None = None
    optimizer: Any = lambda ps: torch.optim.AdamW(ps, lr=1e-2)
    schedule: Any = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    windows: list[bool] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 3))


def script(accelerator: Any, job: Job, mean_of_window: bool = False) -> Outcome:
    """A training script as people write it for accelerate. mean_of_window: weigh the micro-batches of a short last window by its own length."""
    halfstep.accelerator.set_seed(1)
    data = TensorDataset(torch.randn(job.samples, 6), torch.randint(0, 3, (job.samples,)))
    model = network()
    optimizer = job.optimizer(model.parameters())
    schedule = job.schedule(optimizer) if job.schedule is not None else None
    loader = DataLoader(data, batch_size=job.batch, shuffle=True)
    valid = DataLoader(TensorDataset(torch.randn(10, 6)), batch_size=4)
    model, optimizer, loader, valid, schedule = accelerator.prepare(model, optimizer, loader, valid, schedule)
    out, steps, n = Outcome(), 0, job.accumulate
    while steps < STEPS:
        model.train()
        rest = len(loader) % n
        for i, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                short = mean_of_window and rest and i >= len(loader) - rest
                accelerator.backward(loss * n / rest if short else loss)
                if accelerator.sync_gradients and job.max_norm is not None:
                    out.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), job.max_norm)))
                if accelerator.sync_gradients and job.clip_value is not None:
                    accelerator.clip_grad_value_(model.parameters(), job.clip_value)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
            out.losses.append(loss.item())
            out.windows.append(accelerator.sync_gradients)
            out.rates.append(optimizer.param_groups[0]["lr"])
            steps += accelerator.sync_gradients
            assert not accelerator.optimizer_step_was_skipped
            if steps == STEPS:
                break
        model.eval()
        with torch.no_grad():
            scores = torch.cat([accelerator.gather_for_metrics(model(x)) for (x,) in valid])
        assert len(scores) == 10
        out.valid.append(float(scores.abs().sum()))
    out.weights = [p.detach().clone() for p in accelerator.unwrap_model(model).state_dict().values()]
    return out


JOBS = {
    "as it comes": Job(),
    "sgd": Job(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True)),
    "rmsprop": Job(optimizer=lambda ps: torch.optim.RMSprop(ps, lr=1e-3)),
    "accumulation": Job(samples=60, accumulate=3),
    "clipping by norm": Job(max_norm=0.3),
    "clipping by value": Job(clip_value=0.02),
    "cosine": Job(schedule=lambda o: CosineAnnealingLR(o, STEPS)),
    "warm-up and accumulation": Job(samples=60, accumulate=3, schedule=lambda o: LambdaLR(o, lambda k: min(1.0, (k + 1) / 10))),
    "one cycle": Job(schedule=lambda o: OneCycleLR(o, 0.02, total_steps=STEPS)),
    "schedule by itself": Job(schedule=lambda o: LambdaLR(o, lambda k: 0.99**k), settings={"step_scheduler_with_optimizer": False}),
    "everything": Job(samples=60, accumulate=5, max_norm=0.2, schedule=lambda o: CosineAnnealingLR(o, STEPS)),
}


def both(job: Job, mean_of_window: bool = False) -> tuple[Outcome, Outcome]:
    settings = {"cpu": True, "gradient_accumulation_steps": job.accumulate} | job.settings
    ours = script(halfstep.Accelerator(**settings), job)
    return ours, script(accelerate.Accelerator(**settings), job, mean_of_window)


def same(ours: Outcome, theirs: Outcome) -> None:
    """Every loss, norm, rate and end of a window, and the weights and buffers at the end."""
    assert sum(ours.windows) == STEPS
    assert ours.windows == theirs.windows
    for mine, other in ((ours.losses, theirs.losses), (ours.norms, theirs.norms), (ours.rates, theirs.rates), (ours.valid, theirs.valid)):
        assert len(mine) == len(other)
        assert max((abs(a - b) for a, b in zip(mine, other, strict=True)), default=0.0) <= CLOSE * max(1.0, *map(abs, [*other, 1.0]))
    assert len(set(ours.losses)) > STEPS // 2  # it does not stand still
    for a, b in itertools.zip_longest(ours.weights, theirs.weights):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", JOBS)
def test_the_same_script_gives_the_same_numbers(name: str) -> None:
    same(*both(JOBS[name]))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_short_last_window_is_the_mean_over_its_micro_batches(kind: str) -> None:
    """14 batches in windows of 4: the last has two. accelerate divides it by 4 all the same; weighed by hand it gives the same numbers as ours."""
    job = Job(samples=56, accumulate=4, max_norm=1.0, schedule=lambda o: CosineAnnealingLR(o, STEPS))
    if kind == "sgd":
        job.optimizer = JOBS["sgd"].optimizer
    same(*both(job, mean_of_window=True))


def test_what_accelerate_makes_of_a_short_window_is_smaller() -> None:
    """The one number that differs: the norm of the gradients of a short window is half of ours there: two divided by four."""
    job = Job(samples=56, accumulate=4, max_norm=1e9)
    ours, theirs = both(job)
    assert ours.norms[3] == pytest.approx(2 * theirs.norms[3], rel=1e-5)
    assert ours.norms[:3] == pytest.approx(theirs.norms[:3], rel=1e-5)
