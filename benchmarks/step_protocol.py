"""What does the step protocol cost over a bare torch loop?

One training step of a GPT-2 of 23 M parameters: forward under the same autocast, backward, fused AdamW, zero_grad. The bare loop does
no more than that; the protocol adds scale, the verdict, unscaling, update and, in one variant, clipping. All variants take turns in one
process, the order flipped every round. Each round gives one ratio to the bare step next to it; the median over rounds is reported,
with its quartiles, and the bare loop against itself (A/A) says how noisy the machine was. The last part times each stage alone.
Run: python benchmarks/step_protocol.py [--rounds 15] [--batch 4] [--length 128] [--dtypes bf16 fp16] [--stages-only]
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from halfstep import numerics
from halfstep.amp import GradScaler, autocast
from halfstep.hardware import doctor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Stages = dict[str, float]


class Loop:
    """One model with its optimizer; `step` trains on one batch and notes the seconds of each stage."""

    def __init__(self, dtype: torch.dtype, batch: int, length: int, clip: bool = False) -> None:
        torch.manual_seed(0)
        self.model = make_model(length)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.dtype = dtype
        self.clip = clip
        self.ids = torch.randint(0, self.model.config.vocab_size, (batch, length))

    def settle(self) -> None:
        """Some steps on a tiny batch: afterwards states exist, the loss scale is calibrated, and gradients are no longer measured every time."""
        batch, self.ids = self.ids, self.ids[:1, :8]
        for _ in range(10):
            self.step()
        self.ids = batch

    def forward(self) -> Tensor:
        """The loss of the batch."""
        with autocast("cpu", self.dtype):
            return self.model(input_ids=self.ids, labels=self.ids).loss

    def stages(self, loss: Tensor) -> list[tuple[str, Callable[[], Any]]]:
        """What follows the forward pass, by name."""
        clip = [("clip", lambda: nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))] if self.clip else []
        return [("backward", loss.backward), *clip, ("step", self.optimizer.step), ("zero_grad", self.optimizer.zero_grad)]

    def step(self) -> Stages:
        """One training step; the seconds of each stage and of all."""
        times: Stages = {}
        begun = time.perf_counter()
        loss = self.forward()
        times["forward"] = time.perf_counter() - begun
        for name, call in self.stages(loss):
            last = time.perf_counter()
            call()
            times[name] = time.perf_counter() - last
        times["total"] = time.perf_counter() - begun
        return times


class ProtocolLoop(Loop):
    """The same with a GradScaler: enabled for fp16, checks alone for bf16."""

    def __init__(self, dtype: torch.dtype, batch: int, length: int, clip: bool = False, **settings: Any) -> None:
        super().__init__(dtype, batch, length, clip)
        self.scaler = GradScaler(enabled=dtype == torch.float16, **settings)
        self.scaler.watch(self.optimizer)
        self.scaled: Any = None

    def stages(self, loss: Tensor) -> list[tuple[str, Callable[[], Any]]]:
        """The same through the scaler."""

        def scale() -> None:
            self.scaled = self.scaler.scale(loss)

        def backward() -> None:
            self.scaled.backward()
            self.scaled = None

        clip = [("clip", lambda: self.scaler.clip_grad_norm_(self.model.parameters(), 1.0))] if self.clip else []
        step = ("step", lambda: self.scaler.step(self.optimizer))
        return [("scale", scale), ("backward", backward), *clip, step, ("update", self.scaler.update), ("zero_grad", self.optimizer.zero_grad)]


def make_model(length: int) -> GPT2LMHeadModel:
    """GPT-2's blocks, 6 of width 384, and a vocabulary of 32000: 23 M parameters."""
    config = GPT2Config(n_layer=6, n_head=6, n_embd=384, vocab_size=32000, n_positions=max(128, length), bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def variants(dtype: torch.dtype, batch: int, length: int) -> dict[str, Loop]:
    """The loops to compare. The protocol's defaults, torch's rule for the scale, and the verdict read late where this version has it."""
    known = inspect.signature(GradScaler.__init__).parameters
    size = (dtype, batch, length)
    loops: dict[str, Loop] = {"bare": Loop(*size), "bare again (A/A)": Loop(*size), "protocol": ProtocolLoop(*size)}
    if "strategy" in known and dtype == torch.float16:
        loops["protocol, stock scale"] = ProtocolLoop(*size, strategy="stock")
    if "deferred" in known:
        loops["protocol, deferred"] = ProtocolLoop(*size, deferred=True)
    loops["bare, clipped"] = Loop(*size, clip=True)
    loops["protocol, clipped"] = ProtocolLoop(*size, clip=True)
    return loops


def compare(loops: dict[str, Loop], rounds: int) -> dict[str, Any]:
    """Rows of medians and of ratios to the bare loop (a clipped one to the clipped bare loop), and the seconds of each stage."""
    times: dict[str, list[Stages]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.settle()
    for round_ in range(rounds + 1):
        for name in list(loops)[:: 1 if round_ % 2 else -1]:
            taken = loops[name].step()
            if round_:  # the first one warms up
                times[name].append(taken)
    rows = {}
    for name, taken in times.items():
        base = times["bare, clipped" if "clipped" in name else "bare"]
        ratios = sorted(t["total"] / b["total"] for t, b in zip(taken, base, strict=True))
        after = [outside(t) - outside(b) for t, b in zip(taken, base, strict=True)]
        rows[name] = {
            "ms": milliseconds([t["total"] for t in taken]),
            "ratio": round(statistics.median(ratios), 4),
            "quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]] if len(ratios) > 1 else None,
            "ms_more_outside_forward_and_backward": milliseconds(after),
            "stages_ms": {stage: milliseconds([t[stage] for t in taken]) for stage in taken[0]},
        }
    return rows


def outside(taken: Stages) -> float:
    """Seconds of a step that are neither forward nor backward."""
    return taken["total"] - taken["forward"] - taken["backward"]


def milliseconds(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def timed(call: Callable[[], Any], times: int) -> float:
    """Median milliseconds of a call, after two that warm up."""
    taken = []
    for i in range(times + 2):
        begun = time.perf_counter()
        call()
        if i > 1:
            taken.append(time.perf_counter() - begun)
    return milliseconds(taken)


def passes(batch: int, length: int, times: int) -> dict[str, float]:
    """Each pass over the gradients alone, beside the fewest bytes that a pass has to move at the bandwidth measured here."""
    loop = Loop(torch.bfloat16, batch, length)
    loop.forward().backward()
    gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]
    device, size = gradients[0].device, sum(g.numel() * g.element_size() for g in gradients)
    one, other = torch.ones(size // 4), torch.empty(size // 4)
    copy = timed(lambda: other.copy_(one), times)
    return {
        "gradient_bytes": size,
        "parameters": len(gradients),
        "copy_of_as_many_bytes_ms": copy,
        "norm_ms": timed(lambda: float(numerics.norm(gradients, device)), times),
        "largest_ms": timed(lambda: float(numerics.largest(gradients, device)), times),
        "largest_by_abs_amax_ms": timed(lambda: [float(g.abs().amax()) for g in gradients], times),
        "largest_by_foreach_norm_ms": timed(lambda: [float(n) for n in torch._foreach_norm(gradients, float("inf"))], times),
        "multiply_ms": timed(lambda: numerics.multiply_(gradients, 0.5) or numerics.multiply_(gradients, 2.0), times) / 2,
        "fused_adamw_ms": timed(loop.optimizer.step, times),
    }


def extras(dtype: torch.dtype, batch: int, length: int, times: int) -> dict[str, float]:
    """What hooks at the loss and a known module cost: backward of a scaled loss with and without, and a step of a module with many buffers."""
    plain, protocol = Loop(dtype, batch, length), ProtocolLoop(dtype, batch, length)

    def scaled() -> None:
        protocol.scaler.scale(protocol.model.transformer.wpe.weight.sum() * 0).backward()
        protocol.optimizer.zero_grad()

    def bare() -> None:
        (plain.model.transformer.wpe.weight.sum() * 0).backward()
        plain.optimizer.zero_grad()

    norms = nn.Sequential(*[nn.BatchNorm1d(256) for _ in range(64)])
    optimizer, scaler = AdamW(norms.parameters(), lr=1e-4, fused=True), GradScaler(enabled=dtype == torch.float16)
    rows = torch.randn(32, 256)

    def norms_step(watched: bool) -> None:
        loss = norms(rows).square().mean()
        scaler.scale(loss).backward() if watched else loss.backward()
        scaler.step(optimizer) if watched else optimizer.step()
        scaler.update()
        optimizer.zero_grad()

    unknown = timed(lambda: norms_step(False), times)
    try:
        scaler.watch(norms)
    except AttributeError:  # a version that watches optimizers only
        scaler.watch(optimizer)
    known = timed(lambda: norms_step(True), times)
    return {
        "scale_and_backward_of_one_leaf_ms": timed(scaled, times),
        "backward_of_one_leaf_ms": timed(bare, times),
        "64_batch_norms_watched_step_ms": known,
        "64_batch_norms_bare_step_ms": unknown,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--stages-only", action="store_true")
    given = parser.parse_args()
    report: dict[str, Any] = {"machine": doctor("cpu").as_dict(), "threads": torch.get_num_threads(), "rounds": given.rounds}
    report |= {"batch": given.batch, "length": given.length, "parameters": sum(p.numel() for p in make_model(given.length).parameters())}
    if not given.stages_only:
        report["rows"] = {name: compare(variants(DTYPES[name], given.batch, given.length), given.rounds) for name in given.dtypes}
    report["passes"] = passes(given.batch, given.length, given.rounds)
    report["extras"] = {name: extras(DTYPES[name], given.batch, given.length, given.rounds) for name in given.dtypes}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
