"""One thread per test process: the models are tiny, and results do not depend on how many cores a machine has."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def accelerates_singletons():
    """Accelerate keeps the precision of its first Accelerator for the whole process: tests that use it for comparison leave none behind."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
