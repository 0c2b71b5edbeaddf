"""The trainer's default: micro-batches whose gradients overflow are run again at a lower loss scale, so no batch is lost."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from halfstep import StepResult, Trainer, TrainerCallback, TrainingArguments
from halfstep.errors import DivergedError, StepRefusedError

STOCK = "fp16-mixed,scale=dynamic:65536,scale_strategy=stock"


class Net(nn.Module):
    """Dropout and BatchNorm. A row's factor makes its gradient larger; NaN spoils its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor, factor: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": ((self.net(x).squeeze(-1) - labels).float() * factor).square().mean()}


def rows(count: int = 32, spikes: set[int] = frozenset(), factor: float = 64.0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 3, generator=generator)
    return [{"x": x, "labels": x.sum(), "factor": torch.tensor(factor if i in spikes else 1 / 64)} for i, x in enumerate(inputs)]


class InOrder(Trainer):
    """Reads the data as it stands, so that a test knows which step gets the spike."""

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        loader.batch_sampler.shuffle = False
        return loader


class Listener(TrainerCallback):
    """Results and the number of each event; `scales` are set before each step."""

    def __init__(self, scales: list[float] | None = None, spoil: int | None = None) -> None:
        self.results: list[StepResult] = []
        self.events: dict[str, int] = {}
        self.scales, self.spoil, self.handle, self.trainer = scales, spoil, None, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scales:
            self.trainer.accelerator.scaler.update(self.scales[len(self.results)])
        if self.spoil == state.attempted:
            self.handle = kwargs["model"].net[0].weight.register_hook(lambda g: g * math.inf)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._over("on_step_end", kwargs["step_result"])

    def on_step_skipped(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._over("on_step_skipped", kwargs["step_result"])

    def _over(self, name: str, result: StepResult) -> None:
        self.events[name] = self.events.get(name, 0) + 1
        self.results.append(result)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def trained(place: Path, data: list[dict[str, Tensor]], listener: Listener | None = None, **settings: Any) -> tuple[Trainer, Listener, Tensor]:
    torch.manual_seed(0)
    listener = listener or Listener()
    defaults: dict[str, Any] = {
        "precision": STOCK,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_grad_norm": 0.0,
    }
    model = Net()
    args = TrainingArguments(str(place), **{**defaults, **settings})
    trainer = InOrder(model, args, train_dataset=data, callbacks=[listener], optimizers=(SGD(model.parameters(), lr=1e-4, momentum=0.9), None))
    listener.trainer = trainer
    trainer.train()
    return trainer, listener, torch.get_rng_state()


def everything(trainer: Trainer) -> list[Tensor]:
    states = [v for values in trainer.optimizer_in_use.state.values() for v in values.values() if v is not None]
    return [t.detach().clone() for t in (*trainer.model.state_dict().values(), *states)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
@pytest.mark.parametrize("spikes", [{0}, {9, 21}], ids=str)
def test_a_run_with_replays_is_the_run_told_its_scales(tmp_path: Path, accumulate: int, max_grad_norm: float, spikes: set[int]) -> None:
    settings = {"gradient_accumulation_steps": accumulate, "max_grad_norm": max_grad_norm}
    one, heard, random = trained(tmp_path / "a", rows(spikes=spikes), **settings)
    assert one.state.skipped_steps == 0
    assert [r.applied for r in heard.results] == [True] * 4
    assert sum(r.replays > 0 for r in heard.results) == one.state.replayed_steps >= 1
    other, told, random_too = trained(tmp_path / "b", rows(spikes=spikes), Listener([r.scale for r in heard.results]), on_overflow="skip", **settings)
    assert [(r.applied, r.replays, r.scale) for r in told.results] == [(True, 0, r.scale) for r in heard.results]
    assert all(torch.equal(a, b) for a, b in zip(everything(one), everything(other), strict=True))
    assert torch.equal(random, random_too)
    keys = ("loss", "grad_norm", "learning_rate", "applied", "skipped", "step")
    mine, theirs = ([{k: r[k] for k in keys} for r in t.state.log_history if "learning_rate" in r] for t in (one, other))
    assert mine == theirs


def test_the_forward_pass_is_run_again_and_events_tell_of_one_step(tmp_path: Path) -> None:
    trainer, heard, _ = trained(tmp_path, rows(spikes={5}))
    assert trainer.model.calls == 4 + sum(r.replays for r in heard.results)
    assert heard.events == {"on_step_end": 4}
    assert trainer.state.global_step == 4
    assert trainer.scheduler_in_use.last_epoch == 4
    assert int(trainer.model.net[1].num_batches_tracked) == 4


@pytest.mark.parametrize("precision", [STOCK, "fp16-mixed", "fp16-mixed,scale=static:256"])
def test_a_batch_that_no_scale_mends_is_skipped_and_costs_the_others_nothing(tmp_path: Path, precision: str) -> None:
    """Buffers have not seen it, and the loss scale is where it was."""
    data = rows(20)
    spoiled, heard, _ = trained(tmp_path / "a", data, Listener(spoil=2), precision=precision)
    assert [r.reason for r in heard.results] == ["applied", "applied", "overflow", "applied", "applied"]
    assert (spoiled.state.skipped_steps, spoiled.state.global_step) == (1, 4)
    bad = heard.results[2]
    assert bad.culprits[0].name == "net.0.weight"
    without = data[:8] + data[12:]
    undisturbed, quiet, _ = trained(tmp_path / "b", without, precision=precision)
    assert len(quiet.results) == 4
    assert heard.results[3].scale == bad.next_scale == heard.results[1].next_scale
    assert int(spoiled.model.net[1].num_batches_tracked) == int(undisturbed.model.net[1].num_batches_tracked)
    (skip,) = [r for r in spoiled.state.log_history if "reason" in r]
    assert skip["reason"] == "overflow"


def test_skip_loses_the_step_that_replay_keeps(tmp_path: Path) -> None:
    skipping, heard, _ = trained(tmp_path / "a", rows(spikes={0}), on_overflow="skip", num_train_epochs=1, max_steps=-1)
    replaying, kept, _ = trained(tmp_path / "b", rows(spikes={0}), num_train_epochs=1, max_steps=-1)
    assert skipping.state.skipped_steps >= 1
    assert replaying.state.skipped_steps == 0
    assert [r.replays for r in heard.results] == [0] * 8
    assert kept.results[0].replays >= 1


def test_raise_stops_the_run_and_logs_why(tmp_path: Path) -> None:
    with pytest.raises(StepRefusedError) as caught:
        trained(tmp_path, rows(spikes={0}), on_overflow="raise")
    assert caught.value.result.reason == "overflow"
    assert '"reason": "overflow"' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_loss_is_not_run_again(tmp_path: Path, value: float) -> None:
    trainer, heard, _ = trained(tmp_path, rows(spikes={0}, factor=value))
    assert (heard.results[0].reason, heard.results[0].replays) == ("nonfinite-loss", 0)
    assert trainer.model.calls == 5


def test_patience_counts_steps_and_not_replays(tmp_path: Path) -> None:
    listener = Listener()

    class Always(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.attempted == 0:
                kwargs["model"].net[0].weight.register_hook(lambda g: g * math.inf)

    torch.manual_seed(0)
    model = Net()
    before = copy.deepcopy(model.state_dict())
    args = TrainingArguments(str(tmp_path), precision=STOCK, max_steps=20, max_bad_steps=3, use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = InOrder(model, args, train_dataset=rows(), callbacks=[listener, Always()])
    with pytest.raises(DivergedError, match="3 steps in a row"):
        trainer.train()
    assert trainer.state.skipped_steps == 3
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_default_is_replay_and_other_words_are_refused(tmp_path: Path) -> None:
    assert TrainingArguments(str(tmp_path)).on_overflow == "replay"
    with pytest.raises(ValueError, match="on_overflow"):
        TrainingArguments(str(tmp_path), on_overflow="replai")


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_without_a_loss_scale_an_overflow_is_skipped_at_once(tmp_path: Path, precision: str) -> None:
    trainer, heard, _ = trained(tmp_path, rows(), Listener(spoil=1), precision=precision)
    assert [(r.reason, r.replays) for r in heard.results][1] == ("overflow", 0)
    assert trainer.model.calls == 5
