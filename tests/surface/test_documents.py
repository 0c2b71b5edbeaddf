"""What README and the changelog say agrees with the code."""

import re
import subprocess
import sys
from pathlib import Path

import halfstep

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_code():
    assert subprocess.run([sys.executable, "tools/tables.py", "--check"], cwd=ROOT, check=False).returncode == 0


def test_the_changelog_has_this_version():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert versions[0] == halfstep.__version__


def test_the_readme_python_blocks_run():
    """Every Python block of the README, in order, in one namespace; the blocks bring their own data."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(blocks) >= 3
    code = "\n\n".join(blocks)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for target in re.findall(r"`make (\w+)", text):
        assert target in targets, target


def test_no_document_promises_a_flag_that_is_not_there():
    from dataclasses import fields

    from halfstep.demo import GPTConfig

    known = {f.name for kind in (halfstep.TrainingArguments, GPTConfig) for f in fields(kind)} | {
        "resume",
        "overwrite",
        "help",
        "json",
        "device",
        "text",
        "version",
    }
    for name in ("README.md", "CONTRIBUTING.md"):
        for flag in re.findall(r"halfstep (?:train|doctor)[^\n`]* --([a-z_]+)", (ROOT / name).read_text()):
            assert flag in known, flag
