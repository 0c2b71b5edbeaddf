"""The example with a planted overflow: every door names the layer, and those that are asked to heal it do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from halfstep.step import StepResult

EXAMPLE = Path(__file__).parents[2] / "examples" / "overflow.py"
FAULT = "blocks.1.down"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_overflow", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module


def blamed(result: StepResult) -> str:
    assert result.reason == "forward-overflow"
    assert result.culprits[0].direction == "forward"
    return result.culprits[0].name


def test_the_loop_names_the_layer_each_time(example: ModuleType) -> None:
    assert [(bool(r), blamed(r), r.pinned) for r in example.by_loop(2)] == [(False, FAULT, ())] * 2


def test_the_accelerator_pins_the_layer_and_goes_on(example: ModuleType) -> None:
    first, *others = example.by_accelerator(3)

    assert (bool(first), blamed(first), first.pinned) == (False, FAULT, (FAULT,))
    assert all(others)
    assert others[-1].loss < others[0].loss


def test_the_trainer_loses_no_step_and_writes_down_what_it_learnt(example: ModuleType, tmp_path: Path) -> None:
    state = example.by_trainer(tmp_path, 3)

    assert (state.global_step, state.replayed_steps, state.skipped_steps) == (3, 1, 0)
    (rule,) = yaml.safe_load((tmp_path / "rules.yaml").read_text())["fp32"]
    assert (rule["module"], rule["step"]) == (FAULT, 1)
    assert "fp16 ends at 65504" in rule["why"]


def test_without_the_fault_nothing_is_named_and_nothing_held(example: ModuleType, tmp_path: Path) -> None:
    sound = example.Block
    example.Block = lambda width, growth=1.0: sound(width)

    assert all((*example.by_loop(2), *example.by_accelerator(2)))
    state = example.by_trainer(tmp_path, 2)
    assert (state.global_step, state.replayed_steps) == (2, 0)
    assert not (tmp_path / "rules.yaml").exists()


def test_the_script_is_short_and_prints_what_was_found(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100
    example.main(steps=2)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"trace: overflow in {FAULT} (Linear), forward, overflow.py:")
    assert lines[1:3] == [f"loop, step {n}: forward-overflow in {FAULT} (forward: inf); held in fp32 from now on: nothing" for n in (1, 2)]
    assert lines[3] == f"accelerator, step 1: forward-overflow in {FAULT} (forward: inf); held in fp32 from now on: {FAULT}"
    assert lines[4].startswith("accelerator, step 2: applied, loss ")
    assert lines[5] == "trainer: 2 steps applied, 1 of them run again, 0 skipped; rules.yaml:"
    assert f"- module: {FAULT}" in lines
