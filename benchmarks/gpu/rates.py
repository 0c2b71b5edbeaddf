"""What the device can do: rates of matrix products and of a copy, for the floors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.measure import wait
from benchmarks.gpu.setting import Setting
from halfstep.hardware import doctor

TIMES = 9


def run(setting: Setting) -> None:
    """The part `rates`: operations a second of products by format, bytes a second of a copy, and what halfstep's doctor says."""
    setting.tell(doctor=doctor(str(setting.device)).as_dict())
    size = 256 if setting.small else 8192
    for name, dtype, tf32 in (
        ("fp32", torch.float32, False),
        ("tf32", torch.float32, True),
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, False),
    ):
        if tf32 and not setting.is_cuda:
            continue
        setting.add("products", name, _products(size, dtype, tf32, setting))
    numbers = 1 << (18 if setting.small else 28)
    one, other = (torch.ones(numbers, device=setting.device) for _ in range(2))
    setting.tell(copy_bytes=round(8 * numbers / _seconds(lambda: other.copy_(one), setting)))


def _products(size: int, dtype: torch.dtype, tf32: bool, setting: Setting) -> float:
    a, b = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        return round(2 * size**3 / _seconds(lambda: a @ b, setting))
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(work: Callable[[], Any], setting: Setting) -> float:
    taken = []
    for number in range(TIMES + 3):
        wait(setting.device)
        begun = time.perf_counter()
        work()
        wait(setting.device)
        if number >= 3:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)
