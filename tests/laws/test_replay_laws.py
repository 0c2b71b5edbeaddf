"""A step replayed at scale s is bit-identical to one first taken at s, with dropout, BatchNorm, other random draws and accumulation, in every door.

Each law trains twice: once with overflows that are replayed, and once told, before each step, the scale that the first run ended at;
nothing overflows in the second.
"""

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from halfstep import Accelerator, StepResult, Trainer, TrainerCallback, TrainingArguments
from halfstep.amp import GradScaler, autocast
from halfstep.checkpoint import capture
from halfstep.errors import DivergedError

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=1e-3, momentum=0.9),
    "adamw": lambda ps: AdamW(ps, lr=1e-3),
    "fused": lambda ps: AdamW(ps, lr=1e-3, fused=True),
}
DOORS = ("loop", "accelerator", "trainer")
START = 2.0**13


class Net(nn.Module):
    """Dropout, BatchNorm, and draws from Python's and numpy's random states too. `factor` makes the gradients of a row larger."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor, factor: Tensor) -> dict[str, Tensor]:
        predicted = self.net(x).float() + 0.1 * random.random() + 0.1 * float(numpy.random.rand())
        return {"loss": ((predicted - labels).square() * factor).mean(), "logits": predicted}


def rows(spikes: tuple[int, ...], factor: float = 2.0**12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(64, 4, generator=generator)
    return [{"x": x, "labels": x[:1], "factor": torch.tensor([factor if i in spikes else 1.0])} for i, x in enumerate(inputs)]


@dataclass
class Taken:
    """Everything after a run."""

    results: list[StepResult]
    weights_and_buffers: dict[str, Tensor]
    states: dict[str, Any]
    randomness: dict[str, Any]
    losses: list[float]


class Run:
    """Trains a `Net` by one door. scales: what the loss scale is set to before each step; None leaves it to the scaler."""

    def __init__(self, data: list[dict[str, Tensor]], optimizer: str, window: int, on_overflow: str, scales: list[float] | None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.data, self.window, self.on_overflow, self.scales = data, window, on_overflow, scales
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.results: list[StepResult] = []
        self.losses: list[float] = []

    def windows(self, steps: int) -> Iterator[list[dict[str, Tensor]]]:
        batches = []
        for i in range(steps * self.window):
            chosen = [self.data[(8 * i + k) % len(self.data)] for k in range(8)]
            batches.append({name: torch.stack([row[name] for row in chosen]) for name in chosen[0]})
        for i in range(steps):
            yield batches[i * self.window : (i + 1) * self.window]

    def set_scale(self, scaler: GradScaler) -> None:
        if self.scales is not None:
            scaler.update(self.scales[len(self.results)])

    def loop(self, steps: int) -> None:
        scaler = GradScaler(init_scale=START, strategy="stock", on_overflow=self.on_overflow)
        scaler.watch(self.model)
        for window in self.windows(steps):
            self.set_scale(scaler)
            for batch in window:
                with autocast("cpu", torch.float16):
                    loss = self.model(**batch)["loss"]
                scaler.scale(loss / self.window).backward()
            self.results.append(scaler.step(self.optimizer))
            scaler.update()
            self.optimizer.zero_grad()

    def accelerator(self, steps: int) -> None:
        precision = f"fp16-mixed,scale=dynamic:{START:g},scale_strategy=stock"
        accelerator = Accelerator(precision=precision, cpu=True, gradient_accumulation_steps=self.window, on_overflow=self.on_overflow)
        model, optimizer = accelerator.prepare(self.model, self.optimizer)
        for window in self.windows(steps):
            self.set_scale(accelerator.scaler)
            for batch in window:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
            self.results.append(accelerator.last_step)

    def trainer(self, steps: int, folder: Path) -> None:
        run = self

        class Conductor(TrainerCallback):
            def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
                run.set_scale(trainer.accelerator.scaler)

            def on_step_end(self, *_: Any, **kwargs: Any) -> None:
                run.results.append(trainer.accelerator.last_step)

        args = TrainingArguments(
            str(folder / f"run{self.scales is None}"),
            precision=f"fp16-mixed,scale=dynamic:{START:g},scale_strategy=stock",
            max_steps=steps,
            gradient_accumulation_steps=self.window,
            on_overflow=self.on_overflow,
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(self.model, args, train_dataset=self.data, callbacks=[Conductor], optimizers=(self.optimizer, None))
        trainer.train()
        self.losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]

    def by(self, door: str, steps: int, folder: Path) -> Taken:
        self.trainer(steps, folder) if door == "trainer" else getattr(self, door)(steps)
        states = copy.deepcopy(self.optimizer.state_dict()["state"])
        tensors = {name: value.clone() for name, value in self.model.state_dict().items()}
        return Taken(self.results, tensors, states, capture(), self.losses)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_twice(door: str, optimizer: str, window: int, spikes: tuple[int, ...], steps: int, folder: Path) -> Taken:
    """A run with replays, and the run told its scales: all the same bits."""
    data = rows(spikes)
    replayed = Run(data, optimizer, window, "replay", None).by(door, steps, folder)
    assert all(r.applied or (r.reason, r.scale) == ("overflow", 1.0) for r in replayed.results), "or no scale is low enough"
    told = Run(data, optimizer, window, "skip", [r.scale for r in replayed.results]).by(door, steps, folder)
    assert [(r.reason, r.replays) for r in told.results] == [(r.reason, 0) for r in replayed.results]
    assert [r.scale for r in told.results] == [r.scale for r in replayed.results]
    for name in ("grad_norm", "loss", "clipped"):
        assert [repr(getattr(r, name)) for r in told.results] == [repr(getattr(r, name)) for r in replayed.results], name  # NaN is NaN
    for name in ("weights_and_buffers", "states", "randomness", "losses"):
        assert same(getattr(told, name), getattr(replayed, name)), name
    return replayed


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_replayed_step_is_the_step_first_taken_at_that_scale(door: str, optimizer: str, window: int, tmp_path: Path) -> None:
    taken = check_twice(door, optimizer, window, (3, 27, 30), 6, tmp_path)
    assert sum(r.replays for r in taken.results) >= 2, "there was something to replay"
    assert any(r.replays == 0 for r in taken.results), "and steps before or after it that were not"
    for result in taken.results:
        assert result.next_scale <= result.scale


@pytest.mark.parametrize("door", DOORS)
def test_the_first_step_of_all_is_replayed_too(door: str, tmp_path: Path) -> None:
    taken = check_twice(door, "adamw", 2, tuple(range(64)), 2, tmp_path)
    assert taken.results[0].replays >= 2
    assert taken.results[0].scale <= START / 2 ** taken.results[0].replays


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_overflow_in_any_micro_batch_replays_the_whole_window(door: str, place: int, tmp_path: Path) -> None:
    """The spike is in micro-batch `place` of three; the Trainer shuffles, so there all rows of the data are spiked and it is in each."""
    spikes = tuple(range(64)) if door == "trainer" else (8 * place,)
    taken = check_twice(door, "sgd", 3, spikes, 2, tmp_path)
    assert taken.results[0].replays >= 1


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("seed", range(10))
def test_replays_at_random_places(door: str, optimizer: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    spikes = tuple(chance.sample(range(64), chance.randint(1, 6)))
    check_twice(door, optimizer, chance.randint(1, 4), spikes, 12, tmp_path)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_no_scale_can_mend_changes_nothing(door: str, value: float, tmp_path: Path) -> None:
    """Every row is bad: no step is applied, and weights and buffers are bit for bit as they were."""
    run = Run(rows(tuple(range(64)), value), "adamw", 2, "replay", None)
    before = copy.deepcopy(run.model.state_dict())
    taken = run.by(door, 2, tmp_path) if door != "trainer" else refused_by_trainer(run, tmp_path)
    assert taken.results
    assert not any(r.applied for r in taken.results)
    assert {r.reason for r in taken.results} <= {"nonfinite-loss", "forward-overflow", "overflow"}
    assert same(before, taken.weights_and_buffers)
    assert same({}, {k: v for k, v in taken.states.items() if v})
    assert all(1 <= r.next_scale <= START for r in taken.results)


def refused_by_trainer(run: Run, folder: Path) -> Taken:
    """The Trainer counts applied steps, so a run of bad ones ends with DivergedError."""
    with pytest.raises(DivergedError) as caught:
        run.by("trainer", 2, folder)
    states = copy.deepcopy(run.optimizer.state_dict()["state"])
    return Taken([caught.value.result], dict(run.model.state_dict()), states, {}, [])


@pytest.mark.parametrize("door", DOORS)
def test_skip_and_replay_differ_only_where_something_overflowed(door: str, tmp_path: Path) -> None:
    """Without spikes the two are one run; with them, skip loses a step."""
    runs = {mode: Run(rows(()), "adamw", 2, mode, None).by(door, 4, tmp_path / mode) for mode in ("skip", "replay", "raise")}
    for mode in ("replay", "raise"):
        assert all(r.applied and r.replays == 0 for r in runs[mode].results)
        for name in ("weights_and_buffers", "states", "randomness", "losses"):
            assert same(getattr(runs["skip"], name), getattr(runs[mode], name)), (mode, name)
    if door != "trainer":  # which counts applied steps, and would look at more data
        skipping = Run(rows((3,)), "adamw", 2, "skip", None).by(door, 4, tmp_path / "skipping")
        assert [r.reason for r in skipping.results].count("overflow") >= 1
