"""How many bytes does a model keep for its backward pass, with activations as computed and in 8 bits, and what does that cost?

Bytes: the memory of all tensors that the forward pass has made and that is still there at its end (told by weak references, by a dispatch mode that
sees every op; no hook is asked), without parameters, buffers and inputs. Gradients: the distance of all gradients of one step from those with
activations as computed, over their length; beside it that of bf16-mixed from fp32. Time: CPU time of forward and backward, ways in turn, as the
median of ratios to the first way, which runs twice a round (A/A). Peak: resident memory of a process of its own above what it had before the step
(Linux, VmHWM), with --peak.
--loss trains the demo GPT of `halfstep train` with some seeds under each precision and prints its losses over held-out text.

Reach: bytes at most 0.55 of those of the same precision without it.
Run: python benchmarks/activation_memory.py [--quick] [--peak] [--rounds 5]   or: --loss [--seeds 3 --steps 150] [--write]
(--write: the tables into docs/guides/activations.md)
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from halfstep import amp
from halfstep.demo import GPT, GPTConfig, read, split
from halfstep.policy import parse

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "activations.md"
PRECISIONS = ("bf16-mixed", "bf16-mixed,activations=int8", "bf16-mixed,activations=fp8")
Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]


class Kept(TorchDispatchMode):
    """Inside, the memory of every tensor that an op makes is noted."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, list | tuple) else (result,):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.made or self.made[storage._cdata][0].expired():
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes_beside(self, known: set[int]) -> int:
        """Of what is still there, without the memory in `known`."""
        return sum(size for key, (ref, size) in self.made.items() if not ref.expired() and key not in known)


def language_model(layers: int, width: int, vocabulary: int, tokens: tuple[int, int]) -> Made:
    size = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "vocab_size": vocabulary, "n_positions": 1024}
    ids = torch.randint(0, vocabulary, tokens, generator=torch.Generator().manual_seed(0))
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)), lambda m: m(input_ids=ids, labels=ids).loss


def bert() -> Made:
    size = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 2000}
    ids = torch.randint(0, 2000, (2, 128), generator=torch.Generator().manual_seed(0))
    return BertForMaskedLM(BertConfig(**size)), lambda m: m(input_ids=ids, labels=ids).loss


def convolutions() -> Made:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    layers = [*block(3, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 64, 10)]
    x = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 10, (32,), generator=torch.Generator().manual_seed(0))
    return nn.Sequential(*layers), lambda m: F.cross_entropy(m(x), y)


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2, 4 layers of 256, 2 x 128 tokens": lambda: language_model(4, 256, 2000, (2, 128)),
    "BERT, 4 layers of 256, 2 x 128 tokens": bert,
    "convolutions with BatchNorm, 32 images": convolutions,
    "GPT-2 124 M, 1 x 128 tokens": lambda: language_model(12, 768, 50257, (1, 128)),
}


def bound(name: str, precision: str) -> Made:
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    amp.bind(model.train(), parse(precision), torch.device("cpu"))
    loss(model).backward()  # what is compiled is compiled, and a lean model has decided on its weights
    model.zero_grad()
    return model, loss


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Tensor:
    torch.manual_seed(1)
    loss(model).backward()
    found = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def kept(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> int:
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    gc.collect()
    with Kept() as seen:
        value = loss(model)
    found = seen.bytes_beside(known)
    value.backward()
    model.zero_grad()
    return found


def seconds(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> float:
    start = time.process_time()
    loss(model).backward()
    model.zero_grad()
    return time.process_time() - start


def row(name: str, rounds: int, precisions: tuple[str, ...] = PRECISIONS) -> dict[str, dict[str, float]]:
    """The first of the precisions is what the others are compared with."""
    exact = gradients(*bound(name, "fp32"))
    made = {precision: bound(name, precision) for precision in precisions}
    base, found = gradients(*made[precisions[0]]), {}
    for precision, ways in made.items():
        grads = gradients(*ways)
        from_fp32, from_base = (float((grads - other).norm() / other.norm()) for other in (exact, base))
        found[precision] = {"bytes": kept(*ways), "from_fp32": from_fp32, "from_base": from_base}
    times: dict[str, list[float]] = {name: [] for name in ("A/A", *precisions[1:])}
    for _ in range(rounds):
        first = seconds(*made[precisions[0]])
        times["A/A"].append(seconds(*made[precisions[0]]) / first)
        for precision in precisions[1:]:
            times[precision].append(seconds(*made[precision]) / first)
    for precision, values in found.items():
        values["ratio"] = values["bytes"] / found[precisions[0]]["bytes"]
        values["time"] = statistics.median(times.get(precision, times["A/A"])) if rounds else float("nan")
    return found


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def child(name: str, precision: str) -> None:
    """The peak of one step, after a first one; gradients are there before it."""
    torch.set_num_threads(1)
    model, loss = bound(name, precision)
    loss(model).backward()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    loss(model).backward()
    print(json.dumps({"peak": resident("VmHWM") - before}))


def memory_table(options: argparse.Namespace) -> str:
    lines = ["| model | precision | MB kept | of bf16-mixed | gradients: from bf16-mixed | from fp32 | CPU time |", "|---|---|---|---|---|---|---|"]
    names = [name for name in MODELS if not (options.quick and "124 M" in name)]
    for name in names:
        for precision, r in row(name, options.rounds).items():
            own = precision == PRECISIONS[0]
            peak = ""
            if options.peak:
                command = [sys.executable, __file__, "--child", name, precision]
                peak = f" (peak {json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)['peak'] / 1e6:.0f})"
            cells = [
                f"{r['bytes'] / 1e6:.1f}{peak}",
                "1" if own else f"{r['ratio']:.3f}",
                "" if own else f"{r['from_base']:.4f}",
                f"{r['from_fp32']:.4f}",
            ]
            lines.append(f"| {name} | `{precision}` | {' | '.join(cells)} | {r['time']:.2f}{' (A/A)' if own else ''} |")
            print(lines[-1], flush=True)
            if not own and r["ratio"] > 0.55:
                print(f"  MISSED: {r['ratio']:.3f} is above 0.55")
    return "\n".join(lines)


def demo_loss(precision: str, seed: int, steps: int) -> float:
    """The loss over held-out text of the demo GPT after some steps of 16 blocks: a seed is that of the first weights and of the order."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig())
    train, held_out = split(read(None), 64)
    amp.bind(model, parse(precision), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for places in torch.randint(0, len(train), (steps, 16)):
        batch = [train[int(i)] for i in places]
        loss = model(*(torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels")))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch = [held_out[i] for i in range(0, len(held_out), max(1, len(held_out) // 200))]
    with torch.no_grad():
        return float(model.eval()(*(torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels")))["loss"])


def loss_table(options: argparse.Namespace) -> str:
    """The demo GPT under each precision with the same seeds."""
    found: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for seed in range(options.seeds):
        for precision in PRECISIONS:
            found[precision].append(demo_loss(precision, seed, options.steps))
            print(seed, precision, found[precision][-1], flush=True)
    seeds = range(options.seeds)
    lines = [f"| precision | {' | '.join(f'seed {s}' for s in seeds)} | mean | difference to bf16-mixed |", "|---" * (options.seeds + 3) + "|"]
    base = found[PRECISIONS[0]]
    for precision, values in found.items():
        difference = ""
        if precision != PRECISIONS[0]:
            error = (sum(statistics.variance(v) for v in (values, base)) / len(base)) ** 0.5
            gap = statistics.mean(values) - statistics.mean(base)
            difference = f"{gap:+.4f} (noise {2 * error:.4f}: {'within' if abs(gap) <= 2 * error else 'OUTSIDE'})"
        lines.append(f"| `{precision}` | {' | '.join(f'{v:.4f}' for v in values)} | {statistics.mean(values):.4f} | {difference} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without the model of 124 M, one round")
    parser.add_argument("--peak", action="store_true", help="resident memory too, in processes of their own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    torch.set_num_threads(1)
    options.rounds = 1 if options.quick else options.rounds
    table = loss_table(options) if options.loss else memory_table(options)
    print(table)
    if options.write:
        mark = "loss" if options.loss else "memory"
        text = PAGE.read_text()
        PAGE.write_text(re.sub(f"(<!-- measured: {mark} -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{table}\n{m[2]}", text, flags=re.S))


if __name__ == "__main__":
    main()
