"""How many weights of a model loaded in bf16 move, how far do they decay, and does a second moment forget?

Three questions, each asked of torch.optim.AdamW on the 16-bit weights and of the storages and state formats of halfstep:

1. A small GPT in bf16 (weights of spread 0.02, as GPT-2 begins) takes 20 steps at learning rate 1e-5, the same batches for every row. `moved`:
   the share of weights whose value, residual included, is another than before. `distance`: how far they went along the way of fp32 copies
   (1 is all of it), by projection; a rounding that is right in the mean has 1 too.
2. 4,096 weights of 1.0 with gradients of zero decay by 1e-5 a step (learning rate 1e-4 times weight decay 0.1) for 1,000 steps: their mean should be
   0.99003, which is what fp32 makes of the factor 1 - 1e-5. Where rounding is by chance the mean of that many is off by about 1e-4.
3. The second moment of 4,096 weights after one gradient and 2,000 gradients of zero (beta2 0.999): of its sum 0.1352 should be left.

Run: python benchmarks/moved_weights.py [--steps 20 --seed 0]; under a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.demo import GPT, GPTConfig
from halfstep.hardware import doctor
from halfstep.optim import AdamW, full_values

STORAGES = ("plain", "stochastic", "split24", "kahan", "split")
STATES = ("bf16", "int8", "fp32")
COUNT = 4096

Make = Callable[[list[nn.Parameter]], Optimizer]


class Copies(torch.optim.AdamW):
    """torch's AdamW on fp32 copies of 16-bit weights, which get them back rounded: the masters of every paper, 4 bytes per weight more."""

    def __init__(self, narrow: list[nn.Parameter], **settings: Any) -> None:
        self.narrow = narrow
        self.wide = [nn.Parameter(p.detach().float()) for p in narrow]
        super().__init__(self.wide, **settings)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the weights."""
        for p in self.narrow:
            p.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the copies and round them into the weights."""
        for wide, p in zip(self.wide, self.narrow, strict=True):
            wide.grad = None if p.grad is None else p.grad.float()
        super().step()
        with torch.no_grad():
            for wide, p in zip(self.wide, self.narrow, strict=True):
                p.copy_(wide)


def stored(weights: str, seed: int, **settings: Any) -> Make:
    return lambda held: AdamW(held, weights=weights, seed=seed, **settings)


def rows(seed: int, **settings: Any) -> dict[str, Make]:
    """Every way to keep a 16-bit weight, the reference first."""
    found: dict[str, Make] = {
        "fp32 copies": lambda held: Copies(held, **settings),
        "torch.optim.AdamW": lambda held: torch.optim.AdamW(held, **settings),
    }
    return found | {f"weights={name}": stored(name, seed, **settings) for name in STORAGES}


def values(optimizer: Optimizer, held: list[nn.Parameter]) -> list[Tensor]:
    """The weights in fp32 with all that is kept of them."""
    return [p.detach().clone() for p in optimizer.wide] if isinstance(optimizer, Copies) else [full_values(p) for p in held]


def movements(steps: int, seed: int) -> dict[str, dict[str, float]]:
    """The first question."""
    text = torch.randint(0, 256, (steps, 8, 32), generator=torch.Generator().manual_seed(seed))
    found: dict[str, dict[str, float]] = {}
    reference: list[Tensor] = []
    for name, make in rows(seed, lr=1e-5).items():
        torch.manual_seed(seed)
        net = GPT(GPTConfig(block_size=32, layers=2, width=64)).to(torch.bfloat16)
        held = list(net.parameters())
        before, optimizer = [p.detach().float() for p in held], make(held)
        for tokens in text:
            optimizer.zero_grad()
            net(tokens, labels=tokens)["loss"].backward()
            optimizer.step()
        change = [a - b for a, b in zip(values(optimizer, held), before, strict=True)]
        reference = reference or change
        along = sum(float((c * r).sum()) for c, r in zip(change, reference, strict=True)) / sum(float((r * r).sum()) for r in reference)
        found[name] = {"moved": sum(int((c != 0).sum()) for c in change) / sum(c.numel() for c in change), "distance": along}
    return found


def decays(seed: int, steps: int = 1000) -> dict[str, float]:
    """The second question: the mean of the weights at the end."""
    found = {}
    for name, make in rows(seed, lr=1e-4, weight_decay=0.1).items():
        p = nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        optimizer = make([p])
        for _ in range(steps):
            optimizer.step()
        found[name] = float(values(optimizer, [p])[0].double().mean())
    return found


def left(optimizer: Optimizer, p: nn.Parameter, steps: int) -> float:
    """The share of its second moment that zero gradients leave."""
    optimizer.step()
    assert p.grad is not None
    p.grad.zero_()

    def total() -> float:
        if isinstance(optimizer, AdamW):
            return float(optimizer.decoded(optimizer.state[p], "exp_avg_sq", p).double().sum())
        return float(optimizer.state[p]["exp_avg_sq"].double().sum())

    before = total()
    for _ in range(steps):
        optimizer.step()
    return total() / before


def forgetting(seed: int, steps: int = 2000) -> dict[str, float]:
    """The third question."""
    found = {}
    makers: dict[str, Make] = {"torch.optim.AdamW, bf16 weights": torch.optim.AdamW}
    for name, make in (makers | {f"states={s}": stored("split", seed, states=s) for s in STATES}).items():
        p = nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
        p.grad = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        found[name] = left(make([p]), p, steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    moved, decayed, forgotten = movements(given.steps, given.seed), decays(given.seed), forgetting(given.seed)
    print("| AdamW on bf16 weights | weights that moved | of the distance of fp32 copies | 1.0 after 1,000 decays by 1e-5 |\n|---|---|---|---|")
    for name, row in moved.items():
        print(f"| {name} | {100 * row['moved']:.1f} % | {row['distance']:.3f} | {decayed[name]:.5f} |")
    print("\n| second moment | left after 2,000 zero gradients |\n|---|---|")
    for name, share in forgotten.items():
        print(f"| {name} | {share:.4f} |")
    print(json.dumps({"machine": doctor("cpu").as_dict(), "moved": moved, "decayed": decayed, "forgotten": forgotten} | vars(given), indent=1))


if __name__ == "__main__":
    main()
