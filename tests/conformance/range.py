"""The range of 16 bits in a forward pass: products, squares, sums, distances (kind B)."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.diagnosed import NAMED, Part, Seen, by_hand, first_line, identity, judged, numbers, seen, train, whole
from conformance.tools import F16, near

RECORDS: list[Record] = []
record = collector(RECORDS, "B")


def _dice(p: Tensor) -> Tensor:
    flat = p.flatten()
    return 1 - 2 * (flat @ flat) / (flat @ torch.ones_like(flat) * 2)


def _normed(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


by_hand(
    record,
    "logits-before-scaling",
    "q @ k.T of 64 values of 40 before the factor 1 / 8",
    "102400 is inf in fp16, softmax of inf is NaN",
    lambda q: (q @ q.t() * 64**-0.5).softmax(-1),
    torch.full((2, 64), 40.0),
    ("overflow",),
    "attend",
    refs=("case 09",),
)
by_hand(
    record,
    "dice-loss-written-as-products",
    "the sums of a Dice loss over 768 x 128 ones written as dot products",
    "98304 is inf in fp16: inf / inf = NaN",
    _dice,
    torch.ones(768, 128),
    ("overflow",),
    "dice",
    refs=("case 07",),
)
by_hand(
    record,
    "norm-by-hand-as-a-product",
    "a layer norm by hand, with x * x instead of x.pow(2), of values of 400",
    "the square is inf, its inverse 0: the norm gives zeros, without NaN or a warning",
    _normed,
    torch.tensor([[400.0, -400.0, 400.0, -400.0]]),
    ("norm", "overflow"),
    "norm",
    refs=("case 08",),
)
by_hand(
    record,
    "variance-of-large-values",
    "(x - x.mean()) / (x.var() + 1e-5).sqrt() of values of 400",
    "the variance is inf in fp16: zeros, without NaN or a warning",
    lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    torch.tensor([[400.0, -400.0, 400.0, -400.0]]),
    ("norm", "overflow"),
    "standardise",
)
by_hand(
    record,
    "softplus-by-hand",
    "log(1 + exp(x)) of 20 in an fp16 block",
    "exp(20) is inf in fp16",
    lambda x: (1 + x.exp()).log(),
    torch.full((1, 2), 20.0),
    (),
    "positive",
)
by_hand(
    record,
    "likelihood-of-a-sequence",
    "the cumulative product of five probabilities of 0.03, and its logarithm",
    "2.4e-8 is 0 in fp16: the logarithm is -inf",
    lambda p: p.cumprod(-1).log(),
    torch.full((1, 5), 0.03),
    (),
    "likelihood",
)
by_hand(
    record,
    "loss-over-a-count-of-tokens",
    "a sum over 72000 tokens of 0.5, divided by the number of tokens, counted in the loss's dtype",
    "the count is inf in fp16: the loss is 0 or NaN",
    lambda x: x.sum() / torch.ones_like(x).sum(),
    torch.full((9000, 8), 0.5),
    (),
    "mean",
)
by_hand(
    record,
    "squared-distance-by-hand",
    "(a - b) * (a - b) of points 300 apart",
    "90000 is inf in fp16",
    lambda x: ((x - x.flip(0)) * (x - x.flip(0))).mean(-1),
    torch.tensor([[0.0, 0.0], [300.0, 300.0]]),
    ("overflow",),
    "distance",
    refs=("case 14",),
)
by_hand(
    record,
    "temperature-of-a-contrastive-loss",
    "similarities of 10 divided by a temperature of 1e-4, then a softmax",
    "100000 is inf in fp16, softmax of inf is NaN",
    lambda x: (x / 1e-4).softmax(-1),
    torch.full((1, 2), 10.0),
    ("overflow",),
    "contrast",
)


class Smoothed(nn.Module):
    """Logits of a large vocabulary and their cross entropy with label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(1, 8192), Part(self._loss)
        nn.init.zeros_(self.head.weight)
        self.head.bias.data.copy_(torch.randn(8192, generator=torch.Generator().manual_seed(0)) * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.head(x))  # type: ignore[no-any-return]

    @staticmethod
    def _loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.zeros(1, dtype=torch.long), label_smoothing=0.1)


@record(
    "label-smoothing-in-a-16-bit-model",
    "cross entropy with label smoothing over 8192 logits in a model whose weights are fp16",
    today="the sum of 8192 log probabilities is inf in fp16",
    right=f"the loss of fp32, {NAMED} (overflow, loss)",
    check=lambda v: v.right or v.names(("overflow",), "loss"),
    refs=("case 10",),
)
def label_smoothing(library: Library) -> Any:
    return whole(library, Smoothed, torch.zeros(1, 1, dtype=F16), dtype=F16)


@record(
    "label-smoothing-after-the-block",
    "the logits come out of an fp16 block or a prepared model, and the smoothed loss is taken after it, as in most scripts",
    today="the logits are fp16 still: the sum of 8192 log probabilities is inf",
    right=f"the loss of fp32, {NAMED} (overflow)",
    check=lambda v: v.right or v.said.startswith("overflow"),
    doors=("loop", "accelerator"),
    refs=("case 10",),
)
def label_smoothing_outside(library: Library) -> Any:
    model = Smoothed()
    wanted = numbers(model(torch.zeros(1, 1)))
    model.loss = Part(lambda logits: logits)
    run = train(library, model)

    def call() -> Tensor:
        return Smoothed._loss(run.forward(torch.zeros(1, 1)))

    values = numbers(call())
    if model.loss.met is not F16:
        raise NotOffered(f"fp16 was asked for, and the layers ran in {model.loss.met}")
    return judged(Seen(values, wanted, ""), lambda: first_line(library, run.model, call))


class FeedForward(nn.Module):
    """A feed-forward block as in T5: its true output is 1.06e5."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        for layer in (self.wi, self.wo):
            nn.init.constant_(layer.weight, 0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.relu(self.wi(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x + self.ff(x), (64,))


def _beyond(library: Library, model: nn.Module, x: Tensor, witness: str) -> Seen:
    """The model's results under fp16, and what is said of them. witness: a layer that shows whether anything ran in fp16."""
    wanted = numbers(model(x))
    run, met = train(library, model), []
    handle = model.get_submodule(witness).register_forward_hook(lambda _, inputs, output: met.append(output.dtype))

    def call() -> Tensor:
        return run.forward(x).float().sum()

    values = numbers(run.forward(x))
    handle.remove()
    if met[0] is not F16:
        raise NotOffered(f"fp16 was asked for, and the layers ran in {met[0]}")
    return judged(Seen(values, wanted, ""), lambda: first_line(library, run.model, call))


@record(
    "feed-forward-beyond-fp16",
    "a feed-forward block whose output is 1.06e5, and a layer norm after it",
    today="inf, then NaN; the loss scale is halved for it, and no module is named",
    right=f"the result of fp32, {NAMED} (overflow, ff.wo)",
    check=lambda v: v.right or v.names(("overflow",), "ff.wo"),
    doors=("loop", "accelerator"),
    refs=("case 16",),
)
def feed_forward(library: Library) -> Any:
    return _beyond(library, Block(), torch.cat([torch.full((1, 32), 8.0), torch.full((1, 32), 7.0)], 1), "ff.wi")


@record(
    "convolution-beyond-fp16",
    "a decoder's convolution whose output is 1.15e5, and a group norm after it (the VAE of a diffusion model)",
    today="inf, then NaN, which a picture shows as black",
    right=f"the result of fp32, {NAMED} (overflow, decode)",
    check=lambda v: v.right or v.names(("overflow",), "decode"),
    doors=("loop", "accelerator"),
    refs=("case 16",),
)
def convolution(library: Library) -> Any:
    decode = nn.Conv1d(16, 4, 3, padding=1, bias=False)
    nn.init.constant_(decode.weight, 30.0)
    model = nn.Sequential(OrderedDict(decode=decode, norm=nn.GroupNorm(2, 4), tail=identity(4)))
    return _beyond(library, model, torch.full((1, 16, 4), 80.0), "tail")


@record(
    "feature-beyond-fp16",
    "an input column of 100000 (a price, a year in seconds) into the first layer of an fp16 model",
    today="the cast to fp16 gives inf: the loss is inf or NaN at every step, and the scale is halved for it",
    right=f"the result of fp32, {NAMED} (overflow or data, first)",
    check=lambda v: v.right or v.names(("overflow", "data"), "first"),
    doors=("loop", "accelerator"),
)
def feature(library: Library) -> Any:
    first = nn.Linear(2, 2, bias=False)
    nn.init.constant_(first.weight, 1e-5)
    return _beyond(library, nn.Sequential(OrderedDict(first=first, tail=identity(2))), torch.tensor([[100000.0, 1.0]]), "tail")


@record(
    "target-beyond-fp16",
    "a target of 70000, cast to the output's dtype for a mean squared error by hand",
    today="the target is inf in fp16, and so is the loss",
    right=f"the result of fp32, {NAMED} (overflow, loss)",
    check=lambda v: v.right or v.names(("overflow",), "loss"),
    doors=("loop", "accelerator"),
    refs=("case 14",),
)
def target(library: Library) -> Any:
    return seen(library, lambda y: (y - torch.full((1, 1), 70000.0).to(y.dtype)).abs().mean(), torch.zeros(1, 1), "loss")


class Regressor(nn.Module):
    """The block with a head, as trainers want a model."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(64, 1)
        nn.init.constant_(self.head.weight, 0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.head(self.block(x)).squeeze(-1).float(), labels.float())}


@record(
    "feed-forward-beyond-fp16-under-a-trainer",
    "eight steps of a trainer with fp16=True on a model whose feed-forward block gives 1.06e5",
    today="every step overflows: the scale falls to nothing and no weight moves (on a CPU fp16=True runs in fp32)",
    right="eight steps whose mean loss is that of fp32 to 2 %, with fp16 in the layers that stand it",
    check=lambda v: len(v[0]) == 8 and near(sum(v[0]), sum(v[1]), 0.02),
    refs=("case 16",),
    doors=("trainer",),
    stock="not offered",
)
def feed_forward_trained(library: Library) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": 7.0 + torch.rand(64, generator=generator), "labels": float(i % 2)} for i in range(16)]
    settings = {"max_steps": 8, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1}
    met: list[torch.dtype] = []

    def losses(**flags: bool) -> list[float]:
        torch.manual_seed(0)
        model = Regressor()
        model.block.ff.wi.register_forward_hook(lambda _, inputs, output: met.append(output.dtype))
        with tempfile.TemporaryDirectory() as folder:
            trainer = library.trainer(model, rows, folder, **settings, **flags)
            trainer.train()
        return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]

    wide = losses()
    met.clear()
    half = losses(fp16=True)
    if F16 not in met:
        raise NotOffered(f"fp16 was asked for, and the layers ran in {met[0]}")
    return half, wide
