"""How long do 16-bit products take on this CPU: fp32, torch's own 16-bit kernels, and halfstep's emulation?

One training step (forward and backward) of a two-layer network, all variants in one process, interleaved, the order
flipped every round, medians and ratios to fp32; fp32 against itself (A/A) says how noisy the machine was.
Run: python benchmarks/cpu_products.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from halfstep.amp.emulation import Emulation
from halfstep.hardware import doctor


def step(model, x, dtype, emulate: bool) -> float:
    autocast = torch.autocast("cpu", dtype=dtype, cache_enabled=False) if dtype else contextlib.nullcontext()
    mode: contextlib.AbstractContextManager | TorchFunctionMode = Emulation() if emulate else contextlib.nullcontext()
    begun = time.perf_counter()
    with autocast, mode:
        y = model(x)
    y.float().square().mean().backward()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x = torch.randn(1024, 256)
    variants = {
        "fp32": (None, False),
        "fp32 again (A/A)": (None, False),
        "torch bf16": (torch.bfloat16, False),
        "halfstep emulated bf16": (torch.bfloat16, True),
        "torch fp16": (torch.float16, False),
        "halfstep emulated fp16": (torch.float16, True),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name in list(variants)[:: 1 if round_ % 2 else -1]:
            seconds = step(model, x, *variants[name])
            if round_:  # the first round warms up
                times[name].append(seconds)
    base = statistics.median(times["fp32"])
    rows = {n: {"ms": round(1e3 * statistics.median(t), 2), "ratio_to_fp32": round(statistics.median(t) / base, 2)} for n, t in times.items()}
    print(json.dumps({"machine": doctor("cpu").as_dict(), "threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
