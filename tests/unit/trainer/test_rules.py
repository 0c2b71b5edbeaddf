"""The rules file: written when a module is pinned, read by the next run, refused with cause and remedy when it is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from halfstep import TrainingArguments
from halfstep.amp import pin, pins
from halfstep.errors import ConfigError
from halfstep.trainer.rules import RULES, apply_rules, follow_rules, note_pins, write_rules


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, **settings)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    model = net()
    pin(model, "1.0", 'reaches 1.5e+05: "quoted", and fp16 ends at 65504', 12)
    pin(model, "2")
    path = write_rules(tmp_path, model)
    assert path == tmp_path / RULES
    assert path.read_text().startswith("#")
    twin = net()
    assert apply_rules(path, twin) == ["1.0", "2"]
    assert pins(twin) == pins(model)
    assert apply_rules(path, twin) == []  # they are held already


def test_the_record_of_new_pins_names_the_reason_and_the_file(tmp_path: Path) -> None:
    model = net()
    pin(model, "0", "first", 1)
    pin(model, "2", "second", 2)
    record = note_pins(tmp_path, model, ("2",))
    assert record == {"pinned": ["2"], "why": ["second"], "rules": str(tmp_path / RULES)}
    assert [rule["module"] for rule in yaml.safe_load((tmp_path / RULES).read_text())["fp32"]] == ["0", "2"]


def test_a_run_follows_the_file_of_its_folder_or_the_one_it_is_told(tmp_path: Path) -> None:
    model = net()
    pin(model, "2", "why", 3)
    (tmp_path / "old").mkdir()
    write_rules(tmp_path / "old", model)
    same_folder, told, neither = net(), net(), net()
    record = follow_rules(arguments(tmp_path / "old"), tmp_path / "old", same_folder)
    assert record["pinned"] == ["2"]
    told_record = follow_rules(arguments(tmp_path / "new", rules=tmp_path / "old" / RULES), tmp_path / "new", told)
    assert told_record["pinned"] == ["2"]
    assert [rule["module"] for rule in yaml.safe_load((tmp_path / "new" / RULES).read_text())["fp32"]] == ["2"], "the next run there begins so too"
    assert follow_rules(arguments(tmp_path / "other"), tmp_path / "other", neither) == {}
    assert follow_rules(arguments(tmp_path / "old", heal="skip"), tmp_path / "old", neither) == {}, "which leaves the model as it is"
    assert [len(pins(m)) for m in (same_folder, told, neither)] == [1, 1, 0]


def test_a_file_written_by_hand_needs_no_more_than_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("fp32:\n- module: '0'\n- {module: '1.0', why: }\n")
    model = net()
    assert apply_rules(path, model) == ["0", "1.0"]
    assert [p.why for p in pins(model)] == ["", ""]
    path.write_text("fp32: []\n")
    assert apply_rules(path, model) == []


@pytest.mark.parametrize(
    ("content", "cause", "remedy"),
    [
        (None, "cannot be read", "leave rules out"),
        (b"\xff\xfe\x00", "cannot be read", "leave rules out"),
        (b"fp32: [\n", "cannot be read", "leave rules out"),
        (b"", "no rules file", "fp32: [{module: NAME}]"),
        (b"- module: a\n", "no rules file", "fp32: [{module: NAME}]"),
        (b"fp32: {module: a}\n", "no rules file", "fp32: [{module: NAME}]"),
        (b"fp32: [a]\n", "no rules file", "fp32: [{module: NAME}]"),
        (b"fp32: [{module: 3}]\n", "no rules file", "fp32: [{module: NAME}]"),
        (b"fp32: [{module: '1.O'}]\n", "no such module", "Did you mean"),
        (b"fp32: [{module: ''}]\n", "whole model", "fp32"),
        (b"!!python/object/apply:os.system ['true']\n", "cannot be read", "leave rules out"),
    ],
)
def test_a_wrong_file_is_refused_with_cause_and_remedy(tmp_path: Path, content: bytes | None, cause: str, remedy: str) -> None:
    path = tmp_path / "rules.yaml"
    if content is not None:
        path.write_bytes(content)
    model = net()
    with pytest.raises(ConfigError) as caught:
        follow_rules(arguments(tmp_path, rules=path), tmp_path, model)
    assert cause in str(caught.value)
    assert remedy in str(caught.value)
    assert pins(model) == ()


def test_of_a_file_with_one_wrong_name_nothing_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("fp32: [{module: '0'}, {module: gone}]\n")
    model = net()
    with pytest.raises(ConfigError, match="gone"):
        apply_rules(path, model)
    assert pins(model) == ()


def test_a_module_that_is_named_twice_is_held_once(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("fp32: [{module: '0'}, {module: '0'}]\n")
    model = net()
    assert apply_rules(path, model) == ["0"]
    assert [p.module for p in pins(model)] == ["0"]


@pytest.mark.parametrize("step", ["soon", [1], "'3'"])
def test_a_step_that_is_no_number_is_refused(tmp_path: Path, step: Any) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(f"fp32: [{{module: '0', step: {step}}}]\n")
    with pytest.raises(ConfigError):
        apply_rules(path, net())
