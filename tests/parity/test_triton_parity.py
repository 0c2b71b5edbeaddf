"""The Triton kernels against the plain definitions, bit for bit, under Triton's interpreter: no GPU is needed, and none is used.

The interpreter is chosen when triton is first imported, so the cases run in a process of their own (triton_cases.py), all of them in one.
What the interpreter cannot show, that a compiler for real devices keeps to single roundings, is seen in the code that it makes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels for CUDA need triton: pip install 'halfstep[triton]'", allow_module_level=True)

HERE = Path(__file__).parent
WEIGHTS = [("fp32", "fp32"), *product(("split", "split24", "kahan", "stochastic", "plain"), ("bf16", "fp16"))]
STATES = ("fp32", "bf16", "int8")
LOADS = {"adamw, int8 states": 2} | {f"squares of {form}": 1 for form in ("fp32", "bf16", "fp16")}  # of several words; 4 codes are one word
CODECS = {"adamw": [",".join(pair) for pair in product(STATES, STATES)], "sgd": ["none", *STATES], "lion": list(STATES)}
FORMATS = ("fp32", "bf16", "fp16")


def table(rule: str) -> list[str]:
    """Every storage of a rule; every codec of it, and every format of gradients, with one of them."""
    codecs = CODECS[rule]
    return [f"table:{rule}:{s}:{d}:{codecs[i % len(codecs)]}:{FORMATS[(i + i // 3) % 3]}" for i, (s, d) in enumerate(WEIGHTS)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each case of this run has found."""
    asked = [item.callspec.params.get("case") for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    return run("triton_cases.py", *filter(None, asked))


def run(name: str, *given: str) -> dict[str, str]:
    """What a script prints last, as JSON."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(HERE / name), *given], env=environment, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", table("adamw"))
def test_an_adamw_step_has_the_bits_of_its_definition(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", table("sgd"))
def test_an_sgd_step_has_the_bits_of_its_definition(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", table("lion"))
def test_a_lion_step_has_the_bits_of_its_definition(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"table:{r}:{s}:{d}:{c}:{g}" for r in CODECS for (s, d), c, g in product(WEIGHTS, CODECS[r], FORMATS)])
def test_every_combination_has_the_bits_of_its_definition(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", [f"sizes:{rule}" for rule in CODECS])
def test_sizes_around_a_block_and_gradients_that_are_missing(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", [f"read:{s}:{d}" for s, d in WEIGHTS[1:]])
def test_every_finite_weight_with_residuals_of_all_kinds_is_read_as_the_definition_reads_it(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", [f"write:{s}:{d}" for s, d in WEIGHTS[1:]])
def test_numbers_of_every_exponent_and_every_tie_are_written_as_the_definition_writes_them(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", ["codes:first", "codes:second", "levels"])
def test_states_in_8_bits_have_the_codes_of_the_definition(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", [f"optimizer:{rule}" for rule in CODECS])
def test_an_optimizer_takes_the_kernels_of_its_device_in_every_step(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", ["unaligned", "refusals"])
def test_a_plan(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("case", ["squares", "numbers:bf16", "numbers:fp16"])
def test_sums_of_squares_and_largest_magnitudes(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""


@pytest.mark.parametrize("target", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_the_code_for_a_gpu_rounds_every_product_and_every_sum_and_moves_16_bytes_at_a_time(target: int) -> None:
    for name, ptx in run("triton_ptx.py", str(target)).items():
        assert not re.findall(r"\bfma\.|\.ftz|\.approx|div\.full", ptx), f"{name}: contracted, flushed or approximate arithmetic"
        loads = re.findall(r"^\s*ld\.global\S*\.v([24])\.b32", ptx, re.MULTILINE)  # those of whole stretches are not predicated
        assert len(loads) >= LOADS.get(name, 3), f"{name}: weights, gradients and moments are loaded element by element"
