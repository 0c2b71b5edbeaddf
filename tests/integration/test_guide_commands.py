"""Every command of the guide "my loss is flat, or 16 bits are not faster" runs, one after the other in one folder, on a smaller model."""

import re
import shlex
from pathlib import Path

import pytest

from halfstep.cli.main import main

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "flat-or-slow.md"
SMALL = {"layers": 1, "width": 16, "heads": 1, "block_size": 16, "per_device_train_batch_size": 4, "eval_strategy": "no", "sample_length": 0}
STEPS = {"--max_steps": "6", "--steps": "3", "--logging_steps": "2"}  # in the place of the guide's
QUICK = {"plan": ["--rounds", "0", "--batches", "1"], "audit": ["--rounds", "1"], "compare": ["--seeds", "1"]}
SHRINKS = ("train", "compare", "plan", "audit")  # commands that take the options of `halfstep train`


def commands():
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), flags=re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly", reason="reports in HTML need plotly: pip install 'halfstep[report]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("16 bits hold what they hold. " * 300)
    small = [word for name, value in (SMALL | {"text": "text.txt"}).items() for word in (f"--{name}", str(value))]
    found = commands()
    assert len(found) >= 4
    assert {line[1] for line in found} == {"train", "report", "compare", "plan", "doctor", "audit"}
    for line in found:
        assert line[0] == "halfstep"
        told = [STEPS.get(before, word) for before, word in zip(["", *line], line, strict=False)]
        assert main([*told[1:], *(small if line[1] in SHRINKS else []), *QUICK.get(line[1], [])]) == 0, shlex.join(line)
        assert capsys.readouterr().out.strip(), shlex.join(line)
    assert (tmp_path / "runs" / "first" / "report.html").exists()
