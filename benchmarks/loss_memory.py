"""How much memory and time does the loss of a language model take, forward and backward, with all logits and without?

Each way runs in a process of its own: the peak of its resident memory above what hidden states, weight and labels take (Linux, VmHWM), and the
median time of a few repetitions after the first. The gradient of the weight (fp32) is in every peak. Ratios are to logits and cross entropy in the
same format, of the same round. Ways in bf16 by torch's own kernels take minutes on a CPU without 16-bit instructions: --native runs them too.
Run: python benchmarks/loss_memory.py [--tokens 2048 --width 576 --vocabulary 49152 --rounds 3 --repeat 3 --threads 1]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import amp
from halfstep.hardware import doctor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def chunked_by_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(hidden, weight, labels, options=options)
    return loss


def cast_and_chunked_by_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's function is in no list of autocast: operands of one 16-bit format are what it can be given."""
    return chunked_by_torch(hidden.bfloat16(), weight.bfloat16(), labels)


WAYS: dict[str, tuple[Loss, Callable[[], Any]]] = {
    "fp32: logits": (with_logits, nullcontext),
    "fp32: torch.linear_cross_entropy": (chunked_by_torch, nullcontext),
    "fp32: halfstep": (amp.linear_cross_entropy, nullcontext),
    "bf16: logits": (with_logits, lambda: amp.autocast("cpu", torch.bfloat16)),
    "bf16: halfstep": (amp.linear_cross_entropy, lambda: amp.autocast("cpu", torch.bfloat16)),
}
NATIVE: dict[str, tuple[Loss, Callable[[], Any]]] = {
    "bf16: torch.autocast": (with_logits, lambda: torch.autocast("cpu", torch.bfloat16)),
    "bf16: torch.linear_cross_entropy": (cast_and_chunked_by_torch, nullcontext),
}


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM at its highest since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def operands(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width)
    weight = torch.randn(options.vocabulary, options.width).mul_(options.width**-0.5)
    labels = torch.randint(0, options.vocabulary, (options.tokens,))
    return (hidden.bfloat16() if options.way.startswith("bf16") else hidden).requires_grad_(), weight.requires_grad_(), labels


def child(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    loss, block = (WAYS | NATIVE)[options.way]
    with block():
        loss(torch.ones(4, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True), torch.zeros(4, dtype=torch.int64)).backward()
    hidden, weight, labels = operands(options)
    times, peak, value = [], 0, 0.0
    for _ in range(options.repeat + 1):
        hidden.grad = weight.grad = None
        gc.collect()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        with block():
            found = loss(hidden, weight, labels)
        found.backward()
        times.append(time.perf_counter() - start)
        peak, value = max(peak, resident("VmHWM") - before), float(found.detach())
    print(json.dumps({"peak": peak, "seconds": statistics.median(times[1:]), "loss": value}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, value in (("tokens", 2048), ("width", 576), ("vocabulary", 49152), ("rounds", 3), ("repeat", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--native", action="store_true")
    options = parser.parse_args()
    if options.way:
        child(options)
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in (*WAYS, *(NATIVE if options.native else ()))}
    for _ in range(options.rounds):
        for way in found:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            found[way].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    rows = {}
    print("| way | peak MB | of logits | seconds | of logits | loss |\n|---|---|---|---|---|---|")
    for way, turns in found.items():
        base = found[f"{way[:4]}: logits"]
        peak, seconds = (statistics.median(t[key] for t in turns) for key in ("peak", "seconds"))
        less, faster = (statistics.median(t[key] / b[key] for t, b in zip(turns, base, strict=True)) for key in ("peak", "seconds"))
        rows[way] = {"peak": peak, "peak_ratio": less, "seconds": seconds, "time_ratio": faster, "loss": turns[0]["loss"]}
        print(f"| {way} | {peak / 1e6:.0f} | {less:.2f} | {seconds:.2f} | {faster:.2f} | {turns[0]['loss']:.7f} |", flush=True)
    about = {name: getattr(options, name) for name in ("tokens", "width", "vocabulary", "threads")}
    print(json.dumps({"sizes": about, "machine": doctor("cpu").as_dict(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
