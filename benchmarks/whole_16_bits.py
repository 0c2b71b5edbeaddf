"""How long does a step of a model take that is in fp16 or bf16 as a whole, on this CPU?

A GPT-2 style model of 23 M parameters on 1 x 128 tokens, whole steps in turns (fetch, forward, backward, clip, AdamW), each contender in a process of
its own: halfstep's Trainer under a `*-true` precision as it is, again (A/A), and with `products=native`, by torch's own kernels; a plain torch loop
on a model that was cast by hand; and plain torch in fp32 for orientation. The loss scale of fp16 is static, so that the first step is like the
others: what takes longer than 5 s is measured by that one.
Run: python benchmarks/whole_16_bits.py [--format fp16] [--rounds 5] [--seconds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no thread begins with the import of numpy: contenders are forked after it

import torch
from torch import nn

from benchmarks.suite import doors, nets
from benchmarks.suite.method import Contender, Turn, take_turns
from benchmarks.suite.result import compared
from benchmarks.suite.workers import apart
from halfstep.hardware import doctor

OURS, NATIVE, PLAIN = "halfstep.Trainer", "halfstep.Trainer, products=native", "plain torch, model cast by hand"
BF16 = "bf16"


def cast_by_hand(job: nets.Job, form: str) -> Turn:
    """`model.half()` or `model.bfloat16()` and torch's fused AdamW on 16-bit weights: nothing is beside them."""
    scale = 1.0 if form == BF16 else doors.SCALE

    def steps() -> doors.Steps:
        model, optimizer, schedule, loader = doors.parts(job)
        model.to(doors.DTYPES[form])  # in place: the optimizer has these parameters
        for batch in doors.batches(loader):
            loss = model(**batch)["loss"]
            (loss * scale).backward()
            if scale != 1.0:
                torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1 / scale)
            nn.utils.clip_grad_norm_(model.parameters(), doors.NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()

    return doors.by_loop(steps())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", choices=("fp16", BF16), default="fp16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, not how fast")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    job = nets.gpt2(1, 16, layers=1, width=64, vocabulary=256) if options.quick else nets.gpt2(1, 128)
    ours = partial(doors.halfstep_trainer, job)
    precision = "bf16-true" if options.format == BF16 else f"fp16-true,scale=static:{doors.SCALE:g}"
    entries: list[tuple[str, Any, Any]] = [
        (OURS, "ours", partial(ours, precision)),
        (f"{OURS} again (A/A)", "twin", partial(ours, precision)),
        (NATIVE, "reference", partial(ours, f"{precision},products=native")),
        (PLAIN, "peer", partial(cast_by_hand, job, options.format)),
        ("plain torch, fp32", "reference", partial(doors.bare_loop, job)),
    ]
    load = os.getloadavg()[0]
    doors.imported()
    taken, excluded = take_turns(
        apart([Contender(name, make, role) for name, role, make in entries]), options.rounds, options.seconds, needed=[NATIVE, PLAIN]
    )
    print(f"{doctor('cpu').capabilities.name}, {torch.get_num_threads()} threads, torch {torch.__version__}, load before {load:.1f}")
    print("| | ms a step | ours to it | rounds | last loss |\n|---|---|---|---|---|")
    for one in taken:
        middle = statistics.median(one.known)
        # within rounds, or of the medians where there is one round alone
        ratio = compared(taken[0], one)["ratio"] if len(one.known) > 1 else statistics.median(taken[0].known) / middle
        print(f"| {one.name} | {1e3 * middle:.1f} | {ratio:.3f} | {len(one.known)} | {one.losses[-1]:.3f} |")
    for other in excluded:
        print(f"{other.name} was not measured: {other.reason}")


if __name__ == "__main__":
    main()
