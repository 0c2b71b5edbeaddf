"""The public list is exact, documented, and cheap to import."""

import inspect
import json
import os
import subprocess
import sys

import pytest

import halfstep

NAMES = [
    "Accelerator",
    "Audit",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "Finding",
    "MemoryPlan",
    "Plan",
    "Policy",
    "PrinterCallback",
    "ProgressCallback",
    "StepResult",
    "Trace",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "__version__",
    "amp",
    "audit",
    "compare",
    "doctor",
    "ema",
    "errors",
    "memory",
    "optim",
    "plan",
    "report",
    "scan",
    "simulate",
    "trace",
]
AMP_NAMES = {"autocast", "GradScaler"}
HEAVY = (
    "transformers",
    "accelerate",
    "datasets",
    "numba",
    "plotly",
    "tensorboard",
    "rich",
    "yaml",
    "torch._dynamo",
    "scipy",
    "pandas",
)


def child(code: str, **environment: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ | environment).stdout


def test_the_public_list_is_exact():
    assert sorted(halfstep.__all__) == NAMES
    assert dir(halfstep) == NAMES


def test_every_public_name_is_there_and_documented():
    for name in NAMES:
        thing = getattr(halfstep, name)
        assert name == "__version__" or inspect.getdoc(thing), name
    assert set(dir(halfstep.amp)) >= AMP_NAMES


def test_public_methods_are_documented():
    for name in NAMES:
        thing = getattr(halfstep, name)
        if inspect.isclass(thing):
            for method, value in vars(thing).items():
                if inspect.isfunction(value) and not method.startswith("_"):
                    assert inspect.getdoc(value), f"{name}.{method}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Trainr"):
        _ = halfstep.Trainr


def test_a_fresh_import_gives_the_names_lazily():
    assert child("import halfstep; print(halfstep.amp.GradScaler.__name__, halfstep.Trainer.__name__)").split() == ["GradScaler", "Trainer"]


def test_import_loads_nothing_heavy():
    used = "halfstep, halfstep.amp, halfstep.accelerator"
    loaded = json.loads(
        child(f"import json, sys, torch; before = set(sys.modules); import {used}; print(json.dumps(sorted(set(sys.modules) - before)))")
    )
    assert not [name for name in loaded if name in HEAVY or name.split(".")[0] in HEAVY]


def test_import_runs_little_more_than_torch():
    """Function calls and modules after torch's: counts, which a busy machine does not change. Seconds: the row "start-up" of `make bench`."""
    code = (
        "import cProfile, pstats, sys, torch; before = len(sys.modules); profile = cProfile.Profile(); profile.enable()\n"
        "from halfstep import Accelerator\n"
        "profile.disable(); print(pstats.Stats(profile).total_calls, len(sys.modules) - before)"
    )
    child(code, PYTHONDONTWRITEBYTECODE="")  # compiles what was not
    calls, modules = map(int, child(code, PYTHONDONTWRITEBYTECODE="").split())
    assert (calls <= 70_000, modules <= 160) == (True, True), (calls, modules)
