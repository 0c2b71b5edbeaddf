"""Memory that is kept between steps: what the C library does with large blocks, counted in page faults."""

import os
import subprocess
import sys

import pytest
import torch

from halfstep.amp import GradScaler
from halfstep.hardware import heap, keep_memory

CPU = torch.device("cpu")
GLIBC = sys.platform == "linux" and os.confstr("CS_GNU_LIBC_VERSION") is not None
MINE = (heap.SWITCH, "GLIBC_TUNABLES", *heap._OWN)

FAULTS = """
import resource, torch
from halfstep.hardware import give_back_unused_memory, keep_memory

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def again(size, times=5):
    before = pages()
    for _ in range(times):
        torch.ones(size)
    return (pages() - before) / times

size = 16 << 20  # 64 MiB in fp32: 16,384 pages
torch.ones(size)
print(again(size))
print(int(keep_memory(torch.device("cpu"))))
again(size, 10)  # until the heap has a place for it that nothing else lies in
print(again(size))
large = [torch.ones(size) for _ in range(3)]
before = int(open("/proc/self/statm").read().split()[1])
del large
give_back_unused_memory()
print(before - int(open("/proc/self/statm").read().split()[1]))
"""


def faults() -> list[float]:
    """Page faults of a block of 64 MiB made again, before and after; whether memory is kept; pages that giving back three blocks has freed."""
    others = {name: value for name, value in os.environ.items() if name not in MINE}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=others, check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


@pytest.mark.skipif(not GLIBC, reason="the heap of glibc is set, and of no other C library")
def test_a_block_that_was_freed_is_used_again_without_page_faults() -> None:
    before, kept, after, freed = faults()
    assert kept
    huge = before < 16_384 / 2  # a system that maps huge pages takes a page fault for each of these
    assert before > 20
    assert after < before / 10
    assert huge or before > 16_000
    assert freed > 3 * 16_384 * 0.9, "it goes back to the system when it is told to"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A process that has not been asked yet, and how often its heap is set."""
    made: list[None] = []
    for name in MINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(heap, "kept", None)
    monkeypatch.setattr(heap, "_set", lambda: made.append(None) or True)
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has it")
def test_the_first_loss_on_a_cpu_sets_it_once_whatever_the_precision(calls: list[None]) -> None:
    for enabled in (False, True):
        scaler, weight = GradScaler(enabled=enabled), torch.ones(3, requires_grad=True)
        assert len(calls) == enabled
        for _ in range(2):
            scaler.scale(weight.square().sum()).backward()
            assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "value"), [(heap.SWITCH, "off"), *((name, "0") for name in heap._OWN), ("GLIBC_TUNABLES", "a.b=1:glibc.malloc.trim_threshold=1")]
)
def test_who_sets_the_heap_himself_keeps_his_settings(name: str, value: str, calls: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_memory(CPU)
    assert calls == []


def test_a_gpu_leaves_it_alone(calls: list[None]) -> None:
    assert not keep_memory(torch.device("cuda"))
    assert calls == []
    assert keep_memory(CPU) is (sys.platform == "linux")
