"""What the documents say agrees with the code, and their Python runs."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import halfstep

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
ROADS = ("README.md", "nan.md", "flat-or-slow.md", "plan.md", "audit.md", "records.md", "compare.md", "from_transformers.md", "from_accelerate.md")
PAGES = [path for path in GUIDES if path.name not in ROADS]
HEADINGS = ["What it is", "Bytes", "The algorithm in ten lines", "Limits", "Source"]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *GUIDES]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.S)


BLOCKS = [pytest.param(block, id=f"{path.stem}-{i}") for path in GUIDES for i, block in enumerate(python_blocks(path))]


def test_the_tables_are_those_of_the_code():
    assert subprocess.run([sys.executable, "tools/tables.py", "--check"], cwd=ROOT, check=False).returncode == 0


def test_the_tables_of_the_guides_are_those_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tools.tables import filled

    assert "<!-- table: memory -->" in (ROOT / "docs" / "guides" / "README.md").read_text()
    for path in GUIDES:
        assert filled(path.read_text()) == path.read_text(), path.name


@pytest.mark.parametrize(("guide", "count"), [("plan.md", 4), ("audit.md", 3)])
def test_the_commands_of_a_guide_run(guide, count, tmp_path, monkeypatch):
    from halfstep.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n    return nn.Linear(4, 4), [torch.ones(2, 4)] * 2, lambda y: y.square().mean()\n"
    )
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "guides" / guide).read_text(), flags=re.S)[0].splitlines()
    assert len(commands) == count
    for command in commands:
        assert main(command.split()[1:]) == 0, command


def test_the_changelog_has_this_version():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert versions[0] == halfstep.__version__


def test_the_readme_python_blocks_run():
    """Every Python block of the README, in order, in one namespace; the blocks bring their own data."""
    blocks = python_blocks(ROOT / "README.md")
    assert len(blocks) >= 3
    code = "\n\n".join(blocks)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_quickstart_python_blocks_run(tmp_path):
    """In order, in one namespace, as somebody would type them."""
    blocks = python_blocks(ROOT / "docs" / "quickstart.md")
    assert len(blocks) >= 4
    done = subprocess.run([sys.executable, "-W", "error", "-c", "\n\n".join(blocks)], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_of_a_guide_runs(block, tmp_path, monkeypatch):
    """Each by itself, as somebody would paste it; warnings are errors."""
    if "from peft import" in block:
        pytest.importorskip("peft", reason="adapters are made by the peft package: pip install peft")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks transformers for it
        exec(compile(block, "guide", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_has_the_five_headings_and_a_line_in_the_index(page):
    assert re.findall(r"^## (.+)$", page.read_text(), flags=re.M) == HEADINGS
    assert f"]({page.name})" in (page.parent / "README.md").read_text()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_document_points_to_is_there(page):
    """Files that links name, and scripts that commands name."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    for script in re.findall(r"`python ((?:benchmarks|examples|tools)/\w+\.py)", text):
        assert (ROOT / script).exists(), script


def test_every_key_of_a_policy_is_in_the_readme():
    from halfstep.policy.policy import KEYS

    keys = (ROOT / "README.md").read_text().split("\nKeys: ")[1].split("\n\n")[0]
    for key in KEYS:
        assert f"`{key}`" in keys, key


def test_every_command_of_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for target in re.findall(r"`make (\w+)", text):
        assert target in targets, target


def test_no_document_promises_a_flag_that_is_not_there():
    from dataclasses import fields

    from halfstep.cli.options import DemoArguments
    from halfstep.demo import GPTConfig

    known = {f.name for kind in (halfstep.TrainingArguments, GPTConfig, DemoArguments) for f in fields(kind)} | {
        "resume",
        "overwrite",
        "help",
        "json",
        "device",
        "text",
        "version",
        "dtype",
        "output",
        "max_shard_size",
        "target",
        "batches",
        "want",
        "rounds",
    }
    for page in DOCUMENTS:
        for command in re.findall(r"halfstep (?:train|doctor|export|plan|audit)[^\n`]*", page.read_text()):
            for flag in re.findall(r" --([a-z_]+)", command):
                assert flag in known, flag
