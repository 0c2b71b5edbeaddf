"""A feed-forward block that passes 65504, through the three doors: named in one replay, pinned, and the run goes on as fp32 would."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from halfstep import Accelerator, StepResult, Trainer, TrainerCallback, TrainingArguments, amp
from halfstep.amp import GradScaler, pin, pins
from halfstep.errors import ConfigError, DivergedError, StepRefusedError
from overflowing import BEYOND, CULPRIT, T5Like, batch_of, rows, t5_like


def optimizer_of(model: T5Like) -> torch.optim.SGD:
    large = model.blocks[1].wo.weight
    return torch.optim.SGD([{"params": [p for p in model.parameters() if p is not large]}, {"params": [large], "lr": 100.0}], lr=0.05)


def batches(steps: int) -> list[dict[str, Tensor]]:
    data = rows(96)
    return [batch_of(data[8 * i % 96 :][:8]) for i in range(steps)]


def by_hand(half: bool, steps: int = 12) -> tuple[list[StepResult], float, T5Like]:
    model = t5_like(1.0, BEYOND)
    optimizer, scaler, results, loss = optimizer_of(model), GradScaler(heal="pin", enabled=half), [], torch.zeros(())
    scaler.watch(model)
    for i, batch in list(enumerate(batches(steps)))[0 if half else 1 :]:  # the first step of the fp16 run is the one that shows the fault
        torch.manual_seed(i)
        optimizer.zero_grad()
        with amp.autocast("cpu", torch.float16, enabled=half):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        results.append(scaler.step(optimizer))
        scaler.update()
    return results, float(loss.detach()), model


def by_accelerator(precision: str, steps: int = 12, *, whole: bool = False, beforehand: tuple[str, ...] = (), heal: Any = "pin") -> Any:
    model = t5_like(1.0, BEYOND)
    accelerator = Accelerator(precision=precision, cpu=True, heal=heal)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    for name in beforehand:
        pin(prepared, name)
    results, losses = [], []
    for i, batch in enumerate(batches(steps)):
        torch.manual_seed(i)

        def compute(batch: dict[str, Tensor] = batch) -> None:
            loss = prepared(**batch)["loss"]
            losses.append(float(loss.detach()))
            accelerator.backward(loss)

        optimizer.zero_grad()
        if whole:
            accelerator.run_step(optimizer, compute)
        else:
            compute()
            optimizer.step()
        results.append(accelerator.last_step)
    return results, losses[-1], prepared, accelerator


class Listener(TrainerCallback):
    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.results.append(kwargs["step_result"])

    def on_step_skipped(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.results.append(kwargs["step_result"])


def by_trainer(folder: Path, model: T5Like | None = None, data: Any = None, resume: Any = None, **settings: Any) -> tuple[Trainer, list[StepResult]]:
    model, heard = model or t5_like(1.0, BEYOND), Listener()
    defaults = {"precision": "fp16-mixed", "max_steps": 12, "per_device_train_batch_size": 8, "use_cpu": True, "disable_tqdm": True}
    quiet = {"save_strategy": "no", "logging_steps": 1, "max_grad_norm": 0.0}
    arguments = TrainingArguments(str(folder), **{**defaults, **quiet, **settings})
    trainer = Trainer(model, arguments, train_dataset=data or rows(96), callbacks=[heard], optimizers=(optimizer_of(model), None))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, heard.results


def final_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(model.eval()(**batch)["loss"]) for batch in batches(12)) / 12


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_by_hand() -> None:
    results, loss, model = by_hand(True)
    assert [r.reason for r in results] == ["forward-overflow"] + ["applied"] * 11
    assert results[0].culprits[0].name == CULPRIT
    assert results[0].pinned == (CULPRIT,)
    assert [p.module for p in pins(model)] == [CULPRIT]
    _, wanted, _ = by_hand(False)
    assert loss == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-lean", "fp16-mixed,scale=static:64"])
def test_by_the_accelerator(precision: str) -> None:
    results, _, model, _ = by_accelerator(precision, 4)
    assert [r.reason for r in results] == ["forward-overflow"] + ["applied"] * 3
    assert results[0].culprits[0].name == CULPRIT
    assert [p.module for p in pins(model)] == [CULPRIT]
    results, loss, _, _ = by_accelerator(precision, whole=True)
    assert all(results)
    assert [(r.replays, r.pinned) for r in results][:2] == [(1, (CULPRIT,)), (0, ())]
    assert loss == pytest.approx(by_accelerator("fp32")[1], rel=0.02)


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-lean"])
def test_a_healed_step_is_the_step_of_a_module_pinned_beforehand(precision: str) -> None:
    healed, loss, model, _ = by_accelerator(precision, 3, whole=True)
    first, other_loss, twin, _ = by_accelerator(precision, 3, whole=True, beforehand=(CULPRIT,))
    assert [(r.scale, r.loss, r.grad_norm, r.next_scale) for r in healed] == [(r.scale, r.loss, r.grad_norm, r.next_scale) for r in first]
    assert same(model, twin)
    assert loss == other_loss


@pytest.mark.parametrize("on_overflow", ["replay", "skip", "raise"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_by_the_trainer(tmp_path: Path, accumulate: int, on_overflow: str) -> None:
    trainer, results = by_trainer(tmp_path / "a", gradient_accumulation_steps=accumulate, on_overflow=on_overflow)
    assert all(results)
    assert (results[0].replays, results[0].pinned) == (1, (CULPRIT,))
    assert all(r.pinned == () for r in results[1:])
    assert (trainer.state.skipped_steps, trainer.state.global_step) == (0, 12)
    wide, _ = by_trainer(tmp_path / "b", precision="fp32", gradient_accumulation_steps=accumulate)
    assert final_loss(trainer.model) == pytest.approx(final_loss(wide.model), rel=0.02)
    logged = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    (pinned,) = [r for r in logged if "pinned" in r]
    assert pinned["pinned"] == [CULPRIT]
    assert "65504" in pinned["why"][0]
    (rule,) = yaml.safe_load((tmp_path / "a" / "rules.yaml").read_text())["fp32"]
    assert (rule["module"], rule["step"]) == (CULPRIT, 1)


def test_the_next_run_reads_the_rules(tmp_path: Path) -> None:
    by_trainer(tmp_path / "a", max_steps=2)
    told, results = by_trainer(tmp_path / "b", rules=str(tmp_path / "a" / "rules.yaml"), max_steps=3)
    assert [r.replays for r in results] == [0, 0, 0]
    assert [p.module for p in pins(told.model)] == [CULPRIT]
    again, results = by_trainer(tmp_path / "a", overwrite_output_dir=True, max_steps=3)
    assert [r.pinned for r in results] == [(), (), ()]
    assert [p.module for p in pins(again.model)] == [CULPRIT]
    assert same(told.model, again.model)
    (tmp_path / "wrong.yaml").write_text("fp32: [{module: blocks.7.wo}]\n")
    with pytest.raises(ConfigError, match=r"blocks\.7\.wo.*no such module"):
        by_trainer(tmp_path / "c", rules=str(tmp_path / "wrong.yaml"))


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-lean"])
def test_a_run_resumed_with_its_pins_is_the_unbroken_one(tmp_path: Path, precision: str) -> None:
    whole, _ = by_trainer(tmp_path / "a", precision=precision, save_strategy="steps", save_steps=4, max_steps=8)
    (tmp_path / "a" / "rules.yaml").unlink()  # the checkpoint knows by itself
    resumed, results = by_trainer(
        tmp_path / "a", precision=precision, save_strategy="steps", save_steps=4, max_steps=8, resume=str(tmp_path / "a" / "checkpoint-4")
    )
    assert [r.replays for r in results] == [0] * 4
    assert [p.module for p in pins(resumed.model)] == [CULPRIT]
    assert pins(resumed.model) == pins(whole.model)
    assert same(whole.model, resumed.model)


def test_a_checkpoint_without_pins_takes_them_off(tmp_path: Path) -> None:
    _, _, _, plain = by_accelerator("bf16-mixed", 1)
    plain.save_state(tmp_path / "plain")
    _, _, model, accelerator = by_accelerator("bf16-mixed", 1, beforehand=("blocks.1", "blocks.1.wi", CULPRIT))
    accelerator.load_state(tmp_path / "plain")
    assert pins(model) == ()
    _, _, twin, other = by_accelerator("bf16-mixed", 1)
    other.load_state(tmp_path / "plain")
    batch = batches(1)[0]
    assert torch.equal(model.eval()(**batch)["loss"], twin.eval()(**batch)["loss"])


def test_skip_skips_and_the_end_names_the_checkpoint(tmp_path: Path) -> None:
    class Grows(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not self.grown:
                self.grown = True
                with torch.no_grad():
                    kwargs["model"].blocks[1].wo.weight.mul_(2e5)

        grown = False

    model = t5_like(1.0, 1.0)
    settings = {"precision": "fp16-mixed", "heal": "skip", "max_steps": 12, "max_bad_steps": 3, "save_strategy": "steps", "save_steps": 2}
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, disable_tqdm=True, **settings)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, arguments, train_dataset=rows(96), callbacks=[Grows()], optimizers=(sgd, None))
    with pytest.raises(DivergedError) as caught:
        trainer.train()
    text = str(caught.value)
    for part in ("3 steps in a row", "forward-overflow", f"{CULPRIT} (Linear)", "65504", "checkpoint-2", "1. ", "2. ", "3. ", "max_bad_steps="):
        assert part in text
    assert trainer.state.global_step == 2
    assert pins(model) == ()
    assert not (tmp_path / "rules.yaml").exists()


def test_raise_stops_the_run_at_once_and_names_the_module(tmp_path: Path) -> None:
    with pytest.raises(StepRefusedError, match=CULPRIT):
        by_trainer(tmp_path, heal="raise")


def test_data_that_is_not_finite_is_skipped_and_named(tmp_path: Path) -> None:
    data = rows(96)
    data[20]["x"][3] = float("nan")
    trainer, results = by_trainer(tmp_path, t5_like(1.0, 1.0), data, max_steps=12)
    bad = [r for r in results if not r]
    assert [(r.reason, r.culprits[0].name, r.replays) for r in bad] == [("nonfinite-loss", "input x", 0)]
    assert pins(trainer.model) == ()


def test_two_modules_are_pinned_in_one_replay(tmp_path: Path) -> None:
    model = t5_like(1.0, BEYOND)
    with torch.no_grad():
        model.blocks[0].wo.weight.mul_(2e5)
    _, results = by_trainer(tmp_path, model, max_steps=2)
    assert set(results[0].pinned) == {"blocks.0.wo", CULPRIT}
    assert results[0].applied
