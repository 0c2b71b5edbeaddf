"""A run that keeps an average of its weights: what is evaluated, saved and left, and that it resumes bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import halfstep
from halfstep import Trainer, TrainingArguments
from halfstep.checkpoint import export, load
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import full_values


class Model(nn.Module):
    def __init__(self, bad_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.calls, self.bad_at = 0, bad_at

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        if self.training:
            self.calls += 1
            if self.calls == self.bad_at:
                logits = logits * float("nan")
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


DATA = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "labels": i % 3} for i in range(40)]


def trainer(place: Path, model: nn.Module | None = None, callbacks: Any = (), **settings: Any) -> Trainer:
    own = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 8, "learning_rate": 0.05, "max_steps": 8, "logging_steps": 4}
    own |= {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 4, "ema_decay": 0.8}
    args = TrainingArguments(str(place), **own | settings)
    return Trainer(model or Model(), args, train_dataset=DATA, eval_dataset=DATA[:12], callbacks=callbacks)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: full_values(p) for n, p in model.named_parameters()} | {n: b.clone() for n, b in model.named_buffers()}


class Weights:
    """Notes the weights after each step that was applied."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.found.append(values(model))


def records(place: Path, key: str) -> list[dict[str, Any]]:
    return [r for line in (place / "metrics.jsonl").read_text().splitlines() if key in (r := json.loads(line))]


def test_evaluations_and_the_end_have_the_average(tmp_path: Path) -> None:
    seen = Weights()
    run = trainer(tmp_path / "a", callbacks=[seen], eval_on_start=True)
    run.train()
    expected = {n: v.clone() for n, v in seen.found[0].items()}
    for later in seen.found[1:]:
        for name, value in later.items():
            expected[name] = expected[name] + 0.2 * (value - expected[name]) if value.is_floating_point() else value
    found = values(run.model)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name
    assert not torch.equal(found["body.0.weight"], seen.found[-1]["body.0.weight"])
    assert run.average is not None
    assert run.average.updates == 8
    evaluated = records(tmp_path / "a", "eval_loss")
    assert [r["eval_weights"] for r in evaluated] == ["trained", "average", "average"]
    assert run.evaluate()["eval_loss"] == pytest.approx(evaluated[-1]["eval_loss"], rel=1e-6)
    assert run.state.log_history[-1]["eval_weights"] == "average"
    run.save_model(tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["body.0.weight"], found["body.0.weight"])


def test_what_is_learnt_does_not_depend_on_the_average(tmp_path: Path) -> None:
    last = {}
    for name, settings in {"with": {}, "weights": {"ema_in_evaluation": False}, "without": {"ema_decay": None}}.items():
        seen = Weights()
        run = trainer(tmp_path / name, callbacks=[seen], **settings)
        run.train()
        last[name] = seen.found[-1]
        if name != "with":
            assert all(torch.equal(v, last[name][n]) for n, v in values(run.model).items())
    assert (run.average, records(tmp_path / "without", "eval_weights")) == (None, [])
    assert {r["eval_weights"] for r in records(tmp_path / "weights", "eval_loss")} == {"trained"}
    for name in ("with", "weights"):
        assert all(torch.equal(v, last["without"][n]) for n, v in last[name].items()), name


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean", "bf16-lean,weights=split24", "fp16-mixed"])
def test_a_resumed_run_has_the_average_of_one_that_was_not_stopped(tmp_path: Path, precision: str) -> None:
    whole = trainer(tmp_path / "a", precision=precision, ema_warmup="ratio")
    whole.train()
    again = trainer(tmp_path / "a", precision=precision, ema_warmup="ratio")
    for file in (tmp_path / "a" / "checkpoint-8").iterdir():
        file.unlink()
    (tmp_path / "a" / "checkpoint-8").rmdir()
    again.train(resume_from_checkpoint=True)
    assert whole.average is not None
    assert again.average is not None
    assert again.average.updates == 8
    assert all(torch.equal(v, again.average.values()[n]) for n, v in whole.average.values().items())
    assert all(torch.equal(v, values(again.model)[n]) for n, v in values(whole.model).items())
    with pytest.raises(CheckpointError, match=r"ema_decay=0\.8.*ema_decay=0\.9"):
        trainer(tmp_path / "a", precision=precision, ema_warmup="ratio", ema_decay=0.9).train(resume_from_checkpoint=True)


def test_a_refused_step_does_not_move_it_and_a_replayed_one_moves_it_once(tmp_path: Path) -> None:
    run = trainer(tmp_path / "a", Model(bad_at=3), max_steps=5)
    run.train()
    assert run.state.skipped_steps == 1
    assert run.average is not None
    assert run.average.updates == run.state.global_step == 5

    class Raise:
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                run.accelerator.scaler.update(2.0**32)

    run = trainer(tmp_path / "b", precision="fp16-mixed,scale=dynamic:65536,scale_strategy=stock", max_steps=5, callbacks=[Raise()])
    run.train()
    assert (run.state.replayed_steps, run.state.skipped_steps) == (1, 0)
    assert run.average is not None
    assert run.average.updates == 5


def test_the_best_model_is_the_average_of_its_evaluation(tmp_path: Path) -> None:
    given, at = iter([1.0, 3.0, 2.0, 0.0]), []

    def metric(prediction: Any) -> dict[str, float]:
        at.append(values(run.model))
        return {"score": next(given)}

    run = trainer(tmp_path / "a", eval_steps=2, save_steps=2, load_best_model_at_end=True, metric_for_best_model="score")
    run.compute_metrics = metric
    run.train()
    assert run.state.best_global_step == 4
    assert run.average is not None
    assert run.average.updates == 4
    assert all(torch.equal(v, at[1][n]) for n, v in values(run.model).items())


def test_the_best_model_is_of_the_run_where_others_keep_averages_too(tmp_path: Path) -> None:
    class Others:
        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
            own, foreign = halfstep.ema(model, 0.1), halfstep.ema(nn.Linear(2, 2), 0.1)
            run.accelerator.register_for_checkpointing(own, foreign)
            for one in (own, foreign):
                run.accelerator.on_applied(run.optimizer_in_use, one.update)

    found = []
    for place, callbacks in (("a", []), ("b", [Others()])):
        run = trainer(tmp_path / place, max_steps=4, eval_steps=2, save_steps=2, load_best_model_at_end=True, callbacks=callbacks)
        run.train()
        assert run.average is not None
        assert run.average.decay == 0.8
        found.append(values(run.model))
    assert all(torch.equal(v, found[0][n]) for n, v in found[1].items())


def test_save_model_during_the_run_writes_what_is_evaluated(tmp_path: Path) -> None:
    class Save:
        def on_evaluate(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
            before = values(model)
            run.save_model(tmp_path / f"saved-{state.global_step}")
            assert all(torch.equal(v, before[n]) for n, v in values(model).items())

    run = trainer(tmp_path / "a", precision="bf16-lean,weights=split24", callbacks=[Save()])
    run.train()
    average = next(part for part in load(tmp_path / "a" / "checkpoint-4").parts.values() if isinstance(part, dict) and "averages" in part)
    saved = load_file(tmp_path / "saved-4" / "model.safetensors")
    assert all(torch.equal(saved[n], v) for n, v in (average["averages"] | average["buffers"]).items())
    exported = load_file(export(tmp_path / "a" / "checkpoint-4", tmp_path / "exported", weights="average") / "model.safetensors")
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[n], v) for n, v in exported.items())
    trainer(tmp_path / "b", ema_decay=None).train()
    with pytest.raises(CheckpointError, match="holds 0 averages"):
        export(tmp_path / "b" / "checkpoint-4", tmp_path / "none", weights="average")


def test_refusals(tmp_path: Path) -> None:
    for settings, said in (({"ema_decay": 1.0}, "too large"), ({"ema_decay": -0.1}, "too small"), ({"ema_warmup": "linear"}, "not known")):
        with pytest.raises(ConfigError, match=said):
            trainer(tmp_path, **settings)
    for settings in ({"ema_warmup": "ratio"}, {"ema_in_evaluation": False}):
        with pytest.raises(ConfigError, match="without ema_decay"):
            trainer(tmp_path, ema_decay=None, **settings)


def test_a_loop_of_ones_own_saves_the_average_on_request(tmp_path: Path) -> None:
    accelerator = halfstep.Accelerator(cpu=True, precision="bf16-lean")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    average = halfstep.ema(model, 0.5)
    model, optimizer = accelerator.prepare(model, halfstep.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.on_applied(optimizer, average.update)
    accelerator.register_for_checkpointing(average)
    for _ in range(3):
        accelerator.backward(model(torch.randn(4, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, tmp_path / "average", average=average)
    accelerator.save_model(model, tmp_path / "trained")
    saved = load_file(tmp_path / "average" / "model.safetensors")
    assert all(torch.equal(saved[n], v) for n, v in average.averages.items())
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert all(torch.equal(trained[n], full_values(p)) for n, p in model.named_parameters())
    accelerator.save_state(tmp_path / "state")
    before = {n: v.clone() for n, v in average.averages.items()}
    average.update()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(before[n], v) for n, v in average.averages.items())
    assert average.updates == 3
