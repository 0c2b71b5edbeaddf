"""What does everything between backward and the next forward cost? Unscale, check, clip, AdamW, and the 16-bit weights for the next forward.

The peer is what a plain torch loop does: GradScaler.unscale_, clip_grad_norm_, fused AdamW on fp32 weights and gradients, update, and
casts of the new weights to 16-bit buffers that are kept. The other rows are halfstep's compiled kernels on the same sizes: one pass that
measures the gradients, one that does the rest; rows "by GradScaler" are the public way to the same, `scaler.step(optimizer,
max_norm=1.0)` with `halfstep.optim.AdamW`, with all that the step protocol does beside it.
All rows take turns in one process, the order flipped every round; each round gives one
ratio to the peer next to it, and the median over rounds is reported with its quartiles. `floor_ms` is what the bytes that a row
must move (each tensor it reads or writes, once) would take at the bandwidth of an addition in place, measured here.
Run: python benchmarks/step_stage.py [--rounds 21] [--tensors 100] [--size 200000] [--dtype bf16] [--rows peer split ...]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import numerics
from halfstep.amp import GradScaler
from halfstep.hardware import doctor
from halfstep.kernels import cpu_kernels
from halfstep.optim import AdamW

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE, MAX_NORM = 1024.0, 1.0
SETTINGS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Row:
    """One way to take the step. prepare: what is not timed (gradients as backward leaves them); run: what is; moved: bytes read and written."""

    prepare: Callable[[], Any]
    run: Callable[[], Any]
    moved: int


def made(given: argparse.Namespace, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """fp32 weights and scaled fp32 gradients."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(given.size, generator=generator) * 0.02 for _ in range(given.tensors)]
    gradients = [torch.randn(given.size, generator=generator) * (1e-3 * SCALE) for _ in range(given.tensors)]
    return weights, gradients


def peer(given: argparse.Namespace) -> Row:
    """Stock torch: fp32 weights, fp32 gradients, 16-bit copies of the weights in buffers that are kept."""
    weights, scaled = made(given)
    parameters = [nn.Parameter(w) for w in weights]
    buffers = [w.to(DTYPES[given.dtype]) for w in weights]
    optimizer = torch.optim.AdamW(parameters, fused=True, **SETTINGS)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # the scaler makes its tensors
    for p in parameters:
        p.grad = torch.empty_like(p)

    def prepare() -> None:
        torch._foreach_copy_([p.grad for p in parameters], scaled)

    def run() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(buffers, [p.detach() for p in parameters])

    return Row(prepare, run, given.size * given.tensors * (8 + 4 + 8 + 28 + 6))


def ours(given: argparse.Namespace, storage: str, states: str) -> Row:
    """The compiled kernels: 16-bit weights with 16-bit gradients; fp32 weights with fp32 gradients and the same copies to buffers that are kept."""
    kernels = cpu_kernels()
    assert kernels is not None, "numba is not installed: pip install 'halfstep[cpu]'"
    weights, scaled = made(given)
    narrow = storage != "fp32"
    dtype = DTYPES[given.dtype] if narrow else torch.float32
    gradients = [g.to(dtype) for g in scaled]
    items = [kernels.Item(*stored(w, storage, dtype), *moments(given.size, states), i) for i, w in enumerate(weights)]
    buffers = [] if narrow else [w.to(DTYPES[given.dtype]) for w in weights]
    plan, taken = kernels.Plan(items), 0

    def run() -> None:
        nonlocal taken
        taken += 1
        sums, _ = kernels.squares(gradients)
        norm = math.sqrt(float(sums.sum())) / SCALE
        assert math.isfinite(norm)
        step = kernels.Step(beta1=0.9, beta2=0.999, step=taken, **SETTINGS)
        plan.run(gradients, [step] * len(items), min(1.0, MAX_NORM / (norm + 1e-6)) / SCALE)
        if buffers:
            torch._foreach_copy_(buffers, [item.weight for item in items])

    read = sum(g.nbytes for g in gradients)
    kept = sum(t.nbytes for item in items for t in tensors_of(item))
    return Row(lambda: None, run, 2 * read + 2 * kept + sum(w.nbytes + b.nbytes for w, b in zip(weights, buffers, strict=False)))


class Give(torch.autograd.Function):
    """A loss whose backward pass gives these gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:  # noqa: D102
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        return (None, *ctx.gradients)


def public(given: argparse.Namespace, weights: str | None, states: str) -> Row:
    """The same through GradScaler and AdamW."""
    values, scaled = made(given)
    dtype = torch.float32 if weights is None else DTYPES[given.dtype]
    gradients = [g.to(dtype) for g in scaled]
    parameters = [nn.Parameter(w.to(dtype)) for w in values]
    buffers = [w.to(DTYPES[given.dtype]) for w in values] if weights is None else []
    optimizer = AdamW(parameters, weights=weights, states=states, **SETTINGS)
    scaler = GradScaler("cpu", init_scale=SCALE, strategy="stock")

    def prepare() -> None:
        optimizer.zero_grad()
        scaler.scale(Give.apply(gradients, *parameters)).backward()

    def run() -> None:
        result = scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()
        assert result
        if buffers:
            torch._foreach_copy_(buffers, [p.detach() for p in parameters])

    return Row(prepare, run, ours(given, weights or "fp32", states).moved)


def stored(values: Tensor, storage: str, dtype: torch.dtype) -> tuple[Tensor, str, Tensor | None]:
    """A weight, the name of its storage, its residual."""
    if storage == "fp32":
        return values, storage, None
    if storage in ("split", "split24"):
        high, low = numerics.split(values, dtype, 16 if storage == "split" else 8)
        return high, storage, low
    if storage == "kahan":
        high, low = numerics.kahan_split(values, dtype)
        return high, storage, low
    return numerics.cast(values, dtype), storage, None


def moments(size: int, states: str) -> tuple[Any, Any]:
    """Moments of 0."""
    if states == "int8":
        zeros = torch.zeros(size)
        return numerics.encode(zeros, True), numerics.encode(zeros, False)
    dtype = torch.float32 if states == "fp32" else torch.bfloat16
    return torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)


def tensors_of(item: Any) -> list[Tensor]:
    """All that a step reads and writes beside the gradient."""
    states = [t for s in (item.first, item.second) for t in ((s,) if isinstance(s, Tensor) else s)]
    return [item.weight, *([] if item.residual is None else [item.residual]), *states]


ROWS: dict[str, Callable[[argparse.Namespace], Row]] = {
    "peer": peer,
    "peer again (A/A)": peer,
    "fp32, by GradScaler": lambda given: public(given, None, "fp32"),
    "split, by GradScaler": lambda given: public(given, "split", "fp32"),
    "split, int8, by GradScaler": lambda given: public(given, "split", "int8"),
    "fp32": lambda given: ours(given, "fp32", "fp32"),
    "split": lambda given: ours(given, "split", "fp32"),
    "split, bf16 states": lambda given: ours(given, "split", "bf16"),
    "split, int8 states": lambda given: ours(given, "split", "int8"),
    "split24, int8 states": lambda given: ours(given, "split24", "int8"),
    "kahan, bf16 states": lambda given: ours(given, "kahan", "bf16"),
    "stochastic, int8 states": lambda given: ours(given, "stochastic", "int8"),
    "plain": lambda given: ours(given, "plain", "fp32"),
}


def compare(rows: dict[str, Row], rounds: int) -> dict[str, dict[str, Any]]:
    """Median milliseconds of each row and its ratio to the peer's turn next to it."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(rounds + 2):
        for name in list(rows)[:: 1 if round_ % 2 else -1]:
            rows[name].prepare()
            begun = time.perf_counter()
            rows[name].run()
            if round_ > 1:  # the first two warm up, and compile
                times[name].append(time.perf_counter() - begun)
    report = {}
    for name, taken in times.items():
        ratios = [t / p for t, p in zip(taken, times["peer"], strict=True)]
        report[name] = {
            "ms": round(1e3 * statistics.median(taken), 2),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
        }
    return report


def bandwidth(size: int) -> float:
    """Bytes read and written per second where `size` fp32 numbers are changed in place, by torch's threads, at their best."""
    numbers, taken = torch.ones(size), []
    for _ in range(15):
        begun = time.perf_counter()
        numbers.add_(1.0)
        taken.append(time.perf_counter() - begun)
    return 8 * size / min(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--size", type=int, default=200_000)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    given = parser.parse_args()
    rate = bandwidth(given.size * given.tensors)
    rows = {name: ROWS[name](given) for name in dict.fromkeys(("peer", *given.rows))}
    report = compare(rows, given.rounds)
    for name, row in rows.items():
        report[name]["floor_ms"] = round(1e3 * row.moved / rate, 2)
    print(f"{'row':26}{'ms':>9}{'floor':>9}{'ratio':>8}   quartiles", file=sys.stderr)
    for name, found in report.items():
        print(f"{name:26}{found['ms']:9.2f}{found['floor_ms']:9.2f}{found['ratio']:8.3f}   {found['quartiles']}", file=sys.stderr)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numba", "numpy")}
    heading = {"machine": doctor("cpu").as_dict(), "versions": versions, "threads": torch.get_num_threads(), "memory_gb_per_s": round(rate / 1e9, 1)}
    print(json.dumps(heading | vars(given) | {"rows": report}, indent=1))


if __name__ == "__main__":
    main()
