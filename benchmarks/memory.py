"""How many bytes do weights, gradients and AdamW's states take, and how large is a checkpoint?

Builds a GPT-2 (124 M parameters by default, random weights: nothing is downloaded), takes two steps of two short sequences by the accelerator under
each precision, and adds up the tensors that are there: parameters, residuals, gradients before they are cleared, states. Beside it what
`halfstep.policy` says it should be, from the shapes alone; the two must be equal, or the script fails. The checkpoint row divides the size of
a saved state by that of torch's own AdamW in fp32, written by torch.save.

With --peak: the largest resident memory of fresh processes that take two steps of a sequence of 64 tokens (--quick: one step, two layers): torch's
bf16 autocast with its fused AdamW, `bf16-lean,weights=split24`, and the same with gradient release. Once as the system counts it, and once less
what the process had when its libraries were loaded (torch, transformers; for halfstep also numba and its compiled kernels).
Run: python benchmarks/memory.py [--layers 12 --width 768 --vocabulary 50257] [--peak [--quick]]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from halfstep import Accelerator
from halfstep.hardware import doctor
from halfstep.optim import AdamW, master_of
from halfstep.policy import bytes_per_parameter, model_bytes

PRECISIONS = (
    "fp32",
    "bf16-mixed",
    "bf16-lean,states=fp32",
    "bf16-lean",
    "bf16-lean,weights=split24",
    "bf16-true",
)


def model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.width // 64, vocab_size=options.vocabulary, n_positions=1024)
    return GPT2LMHeadModel(config)


def measured(net: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes of the tensors that are there between a backward pass and the next."""
    held = list(net.parameters())
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return {
        "weights": sum(p.nbytes for p in held),
        "residuals": sum(m.residual.nbytes for p in held if (m := master_of(p)) is not None and m.residual is not None),
        "gradients": sum(p.grad.nbytes for p in held if p.grad is not None),
        "states": sum(t.nbytes for t in states),
    }


def row(precision: str, options: argparse.Namespace, reference: int | None) -> dict[str, Any]:
    accelerator, net = Accelerator(precision=precision, cpu=True), model(options)
    net, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=1e-4))
    tokens = torch.randint(0, options.vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(net(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
    found = measured(net, optimizer)
    sizes = [(tuple(p.shape), p.dtype != torch.float32 and (p.grad_dtype == p.dtype or "table")) for p in net.parameters()]
    expected = model_bytes(sizes, accelerator.policy, "AdamW")
    count = sum(p.numel() for p in net.parameters())
    with tempfile.TemporaryDirectory() as folder:
        saved = accelerator.save_state(Path(folder) / "checkpoint-2")
        size = sum(f.stat().st_size for f in saved.glob("*.safetensors"))
    answer = {
        "castable_share": sum(p.numel() for p in net.parameters() if p.dtype != torch.float32) / count,
        "per_castable": bytes_per_parameter(accelerator.policy, "AdamW").castable.total,
        "per_parameter": sum(found.values()) / count,
        "tensors": found,
        "expected": {"weights": expected.weight, "residuals": expected.residual, "gradients": expected.gradient, "states": expected.states},
        "checkpoint": size,
    }
    if reference is not None:
        answer["checkpoint_ratio"] = size / reference
    if answer["tensors"] != answer["expected"]:
        sys.exit(f"{precision}: the tensors take {answer['tensors']}, and halfstep.policy says {answer['expected']}")
    return answer


def by_torch(options: argparse.Namespace) -> int:
    """Bytes of what a loop with torch's AdamW in fp32 saves."""
    net = model(options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    tokens = torch.randint(0, options.vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    net(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
        return path.stat().st_size


WAYS = ("stock", "lean", "lean with release")


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_of(way: str, options: argparse.Namespace) -> dict[str, int]:
    """In a process of its own: the bytes with all libraries loaded, and the most that training steps have taken."""
    if way != "stock":
        warm = nn.Linear(300, 300).bfloat16()
        optimizer: Any = AdamW(warm.parameters(), weights="split24", states="int8")
        warm(torch.ones(1, 300, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()  # loads the kernels
    libraries = resident()
    net, tokens = model(options), torch.randint(0, options.vocabulary, (1, 64), generator=torch.Generator().manual_seed(0))
    steps = 1 if options.quick else 2
    if way == "stock":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        for _ in range(steps):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        accelerator = Accelerator(precision="bf16-lean,weights=split24", cpu=True)
        net, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=1e-4))
        if way == "lean with release":
            accelerator.release(optimizer)
        for _ in range(steps):
            accelerator.backward(net(input_ids=tokens, labels=tokens).loss)
            if not optimizer.step():
                sys.exit(f"{way}: a step was not applied")
            optimizer.zero_grad()
    return {"libraries": libraries, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def peaks(options: argparse.Namespace) -> None:
    """Run each way in a fresh process, and print the ratios to the first."""
    given = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "vocabulary")] + ["--quick"] * options.quick
    found = {}
    for way in WAYS:
        done = subprocess.run([sys.executable, __file__, f"--way={way}", *given], check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    stock = found["stock"]
    print("| way | peak MB | of stock | less libraries MB | of stock |\n|---|---|---|---|---|")
    for way, f in found.items():
        own, whole = f["peak"] - f["libraries"], f["peak"] / stock["peak"]
        print(f"| {way} | {f['peak'] / 1e6:.0f} | {whole:.3f} | {own / 1e6:.0f} | {own / (stock['peak'] - stock['libraries']):.3f} |")
    print(json.dumps({"machine": doctor("cpu").as_dict(), "rows": found}, indent=1))


def tensors(options: argparse.Namespace) -> None:
    """Count the tensors under each precision, and print the table."""
    reference = by_torch(options)
    found = {precision: row(precision, options, reference) for precision in PRECISIONS}
    print("| precision | per castable weight | per parameter, whole model | checkpoint against torch's fp32 AdamW |\n|---|---|---|---|")
    for precision, r in found.items():
        print(f"| `{precision}` | {r['per_castable']:.2f} | {r['per_parameter']:.2f} | {r['checkpoint_ratio']:.3f} |")
    about = {"layers": options.layers, "width": options.width, "vocabulary": options.vocabulary, "torch_checkpoint": reference}
    print(json.dumps({"model": about, "machine": doctor("cpu").as_dict(), "rows": found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--way", choices=WAYS)  # in a process of its own
    options = parser.parse_args()
    if options.quick:
        options.layers = min(options.layers, 2)
    if options.way is not None:
        print(json.dumps(peak_of(options.way, options)))
    elif options.peak:
        peaks(options)
    else:
        tensors(options)


if __name__ == "__main__":
    main()
