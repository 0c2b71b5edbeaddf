"""Which kernels there are, where their compiled code is kept, and what is said without them. Each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfstep

NUMBA = "the compiled kernels need numba: pip install 'halfstep[cpu]'"
MEASURE = """
import logging, torch
from halfstep.kernels import cpu_kernels
kernels = cpu_kernels()
assert float(kernels.squares([torch.full((4,), 2.0)])[0]) == 16.0
from halfstep.kernels import loops
stats = loops.squares_chunks.stats
print("hits", sum(stats.cache_hits.values()), "misses", sum(stats.cache_misses.values()))
"""


def run(code: str, **environment: str) -> str:
    """What a new Python prints, its log included."""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, env=os.environ | environment, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


def test_without_numba_there_are_none_and_one_line_says_how_to_get_them() -> None:
    said = run(
        "import sys; sys.modules['numba'] = None\nfrom halfstep.kernels import cpu_kernels\nassert [cpu_kernels() for _ in range(3)] == [None] * 3"
    )
    assert said.count("pip install 'halfstep[cpu]'") == 1


def test_without_triton_there_are_none_for_cuda_and_one_line_says_how_to_get_them() -> None:
    said = run(
        "import sys; sys.modules['triton'] = None\nimport torch\nfrom halfstep.kernels import kernels_for\n"
        "assert [kernels_for(torch.device('cuda', n)) for n in range(3)] == [None] * 3\nassert kernels_for(torch.device('meta')) is None"
    )
    assert said.count("pip install 'halfstep[triton]'") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for")
def test_a_triton_that_cannot_be_used_is_no_error_and_one_line_says_why() -> None:
    pytest.importorskip("triton", reason="the kernels for CUDA need triton: pip install 'halfstep[triton]'")
    said = run("from halfstep.kernels import cuda_kernels\nassert [cuda_kernels() for _ in range(3)] == [None] * 3", TRITON_INTERPRET="0")
    assert said.count("triton compiles nothing here") == 1


def test_the_environment_switches_them_off() -> None:
    said = run(
        "from halfstep.kernels import cpu_kernels, cuda_kernels\nassert [cpu_kernels(), cuda_kernels(), cpu_kernels()] == [None] * 3",
        HALFSTEP_KERNELS="off",
    )
    assert said.count("HALFSTEP_KERNELS=off") == 1


def test_asking_loads_numba_and_importing_does_not() -> None:
    pytest.importorskip("numba", reason=NUMBA)
    run("import sys, halfstep.kernels as k\nassert 'numba' not in sys.modules\nassert k.cpu_kernels().__name__ == 'halfstep.kernels.cpu'")


def test_compiled_code_is_kept_where_the_environment_says(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason=NUMBA)
    folder = str(tmp_path / "cache")
    assert "hits 0 misses 1" in run(MEASURE, NUMBA_CACHE_DIR=folder)
    assert "hits 1 misses 0" in run(MEASURE, NUMBA_CACHE_DIR=folder)


@pytest.mark.slow
@pytest.mark.parametrize("home", [True, False])
def test_a_package_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path, home: bool) -> None:
    pytest.importorskip("numba", reason=NUMBA)
    source = Path(halfstep.__file__).parent
    copy = shutil.copytree(source, tmp_path / "code" / "halfstep", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "kernels" / "__pycache__").write_text("a file, where the cache's folder would be")
    cache = tmp_path / "user"
    if home:
        cache.mkdir()
    else:
        cache.write_text("a file too: there is no folder at all")
    settings = {"PYTHONPATH": str(tmp_path / "code"), "XDG_CACHE_HOME": str(cache), "HOME": str(cache), "NUMBA_CACHE_DIR": ""}
    assert "hits 0 misses 1" in run(MEASURE, **settings)
    assert f"hits {1 if home else 0}" in run(MEASURE, **settings)
