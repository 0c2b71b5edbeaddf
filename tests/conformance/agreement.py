"""Decisions that are made from 16-bit numbers, and two runs of the same weights that should agree (kind I)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.tools import BF16, near

RECORDS: list[Record] = []
record = collector(RECORDS, "I")


class _Model(nn.Module):
    """A 16-bit body, and a named head whose numbers decide."""

    def __init__(self, name: str, inputs: int, outputs: int, std: float, bias: float = 0.0) -> None:
        super().__init__()
        self.body, self.name = nn.Identity(), name
        self.add_module(name, head := nn.Linear(inputs, outputs))
        nn.init.normal_(head.weight, std=std)
        nn.init.constant_(head.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(self.body(x))  # type: ignore[no-any-return]


def _held(library: Library, model: _Model, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The head's numbers in fp32, and in bf16 mixed precision with the head held in fp32 by a setting, where the library has one."""
    with torch.no_grad():
        wanted = model(inputs)
        try:
            return wanted, library.hold(model, BF16, model.name)(inputs)
        except NotOffered:
            with library.autocast(BF16):
                return wanted, model(inputs)


def _second(logits: Tensor) -> Tensor:
    return logits.float().topk(2, -1).indices.sort(-1).values


@record(
    "router-picks-other-experts",
    "a router over 32 experts picks two for each of 1024 tokens under bf16",
    today="1 % of the tokens go to other experts than in fp32, 2 % have an exact tie",
    right="none and none: the library holds the router in fp32 by a setting, without an edit of the model",
    check=lambda v: v == {"elsewhere": 0.0, "ties": 0.0},
    refs=("case 54",),
)
def router(library: Library) -> Any:
    wanted, got = _held(library, _Model("router", 64, 32, 1 / 8), torch.randn(1024, 64))
    elsewhere = (_second(got) != _second(wanted)).any(-1).float().mean()
    ties = (got.float().topk(3, -1).values.diff() == 0).any(-1).float().mean()
    return {"elsewhere": float(elsewhere), "ties": float(ties)}


@record(
    "policy-ratio-of-one-policy",
    "the ratio of token probabilities between a rollout in fp32 and training in bf16, of the same weights (RL)",
    today="off by up to 11 %, where PPO clips at 20 %",
    right="1 to 1e-4: the library holds the head in fp32 by a setting",
    check=lambda v: v < 1e-4,
    refs=("case 55",),
)
def policy_ratio(library: Library) -> Any:
    tokens = torch.randint(0, 256, (200, 1))
    wanted, got = _held(library, _Model("head", 32, 256, 0.7, bias=10.0), torch.randn(200, 32))
    chosen = [z.float().log_softmax(-1).gather(1, tokens) for z in (wanted, got)]
    return float(((chosen[1] - chosen[0]).exp() - 1).abs().max())


@record(
    "values-fall-on-one-another",
    "a value head predicts returns near 200 that differ by a few tenths, under bf16",
    today="64 states get five values: bf16 counts in ones there",
    right="64 values, in the order of fp32",
    check=lambda v: v == {"values": 64, "same order": True},
    refs=("case 55",),
)
def values_fall(library: Library) -> Any:
    wanted, got = _held(library, _Model("value", 8, 1, 0.3, bias=200.0), torch.randn(64, 8))
    order = torch.equal(wanted.flatten().argsort(stable=True), got.float().flatten().argsort(stable=True))
    return {"values": len(set(got.flatten().tolist())), "same order": order}


@record(
    "a-threshold-is-missed",
    "a gate that opens above 1 (early exit, halting, anomaly), for 2000 scores around 1, under bf16",
    today="1 % decide otherwise: scores within half a unit round onto the threshold",
    right="all as in fp32",
    check=lambda v: v == 0.0,
    refs=("case 54",),
)
def threshold(library: Library) -> Any:
    wanted, got = _held(library, _Model("gate", 8, 1, 0.3, bias=1.0), torch.randn(2000, 8) * 0.1)
    return float(((wanted > 1) != (got > 1)).float().mean())


@record(
    "greedy-token-of-near-ties",
    "the best of 512 tokens whose logits are near 20, for 512 positions, under bf16",
    today="a tenth of the positions get another token than in fp32: the first of those that round to the same number",
    right="all as in fp32",
    check=lambda v: v == 0.0,
    refs=("case 54", "case 55"),
)
def greedy(library: Library) -> Any:
    wanted, got = _held(library, _Model("lm_head", 16, 512, 0.25, bias=20.0), torch.randn(512, 16))
    return float((wanted.argmax(-1) != got.argmax(-1)).float().mean())


# --- what follows from logits in a block: the library's own lists of ops decide -------------------------------------


def _logits(library: Library, outputs: int, std: float, use: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """`use` of bf16 logits inside a block, and in fp32 of the same logits."""
    head, inputs = nn.Linear(8, outputs), torch.randn(16, 8)
    nn.init.normal_(head.weight, std=std)
    with torch.no_grad(), library.autocast(BF16):
        logits = head(inputs)
        got = use(logits)
    return use(logits.float()), got.float()


@record(
    "score-of-a-long-beam",
    "the log-probabilities of 200 tokens are added up inside a bf16 block, as beam search does",
    today="-482 instead of -554.5: the sum goes in steps of two",
    right="-200 x log 16 to 1e-4",
    check=lambda v: near(v, -200 * math.log(16), 1e-4),
    refs=("case 55",),
)
def beam(library: Library) -> Any:
    head = nn.Linear(8, 16)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    score: Tensor | float = 0.0
    with torch.no_grad(), library.autocast(BF16):
        for _ in range(200):
            score = score + head(torch.ones(1, 8)).log_softmax(-1)[0, 0]
    return float(score)


@record(
    "nucleus-of-another-size",
    "top-p sampling: how many of 1024 tokens hold 90 % of the probability, from bf16 logits in a block",
    today="up to eight tokens more or fewer than the same logits give in fp32",
    right="the same number for each",
    check=lambda v: v == 0,
    refs=("case 55",),
)
def nucleus(library: Library) -> Any:
    def kept(z: Tensor) -> Tensor:
        return (z.softmax(-1).sort(-1, descending=True).values.cumsum(-1) < 0.9).sum(-1)

    wanted, got = _logits(library, 1024, 0.3, kept)
    return int((wanted - got).abs().max())


@record(
    "entropy-of-a-policy",
    "the entropy bonus over 1024 actions, from bf16 logits in a block",
    today="off by 0.09, as much as it changes in a whole run",
    right="as the same logits give in fp32, to 1e-4",
    check=lambda v: v < 1e-4,
    refs=("case 55",),
)
def entropy(library: Library) -> Any:
    def of(z: Tensor) -> Tensor:
        log_p = F.log_softmax(z, -1)
        return -(log_p.exp() * log_p).sum(-1)

    wanted, got = _logits(library, 1024, 0.1, of)
    return float((wanted - got).abs().max())


@record(
    "distance-to-the-reference-policy",
    "the KL divergence between two policies whose logits differ by 0.02, in a block",
    today="-0.0003 instead of 0.0002: the rounding of log-probabilities is larger than what is measured",
    right="as the same logits give in fp32, to 1 %",
    check=lambda v: near(v[0], v[1], 0.01),
    refs=("case 55",),
)
def reference_policy(library: Library) -> Any:
    noise = 0.02 * torch.randn(16, 256)

    def kl(z: Tensor) -> Tensor:
        p, q = F.log_softmax(z, -1), F.log_softmax(z + noise.to(z.dtype), -1)
        return (p.exp() * (p - q)).sum(-1).mean()

    wanted, got = _logits(library, 256, 0.25, kl)
    return [float(got), float(wanted)]
