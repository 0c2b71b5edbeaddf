"""`TrainingArguments(plan=)`: the run follows the plan, keeps its file, and goes on with it; nothing overflows on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import halfstep
from halfstep import Plan, Trainer, TrainingArguments
from halfstep.amp import pins
from halfstep.diagnostics import read_run
from halfstep.diagnostics.planned import Held
from halfstep.errors import ConfigError
from overflowing import BEYOND, CULPRIT, T5Like, batch_of, rows, t5_like

PLAN = Plan("fp16-mixed", (Held(CULPRIT, "Linear", "outputs reach 2e5"),), 1024.0)


def model() -> T5Like:
    return t5_like(1.0, BEYOND)


def run(folder: Path, resume: Any = None, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 8, "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    trainer = Trainer(model(), TrainingArguments(str(folder), **{**defaults, "save_strategy": "no", **settings}), train_dataset=rows(64))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("precision", ["fp16-mixed", pytest.param("fp16-lean", marks=pytest.mark.slow)])  # the latter compiles kernels
def test_a_planned_run_meets_no_overflow_and_ends_as_fp32_does(tmp_path: Path, precision: str) -> None:
    found = halfstep.plan(model(), [batch_of(rows(16)[i : i + 8]) for i in (0, 8)], precision=precision, rounds=0)
    assert found.modules == (CULPRIT,)
    trainer = run(tmp_path / "a", plan=found, max_steps=12)
    assert (trainer.state.replayed_steps, trainer.state.skipped_steps, pins(trainer.model)) == (0, 0, ())
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    scales = [r["scale"] for r in trainer.state.log_history if "loss" in r]
    assert scales[0] == found.scale
    wide = run(tmp_path / "b", precision="fp32", max_steps=12)
    assert losses == pytest.approx([r["loss"] for r in wide.state.log_history if "loss" in r], rel=0.02)
    unplanned = run(tmp_path / "c", precision=precision, max_steps=2)
    assert unplanned.state.replayed_steps == 1, "without a plan the overflow is met"


def test_the_file_goes_into_the_run_folder_and_is_resumed_with(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "mine.yaml")
    first = run(tmp_path / "a", plan=path, save_strategy="steps", save_steps=3)
    assert (tmp_path / "a" / "plan.yaml").read_text() == path.read_text()
    settings = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert settings["plan"] == str(tmp_path / "a" / "plan.yaml")
    record = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[0])
    assert (record["planned_fp32"], record["planned_scale"]) == ([CULPRIT], 1024.0)
    path.unlink()
    again = TrainingArguments.from_file(tmp_path / "a" / "config.yaml")
    assert again.policy == first.args.policy == PLAN.policy
    resumed = run(tmp_path / "a", tmp_path / "a" / "checkpoint-3", plan=settings["plan"], save_strategy="steps", save_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(first.model.state_dict().values(), resumed.model.state_dict().values(), strict=True))


def test_a_run_that_follows_no_plan_has_none_in_its_records(tmp_path: Path) -> None:
    run(tmp_path / "a", plan=PLAN, max_steps=1)
    assert read_run(tmp_path / "a").plan["precision"] == "fp16-mixed"
    run(tmp_path / "a", precision="fp32", max_steps=1, overwrite_output_dir=True)
    assert (tmp_path / "a" / "plan.yaml").exists(), "it may be somebody's, for the next run"
    assert read_run(tmp_path / "a").plan == {}


def test_one_line_says_what_was_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", plan=PLAN, max_steps=1, disable_tqdm=False)
    lines = [text for text in capsys.readouterr().out.splitlines() if text.startswith("plan ")]
    assert lines == [f"plan {tmp_path / 'a' / 'plan.yaml'}: fp16-mixed, loss scale from 1024, held in fp32: {CULPRIT}"]


def test_a_plan_is_a_rules_file_too(tmp_path: Path) -> None:
    trainer = run(tmp_path / "a", precision="fp16-mixed", rules=str(PLAN.save(tmp_path / "plan.yaml")), max_steps=1)
    assert [p.module for p in pins(trainer.model)] == [CULPRIT]


@pytest.mark.parametrize("given", [{}, {"fp16": True}, {"precision": "fp16-mixed"}, {"precision": PLAN.policy}])
def test_the_policy_is_the_plans(given: dict[str, Any]) -> None:
    args = TrainingArguments(plan=PLAN, **given)
    assert args.policy == PLAN.policy
    assert (args.policy.fp32, args.policy.scale.init) == ((CULPRIT,), 1024.0)
    assert TrainingArguments.from_dict(json.loads(args.to_json_string())).policy == PLAN.policy
    assert replace(args, max_steps=3).policy == PLAN.policy


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"bf16": True}, r"plan=Plan\(...\) is for fp16-mixed, and bf16-mixed was asked for"),
        ({"precision": "fp16-lean"}, "fp16-lean was asked for"),
        ({"fp32_modules": ["head"]}, r"plan=Plan\(...\) and fp32_modules=head were both given"),
        ({"loss_scale": "dynamic:64"}, r"plan=Plan\(...\) and loss_scale=dynamic:64 were both given"),
    ],
)
def test_what_contradicts_the_plan_is_refused_by_name(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TrainingArguments(plan=PLAN, **given)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.yaml cannot be read"):
        TrainingArguments(plan=tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="no precision"):
        TrainingArguments(plan={"rules": []})
    with pytest.raises(ConfigError, match="matches no module"):
        run(tmp_path / "a", plan=replace(PLAN, held=(Held("blocks.7.wo", "Linear", ""),)))
