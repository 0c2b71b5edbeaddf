"""`halfstep plan`: the demo or a target of the user's, for people, for machines, and as a file that `halfstep train --plan` follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from halfstep import Plan
from halfstep.cli.main import main
from halfstep.cli.train import configure
from halfstep.errors import ConfigError
from halfstep.trainer import TrainingArguments

SMALL = ["--layers", "1", "--width", "8", "--heads", "1", "--block_size", "16", "--use_cpu", "--batches", "1", "--rounds", "0"]
TARGET = """
import torch
from torch import nn

def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[0].weight.data *= 1e6
    return model, [torch.randn(4, 8)], lambda outputs: outputs.square().mean()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_demo_is_planned_and_trained_by_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--precision", "fp16-mixed", "--output", "plan.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("train in fp16-mixed from a loss scale of ")
    assert out.endswith("wrote plan.yaml; halfstep train --plan plan.yaml follows it\n")
    run = ["train", "--plan", "plan.yaml", *SMALL[:9], "--max_steps", "2", "--eval_strategy", "no", "--eval_on_start", "false"]
    assert main([*run, "--sample_length", "0", "--save_steps", "1"]) == 0
    assert "plan runs/001-fp16-mixed/plan.yaml: fp16-mixed, loss scale from " in capsys.readouterr().out
    settings, resume = configure(["--resume"])
    assert resume
    assert (settings["plan"], settings["precision"]) == ("runs/001-fp16-mixed/plan.yaml", None)


def test_a_target_is_planned_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(TARGET)
    assert main(["plan", "--target", "mine.py:make", "--json", "--rounds", "0", "--precision", "bf16-mixed", "--precision", "fp16-mixed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert Plan.from_dict(found).candidate("fp16-mixed").held[0].module == "0"
    assert [t["precision"] for t in found["tried"]] == ["fp32", "bf16-mixed", "fp16-mixed"]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--target", "mine.py:make", "--layers", "1"], "--layers belongs to halfstep train"),
        (["--batches", "0"], "--batches 0"),
        (["--precision", "fp61", *SMALL], "fp61"),
        (["--layer", "1"], "layer"),
        (["--bf16"], "Write --precision bf16-mixed"),
        (["--fp16=true"], "Write --precision fp16-mixed"),
    ],
)
def test_what_is_wrong_is_refused(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 2
    assert word in capsys.readouterr().err


def test_a_precision_and_a_plan_give_way_as_precisions_do() -> None:
    Plan("bf16-mixed").save("plan.yaml")
    Path("a.yaml").write_text(yaml.safe_dump({"plan": "plan.yaml"}))
    Path("b.yaml").write_text(yaml.safe_dump({"precision": "fp32"}))

    def policy(*argv: str) -> str:
        settings, _ = configure(list(argv))
        return str(TrainingArguments(**{name: settings[name] for name in TrainingArguments.__dataclass_fields__}).policy)

    assert policy("a.yaml") == "bf16-mixed"
    assert policy("a.yaml", "--fp16") == "fp16-mixed"
    assert policy("b.yaml", "--plan", "plan.yaml") == "bf16-mixed"
    with pytest.raises(ConfigError, match=r"plan=plan.yaml is for bf16-mixed"):
        policy("--plan", "plan.yaml", "--fp16")
