"""No step is lost to finding the loss scale: from every starting scale, with every kind of model, in every door."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from halfstep import Accelerator, StepResult, Trainer, TrainerCallback, TrainingArguments
from halfstep.amp import GradScaler, autocast
from halfstep.demo import GPT, GPTConfig

EXPONENTS = range(33)
SAMPLE = (0, 7, 16, 24, 32)
STEPS = 100
LARGEST_FP16 = 65504.0


class Regression(nn.Module):
    """Linear regression."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.net(x)
        return {"loss": nn.functional.mse_loss(predicted.float(), labels), "logits": predicted}


class Convolution(nn.Module):
    """A convolution, a BatchNorm and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class Amplifier(nn.Module):
    """Small inputs and large factors: the gradients of activations are 2^16 times those of the weights, and overflow long before."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.net(x / 2**14).float() * 2**12
        return {"loss": nn.functional.smooth_l1_loss(predicted, labels), "logits": predicted}


def regression() -> list[dict[str, Tensor]]:
    rows = torch.randn(32, 4)
    return [{"x": x, "labels": x.sum(0, keepdim=True)} for x in rows]


def pictures() -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(1, 4, 4), "labels": torch.tensor(i % 3)} for i in range(32)]


def small_signals() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": torch.stack((x.sum(), x[0]))} for x in torch.randn(32, 4)]


def text() -> list[dict[str, Tensor]]:
    ids = torch.randint(97, 123, (32, 8))
    return [{"input_ids": row, "labels": row} for row in ids]


def tiny_gpt() -> nn.Module:
    return GPT(GPTConfig(block_size=8, layers=1, heads=2, width=8))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Tensor]]]]] = {
    "regression": (Regression, regression),
    "convolution": (Convolution, pictures),
    "gpt": (tiny_gpt, text),
    "amplifier": (Amplifier, small_signals),
}


class Job:
    """A model with data, trained for some steps by one of the three doors; the results of all steps."""

    def __init__(self, case: str, exponent: int) -> None:
        torch.manual_seed(3)
        make, data = CASES[case]
        self.model, self.rows, self.exponent = make(), data(), exponent
        self.results: list[StepResult] = []
        self.backwards = 0

    def batches(self, steps: int) -> Iterator[dict[str, Tensor]]:
        for i in range(steps):
            rows = [self.rows[(8 * i + k) % len(self.rows)] for k in range(8)]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def loop(self, steps: int, strategy: str = "follow") -> "Job":
        optimizer = AdamW(self.model.parameters(), lr=1e-3)
        scaler = GradScaler(init_scale=2.0**self.exponent, strategy=strategy)
        for batch in self.batches(steps):
            with autocast("cpu", torch.float16):
                loss = self.model(**batch)["loss"]
            loss.register_hook(self.count)
            scaler.scale(loss).backward()
            self.results.append(scaler.step(optimizer))
            scaler.update()
            optimizer.zero_grad()
        return self

    def count(self, _: Tensor) -> None:
        self.backwards += 1

    def accelerator(self, steps: int) -> "Job":
        accelerator = Accelerator(precision=f"fp16-mixed,scale=dynamic:{2**self.exponent}", cpu=True)
        model, optimizer = accelerator.prepare(self.model, SGD(self.model.parameters(), lr=1e-3, momentum=0.9))
        for batch in self.batches(steps):
            accelerator.backward(model(**batch)["loss"])
            self.results.append(optimizer.step())
            optimizer.zero_grad()
        return self

    def trainer(self, steps: int, folder: Path) -> "Job":
        results = self.results

        class Listener(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                results.append(trainer.accelerator.last_step)

        settings: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "max_steps": steps}
        args = TrainingArguments(str(folder / "run"), precision=f"fp16-mixed,scale=dynamic:{2**self.exponent}", **settings)
        trainer = Trainer(self.model, args, train_dataset=self.rows, callbacks=[Listener])
        trainer.train()
        return self

    def by(self, door: str, steps: int, folder: Path) -> "Job":
        return self.trainer(steps, folder) if door == "trainer" else getattr(self, door)(steps)

    def lost(self) -> list[str]:
        """The steps that were not applied, and what was said of them."""
        return [f"{i}: {r}" for i, r in enumerate(self.results) if not r.applied]


def check(case: str, exponent: int, door: str, steps: int, folder: Path) -> None:
    job = Job(case, exponent).by(door, steps, folder)
    assert len(job.results) == steps
    assert job.lost() == []
    for result in job.results:
        assert result.reason == "applied"
        assert 1 <= result.scale <= 2.0**32
        assert math.frexp(result.scale)[0] == 0.5
        assert result.grad_norm is not None
        assert 0 < result.grad_norm < math.inf
    assert all(bool(torch.isfinite(p).all()) for p in job.model.parameters())


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_loop_loses_no_step_from_any_scale(exponent: int, tmp_path: Path) -> None:
    check("regression", exponent, "loop", STEPS, tmp_path)


@pytest.mark.parametrize("door", ["accelerator", "trainer"])
@pytest.mark.parametrize("exponent", [0, 16, 32])
def test_the_other_doors_lose_no_step(door: str, exponent: int, tmp_path: Path) -> None:
    check("regression", exponent, door, STEPS, tmp_path)


@pytest.mark.parametrize("case", [c for c in CASES if c != "regression"])
@pytest.mark.parametrize("exponent", [0, 32])
def test_other_models_lose_no_step(case: str, exponent: int, tmp_path: Path) -> None:
    check(case, exponent, "loop", 20, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["loop", "accelerator", "trainer"])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_no_door_loses_a_step_from_any_scale_with_any_model(door: str, case: str, exponent: int, tmp_path: Path) -> None:
    check(case, exponent, door, STEPS, tmp_path)


@pytest.mark.parametrize("case", list(CASES))
def test_without_calibration_steps_are_lost(case: str) -> None:
    """The same runs under torch's rule lose some, or the laws above would hold for want of an overflow."""
    assert Job(case, 32).loop(12, strategy="stock").lost()


@pytest.mark.parametrize("case", list(CASES))
def test_starts_that_overflow_all_calibrate_to_one_scale(case: str) -> None:
    """A search for the largest scale that goes through ends at the same one, wherever it began."""
    scales = {}
    for exponent in range(0, 33, 4):
        if Job(case, exponent).loop(1, strategy="stock").lost():
            scales[exponent] = Job(case, exponent).loop(1).results[0].scale
    assert len(scales) >= 3
    assert len(set(scales.values())) == 1, scales
    assert all(scale < 2.0**exponent for exponent, scale in scales.items())


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("exponent", SAMPLE)
def test_the_calibrated_scale_has_head_room_in_the_activations(case: str, exponent: int) -> None:
    """The same backward pass, run anew under eight times the calibrated scale, still gives finite gradients."""
    scale = Job(case, exponent).loop(1).results[0].scale
    again = Job(case, exponent)
    with autocast("cpu", torch.float16):
        loss = again.model(**next(again.batches(1)))["loss"]
    (loss * scale * 8).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in again.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_calibration_takes_at_most_eight_backward_passes_and_later_steps_none_more(exponent: int) -> None:
    first = Job("regression", exponent).loop(1).backwards
    assert 1 < first <= 9
    assert Job("regression", exponent).loop(11).backwards == first + 10


@pytest.mark.parametrize("case", list(CASES))
def test_calibration_disturbs_neither_random_state_nor_buffers_nor_gradients(case: str) -> None:
    """A first step that was probed equals, bit for bit, one taken at the scale that was found."""
    probed = Job(case, 32).loop(1)
    state = torch.get_rng_state()
    plain = Job(case, int(math.log2(probed.results[0].scale))).loop(1, strategy="stock")
    assert plain.results[0].scale == probed.results[0].scale
    assert torch.equal(state, torch.get_rng_state())
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, probed.model.state_dict()[name]), name
    assert plain.results[0].grad_norm == probed.results[0].grad_norm
    assert plain.results[0].loss == probed.results[0].loss


def test_gradients_that_are_all_zero_tell_nothing_and_the_next_step_calibrates() -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), GradScaler(init_scale=2.0**32)
    scaler.scale(model(torch.ones(1, 4)).sum() * 0).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with autocast("cpu", torch.float16):
        loss = model(torch.ones(1, 4)).sum()
    scaler.scale(loss).backward()
    result = scaler.step(optimizer)
    assert result.applied
    assert result.scale <= LARGEST_FP16
