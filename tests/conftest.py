"""One thread per test process: the models are tiny, and results do not depend on how many cores a machine has."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start

import pytest
import torch

torch.set_num_threads(1)

TABLE, PART = 24, 8  # of a test with more cases than TABLE the default run takes every PART-th; `make nightly` takes all


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="every case of the large tables of cases, and not every eighth (make nightly)")


def pytest_collection_modifyitems(config, items):
    """Thin out the large tables of cases, unless all were asked for or one was named."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:  # an address is another one in every process, and pytest-xdist then ends before the first test
        raise pytest.UsageError(f"an id of a test holds an address, give it a name by ids=: {unstable[0]}")
    if config.getoption("--whole") or any("::" in str(arg) for arg in config.args):
        return
    tables = {}
    for item in items:
        tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    # what halfstep has right is never thinned out: each of its records is a fault of its own
    large = [cases for name, cases in tables.items() if len(cases) > TABLE and not name.endswith("::test_halfstep_has_it_right")]
    left_out = {id(item) for cases in large for i, item in enumerate(cases) if i % PART}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def accelerates_singletons():
    """Accelerate keeps the precision of its first Accelerator for the whole process: tests that use it for comparison leave none behind."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def fresh_compiler():
    """torch.compile without what other tests have compiled, its counters at 0."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
