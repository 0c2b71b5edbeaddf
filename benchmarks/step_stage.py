"""What does everything between backward and the next forward cost? Unscale, check, clip, the update, and the 16-bit weights for the next forward.

The peer is what a plain torch loop does: GradScaler.unscale_, clip_grad_norm_, fused AdamW on fp32 weights and gradients, update, and
casts of the new weights to 16-bit buffers that are kept; the peer of SGD's rows the same with torch's fused SGD and momentum, that of Lion's
rows with Lion in torch's foreach operations (torch has none of its own). The other rows are halfstep's compiled kernels on the same sizes: one pass
that measures the gradients, one that does the rest; rows "by GradScaler" are the public way to the same, `scaler.step(optimizer,
max_norm=1.0)` with `halfstep.optim.AdamW`, with all that the step protocol does beside it.
All rows take turns in one process, the order flipped every round; each round gives one
ratio to its peer's turn next to it, and the median over rounds is reported with its quartiles. `floor_ms` is what the bytes that a row
must move (each tensor it reads or writes, once) would take at the bandwidth of an addition in place, measured here.
Run: python benchmarks/step_stage.py [--quick] [--rounds 21] [--tensors 100] [--size 200000] [--dtype bf16] [--rows peer split ...]
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
from halfstep.optim import SGD, AdamW, Lion

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE, MAX_NORM = 1024.0, 1.0
SETTINGS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01}
SGD_SETTINGS = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}
LION_SETTINGS = {"lr": 1e-4, "weight_decay": 0.1}
PEERS = {"adamw": "peer", "sgd": "SGD: peer", "lion": "Lion: peer"}


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


class ForeachLion(torch.optim.Optimizer):
    """Lion in torch's operations over all tensors at once, as its authors' code has it: what there is to compare with."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            held, gradients, (toward, kept) = group["params"], [p.grad for p in group["params"]], group["betas"]
            averages = [self.state[p].setdefault("exp_avg", torch.zeros_like(p)) for p in held]
            torch._foreach_mul_(held, 1 - group["lr"] * group["weight_decay"])
            direction = torch._foreach_mul(averages, toward)
            torch._foreach_add_(direction, gradients, alpha=1 - toward)
            torch._foreach_sign_(direction)
            torch._foreach_add_(held, direction, alpha=-group["lr"])
            torch._foreach_mul_(averages, kept)
            torch._foreach_add_(averages, gradients, alpha=1 - kept)


def stock(rule: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the peer."""
    if rule == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **SETTINGS)
    return torch.optim.SGD(parameters, fused=True, **SGD_SETTINGS) if rule == "sgd" else ForeachLion(parameters, **LION_SETTINGS)


def settings_of(rule: str, step: int) -> numerics.Settings:
    """The settings of a kernel's step."""
    if rule == "adamw":
        return numerics.AdamWStep(beta1=0.9, beta2=0.999, step=step, **SETTINGS)
    return numerics.SGDStep(**SGD_SETTINGS, first=step == 1) if rule == "sgd" else numerics.LionStep(beta1=0.9, beta2=0.99, **LION_SETTINGS)


def peer(given: argparse.Namespace, rule: str = "adamw") -> Row:
    """Stock torch: fp32 weights, fp32 gradients, 16-bit copies of the weights in buffers that are kept."""
    weights, scaled = made(given)
    parameters = [nn.Parameter(w) for w in weights]
    buffers = [w.to(DTYPES[given.dtype]) for w in weights]
    optimizer = stock(rule, parameters)
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

    update = {"adamw": 28, "sgd": 20, "lion": 68}[rule]  # bytes that the update moves per weight; ForeachLion makes seven passes
    return Row(prepare, run, given.size * given.tensors * (8 + 4 + 8 + update + 6))


def ours(given: argparse.Namespace, storage: str, states: str, rule: str = "adamw") -> Row:
    """The compiled kernels: 16-bit weights with 16-bit gradients; fp32 weights with fp32 gradients and the same copies to buffers that are kept."""
    kernels = cpu_kernels()
    assert kernels is not None, "numba is not installed: pip install 'halfstep[cpu]'"
    weights, scaled = made(given)
    narrow = storage != "fp32"
    dtype = DTYPES[given.dtype] if narrow else torch.float32
    gradients = [g.to(dtype) for g in scaled]
    items = [kernels.Item(*stored(w, storage, dtype), *moments(given.size, states, rule), i) for i, w in enumerate(weights)]
    buffers = [] if narrow else [w.to(DTYPES[given.dtype]) for w in weights]
    plan, taken = kernels.Plan(items, rule=rule), 0

    def run() -> None:
        nonlocal taken
        taken += 1
        sums, _ = kernels.squares(gradients)
        norm = math.sqrt(float(sums.sum())) / SCALE
        assert math.isfinite(norm)
        plan.run(gradients, [settings_of(rule, taken)] * len(items), min(1.0, MAX_NORM / (norm + 1e-6)) / SCALE, taken)
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


def public(given: argparse.Namespace, weights: str | None, states: str, rule: str = "adamw") -> Row:
    """The same through GradScaler and an optimizer."""
    values, scaled = made(given)
    dtype = torch.float32 if weights is None else DTYPES[given.dtype]
    gradients = [g.to(dtype) for g in scaled]
    parameters = [nn.Parameter(w.to(dtype)) for w in values]
    buffers = [w.to(DTYPES[given.dtype]) for w in values] if weights is None else []
    kind, settings = {"adamw": (AdamW, SETTINGS), "sgd": (SGD, SGD_SETTINGS), "lion": (Lion, LION_SETTINGS)}[rule]
    optimizer = kind(parameters, weights=weights, states=states, **settings)
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

    return Row(prepare, run, ours(given, weights or "fp32", states, rule).moved)


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


def moments(size: int, states: str, rule: str) -> tuple[Any, Any]:
    """Moments of 0: two for AdamW, else one."""
    if states == "int8":
        first, second = (numerics.encode(torch.zeros(size), signed) for signed in (True, False))
    else:
        first, second = (torch.zeros(size, dtype=torch.float32 if states == "fp32" else torch.bfloat16) for _ in range(2))
    return first, second if rule == "adamw" else None


def tensors_of(item: Any) -> list[Tensor]:
    """All that a step reads and writes beside the gradient."""
    states = [t for s in (item.first, item.second) for t in ((s,) if isinstance(s, Tensor) else s or ())]
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
    "SGD: peer": lambda given: peer(given, "sgd"),
    "SGD: peer again (A/A)": lambda given: peer(given, "sgd"),
    "SGD: split, by GradScaler": lambda given: public(given, "split", "fp32", "sgd"),
    "SGD: fp32": lambda given: ours(given, "fp32", "fp32", "sgd"),
    "SGD: split": lambda given: ours(given, "split", "fp32", "sgd"),
    "SGD: split, int8 states": lambda given: ours(given, "split", "int8", "sgd"),
    "SGD: split24, int8 states": lambda given: ours(given, "split24", "int8", "sgd"),
    "Lion: peer": lambda given: peer(given, "lion"),
    "Lion: peer again (A/A)": lambda given: peer(given, "lion"),
    "Lion: split, by GradScaler": lambda given: public(given, "split", "fp32", "lion"),
    "Lion: fp32": lambda given: ours(given, "fp32", "fp32", "lion"),
    "Lion: split": lambda given: ours(given, "split", "fp32", "lion"),
    "Lion: split, int8 states": lambda given: ours(given, "split", "int8", "lion"),
    "Lion: split24, int8 states": lambda given: ours(given, "split24", "int8", "lion"),
}


def peer_of(name: str) -> str:
    """The row that `name` is compared with."""
    return PEERS[name.partition(":")[0].lower()] if ":" in name else PEERS["adamw"]


def compare(rows: dict[str, Row], rounds: int) -> dict[str, dict[str, Any]]:
    """Median milliseconds of each row and its ratio to its peer's turn next to it."""
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
        ratios = [t / p for t, p in zip(taken, times[peer_of(name)], strict=True)]
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
    parser.add_argument("--quick", action="store_true", help="5 rounds over 2 M weights: whether it runs, and no more")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.tensors = 5, 10
    rate = bandwidth(given.size * given.tensors)
    rows = {name: ROWS[name](given) for name in dict.fromkeys((*map(peer_of, given.rows), *given.rows))}
    report = compare(rows, given.rounds)
    for name, row in rows.items():
        report[name]["floor_ms"] = round(1e3 * row.moved / rate, 2)
    print(f"{'row':29}{'ms':>9}{'floor':>9}{'ratio':>8}   quartiles", file=sys.stderr)
    for name, found in report.items():
        print(f"{name:29}{found['ms']:9.2f}{found['floor_ms']:9.2f}{found['ratio']:8.3f}   {found['quartiles']}", file=sys.stderr)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numba", "numpy")}
    heading = {"machine": doctor("cpu").as_dict(), "versions": versions, "threads": torch.get_num_threads(), "memory_gb_per_s": round(rate / 1e9, 1)}
    print(json.dumps(heading | vars(given) | {"rows": report}, indent=1))


if __name__ == "__main__":
    main()
