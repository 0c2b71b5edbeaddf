"""How exactly do 8 bits hold a moment? Our roots beside softsign and square root, the companding of FlashOptim.

Blocks of 128 numbers from normal and log-normal distributions, and of columns that differ by 1:10^4, are encoded with one scale per block
and decoded; printed is the root mean square of the error over that of the numbers (of the second moment: of its square root, by which an
update is divided), and the share of numbers that became 0. All are rounded stochastically between neighbouring levels. Then: the largest
update of AdamW over 300 steps, in learning rates.
Run: python benchmarks/companding.py [--least 6]
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.hardware import doctor
from halfstep.numerics.blocks import LEAST

BLOCK, BLOCKS = 128, 4000


def levels(name: str) -> Tensor:
    """The levels from 0 to 1 that a code stands for."""
    y = torch.arange(128, dtype=torch.float64) / 127 if name in ("root", "softsign") else torch.arange(256, dtype=torch.float64) / 255
    return {"root": y**2, "softsign": y / (2 - y), "fourth root": y**4, "square root": y**2}[name]


def through(x: Tensor, name: str, generator: torch.Generator, lowest: int = LEAST) -> Tensor:
    """`x` (blocks by 128) encoded and decoded; a second moment that is not 0 gets at least the level `lowest` (under a square root: 1)."""
    grid, scale = levels(name), x.abs().amax(1, keepdim=True).double()
    y = (x.abs().double() / scale.clamp(min=1e-300)).clamp(0, 1)
    high = torch.searchsorted(grid, y.contiguous()).clamp(1, len(grid) - 1)
    share = (y - grid[high - 1]) / (grid[high] - grid[high - 1])
    code = high - 1 + (share > torch.rand(y.shape, generator=generator, dtype=torch.float64)).long()
    least = {"fourth root": lowest, "square root": 1}.get(name, 0)
    code = torch.where((y > 0) & (code < least), least, code)
    return (x.sign().double() * grid[code] * scale).float()


def numbers(generator: torch.Generator) -> dict[str, Tensor]:
    def normal() -> Tensor:
        return torch.randn(BLOCKS, BLOCK, generator=generator)

    spread = {f"log-normal, sigma {s}": normal().sign() * (normal() * s).exp() for s in (1, 2, 3)}
    return {"normal": normal(), **spread, "columns 1 and 1e-4": normal() * torch.where(torch.arange(BLOCK) % 2 == 0, 1.0, 1e-4)}


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def largest_update(first: str, second: str, lowest: int) -> float:
    """AdamW at learning rate 1 on blocks whose columns differ by 1:10^4; "" keeps a moment in fp32."""
    shape, generator = (16, BLOCK), torch.Generator().manual_seed(1)
    size = torch.where(torch.arange(BLOCK) % 2 == 0, 1.0, 1e-4)
    p, m, v = (torch.zeros(shape) for _ in range(3))
    worst = 0.0
    for step in range(1, 301):
        before = p.clone()
        gradient = torch.randn(shape, generator=generator) * size
        numerics.adamw_(p, gradient, m, v, lr=1.0, beta1=0.9, beta2=0.999, eps=1e-20, weight_decay=0.0, step=step)
        worst = max(worst, float((p - before).abs().max()))
        m = through(m, first, generator) if first else m
        v = through(v, second, generator, lowest) if second else v
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--least", type=int, default=LEAST, help="the lowest level of a second moment that is not 0")
    lowest = parser.parse_args().least
    generator = torch.Generator().manual_seed(0)
    data = numbers(generator)
    print(f"| state | companding | {' | '.join(data)} | became 0 in the last |\n|---|---|{'---|' * len(data)}---|")
    rows = {}
    for state, name in (("first", "root"), ("first", "softsign"), ("second", "fourth root"), ("second", "square root")):
        found, zeros = [], 0.0
        for x in data.values():
            values = x if state == "first" else x.square()
            kept = through(values, name, generator, lowest)
            found.append(error(kept, values) if state == "first" else error(kept.sqrt(), values.sqrt()))
            zeros = float(((kept == 0) & (values != 0)).double().mean())
        rows[f"{state}, {name}"] = found
        print(f"| {state} | {name} | {' | '.join(f'{e:.4f}' for e in found)} | {zeros:.1%} |")
    pairs = {"fp32": ("", ""), "root and fourth root": ("root", "fourth root"), "softsign and square root": ("softsign", "square root")}
    updates = {name: largest_update(*pair, lowest) for name, pair in pairs.items()}
    print(", ".join(f"{name}: {value:.2f}" for name, value in updates.items()), "(largest update, in learning rates)")
    print(json.dumps({"machine": doctor("cpu").as_dict(), "errors": rows, "largest_update": updates}, indent=1))


if __name__ == "__main__":
    main()
