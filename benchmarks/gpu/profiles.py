"""What a step spends its time on, by torch's profiler: ours beside plain torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import contenders
from benchmarks.gpu.measure import Waits
from benchmarks.gpu.setting import Setting, error_text

STEPS, LISTED = 3, 20


class Profiled(Waits):
    """Profiles the thread and the device inside `counted()`, in the place of a count of waits."""

    profiler: Any = None

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """The block that is profiled."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        with profile(activities=activities) as self.profiler:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)


def run(setting: Setting) -> None:
    """The part `profile`."""
    for name in ("torch", "halfstep loop", "halfstep trainer", "halfstep lean"):
        try:
            runner = contenders.make(name, "gpt2-124m", "bf16", setting)
            runner.run(5 if setting.is_cuda else 2)
            seen = Profiled(setting.device)
            runner.run(STEPS, seen)
            runner.close()
            setting.add("profile", name, _costs(seen.profiler, setting))
        except Exception as error:  # noqa: BLE001  one that fails stops no other
            setting.add("left_out", name, error_text(error))


def _costs(profiler: Any, setting: Setting) -> dict[str, Any]:
    """Microseconds a step: the largest costs of the device and of the host, how many kernels there are, and how long the device was busy."""
    rows = profiler.key_averages()
    kernels = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
    found: dict[str, Any] = {"host_us": _largest(rows, "self_cpu_time_total")}
    if setting.is_cuda:
        busy = sum(e.self_device_time_total for e in kernels)
        found |= {"device_us": _largest(rows, "self_device_time_total"), "kernels": round(len(kernels) / STEPS), "busy_us": round(busy / STEPS)}
    return found


def _largest(rows: Any, key: str) -> list[dict[str, Any]]:
    ordered = sorted(rows, key=lambda e: -getattr(e, key))[:LISTED]
    return [
        {"name": e.key[:120], "us": round(getattr(e, key) / STEPS, 1), "calls": round(e.count / STEPS, 1)} for e in ordered if getattr(e, key) > 0
    ]
