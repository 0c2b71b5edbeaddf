"""Does an audit of a run in fp32 foretell how long the same step takes in bf16-mixed?

Three models: one of matrix products, one of convolutions, one of table lookups and elementwise ops. For each the predicted ratio of step times comes
from the ops of the fp32 run alone, the measured one from whole steps in turns (medians of the ratios within rounds); fp32 against itself (A/A) says
how noisy the machine was.
Run: python benchmarks/audit_gain.py [--precision bf16-mixed] [--rounds 9] [--model NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import audit
from halfstep.demo import GPT, GPTConfig
from halfstep.hardware import doctor

WITHIN = 0.15  # of the measured ratio: the target


class Ads(nn.Module):
    """Features of a click looked up in tables, crossed one by one, and a small network on top."""

    def __init__(self, tables: int = 8, rows: int = 50_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.norm = nn.LayerNorm(width)
        self.top = nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        """ids: (B, tables) rows; clicked: (B, 1) 0 or 1. The loss."""
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        crossed = found[0]
        for other in found[1:]:
            crossed = crossed + torch.tanh(crossed * other) + F.silu(other)
        return F.binary_cross_entropy_with_logits(self.top(self.norm(crossed)), clicked)


class Pictures(nn.Module):
    """A small residual network with batch norms."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """x: (B, 3, H, W); labels: (B,). The loss."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Name to model and batch."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 128))
    return {
        "products: GPT, width 256": (GPT(GPTConfig(block_size=128, layers=4, heads=4, width=256)), (tokens, tokens)),
        "convolutions: residual net, width 64": (Pictures(), (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))),
        "lookups and elementwise: 8 tables of 50,000 rows": (Ads(), (torch.randint(0, 50_000, (4096, 8)), torch.rand(4096, 1).round())),
    }


def same_twice(model: nn.Module, batch: tuple[Tensor, ...], rounds: int) -> float:
    """fp32 against fp32, in turns."""
    return audit(model, batch, precision="fp32", rounds=rounds).measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="", help="a part of the name of one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: both for name, both in models().items() if options.model in name}
    if not chosen:
        parser.error(f"--model {options.model} is part of no name; there are {', '.join(models())}")
    rows = {}
    for name, (model, batch) in chosen.items():
        found = audit(model, batch, precision=options.precision, rounds=options.rounds)
        noise = same_twice(model, batch, options.rounds)
        error = found.predicted / found.measured - 1
        rows[name] = {
            "fp32_ms": round(1e3 * found.other, 2),
            "ms": round(1e3 * found.step, 2),
            "measured": round(found.measured, 3),
            "predicted": round(found.predicted, 3),
            "error": round(error, 3),
            "within": abs(error) <= WITHIN,
            "a_to_a": round(noise, 3),
            "largest_loss": found.findings[0].cause if found.findings else "",
        }
    if options.json:
        print(json.dumps({"machine": doctor("cpu").as_dict(), "precision": options.precision, "rounds": options.rounds, "rows": rows}, indent=1))
        return
    print(f"{options.precision} against fp32, forward and backward, {options.rounds} rounds, one thread, torch {torch.__version__}")
    print("| model | fp32 ms | ms | measured | predicted | error | A/A |\n|---|---|---|---|---|---|---|")
    for name, r in rows.items():
        print(f"| {name} | {r['fp32_ms']} | {r['ms']} | {r['measured']} | {r['predicted']} | {r['error']:+.1%} | {r['a_to_a']} |")
    print(f"largest error {max(abs(r['error']) for r in rows.values()):.1%}, median {statistics.median(abs(r['error']) for r in rows.values()):.1%}")


if __name__ == "__main__":
    main()
