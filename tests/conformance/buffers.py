"""State that a bad step touches: running statistics, buffers, moments, weights without a scaler (kind F)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F16, F32, copies, finite, overflowing, same

RECORDS: list[Record] = []
record = collector(RECORDS, "F")
DTYPES = {"fp16": F16, "bf16": BF16, "fp32": F32}


class Codebook(nn.Module):
    """A running mean of what went through, kept as the user likes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4), persistent=how != "not persistent")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = self.mean * 0.9 + x.detach().float().mean(0) * 0.1
            if self.how == "assigned":
                self.mean = new
            elif self.how == "data":
                self.mean.data.copy_(new)
            else:
                self.mean.copy_(new)
        return x - self.mean.detach()


class Queue(nn.Module):
    """A memory bank of the last four features with an integer pointer (momentum contrast)."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: Tensor
        self.at: Tensor
        self.register_buffer("bank", torch.zeros(4, 4))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bank[int(self.at) % 4] = x.detach().float().mean(0)
            self.at += 1
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": lambda: nn.BatchNorm1d(4),
    "batchnorm-cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "instancenorm": lambda: nn.Sequential(
        nn.Unflatten(0, (1, 6)), _Swap(), nn.InstanceNorm1d(4, track_running_stats=True), _Swap(), nn.Flatten(0, 1)
    ),
    "spectral-norm": lambda: spectral_norm(nn.Linear(4, 4)),
    "codebook": lambda: Codebook("in place"),
    "codebook-not-persistent": lambda: Codebook("not persistent"),
    "codebook-assigned": lambda: Codebook("assigned"),
    "codebook-through-data": lambda: Codebook("data"),
    "queue-with-pointer": Queue,
}


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _batches(library: Library, layer: nn.Module, dtype: torch.dtype, factors: tuple[float, ...]) -> dict[str, Any]:
    """A run over batches, of which those with a factor of inf overflow in the forward pass."""
    net = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 1))
    run, inputs = library.run(net, [SGD(net.parameters(), lr=0.01)], dtype=dtype), torch.randn(6, 4)
    said, kept, losses = [], [], []
    for factor in factors:
        before = copies(net.buffers())
        loss = run.forward(inputs * factor).float().pow(2).mean()
        run.backward(loss)
        said += run.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(factor):
            kept.append(same(before, net.buffers()))
    net.eval()
    out = run.forward(inputs)
    return {"said": said, "kept": all(kept), "eval": finite([out, *net.buffers(), *net.parameters()]), "losses": losses}


def _bad_batch(name: str, dtype: str) -> None:
    @record(
        f"{name}-after-a-bad-batch-in-{dtype}",
        f"one batch with inf in it between good ones: {name} in {dtype}",
        today="the statistics of the bad batch stay: NaN, or one update ahead of the weights, and evaluation with them",
        right="told [True, False, True]; buffers as before the bad batch; evaluation finite",
        check=lambda v: v["said"] == [True, False, True] and v["kept"] and v["eval"],
        refs=("case 29",) if name == "batchnorm" else (),
        doors=("loop", "accelerator"),
    )
    def bad_batch(library: Library) -> Any:
        return _batches(library, LAYERS[name](), DTYPES[dtype], (1.0, math.inf, 1.0))


for _name in LAYERS:
    for _dtype in ("fp16", "bf16", "fp32") if _name == "batchnorm" else ("fp16",):
        _bad_batch(_name, _dtype)


@record(
    "batchnorm-and-an-overflow-of-gradients",
    "the forward pass is fine and the backward pass overflows: are the statistics those of applied steps?",
    today="the statistics are one update ahead of the weights",
    right="told False; running mean, variance and counter as before",
    check=lambda v: v["said"] == [False] and v["kept"] and v["count"] == 0,
    refs=("case 29",),
    doors=("loop", "accelerator"),
)
def batchnorm_gradient_overflow(library: Library) -> Any:
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), norm)
    run = library.run(net, [SGD(net.parameters(), lr=0.01)])
    before = copies(net.buffers())
    run.backward(overflowing(run.forward(torch.randn(6, 4))).float().pow(2).mean())
    said = run.step()
    assert norm.num_batches_tracked is not None
    return {"said": said, "kept": same(before, net.buffers()), "count": int(norm.num_batches_tracked)}


@record(
    "batchnorm-counts-each-batch-once",
    "five good batches: does finding the scale run the forward pass again?",
    today="right",
    right="num_batches_tracked is 5, and the running mean is that of an fp32 run to 1 %",
    check=lambda v: v["count"] == 5 and v["error"] < 0.01 and v["moved"] > 0,
    stock="right",
    doors=("loop", "accelerator"),
)
def batchnorm_counts(library: Library) -> Any:
    norm = nn.BatchNorm1d(4)
    net, inputs = nn.Sequential(norm, nn.Linear(4, 4)), torch.randn(6, 4)
    start = copies(net[1].parameters())
    run = library.run(net, [SGD(net.parameters(), lr=0.01)])
    for _ in range(5):
        out = run.forward(inputs)
        run.backward(out.float().pow(2).mean() / 64 if out.dtype is F16 or library.door == "accelerator" else out.mean() * math.nan)
        run.step()
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    wanted = inputs.mean(0) * (1 - 0.9**5)
    moved = float((start[0] - next(net[1].parameters())).detach().abs().sum())
    return {
        "count": int(norm.num_batches_tracked),
        "error": float((norm.running_mean - wanted).norm() / wanted.norm()),
        "moved": moved if finite(net.parameters()) else 0.0,
    }


@record(
    "batchnorm-in-a-window-that-is-refused",
    "two micro-batches; the first is good and the second has inf in it",
    today="the statistics of both stay",
    right="told False; buffers as before the window; evaluation finite",
    check=lambda v: v["said"] == [False] and v["kept"] and v["finite"],
    refs=("case 29",),
)
def batchnorm_window(library: Library) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run, inputs = library.run(net, [SGD(net.parameters(), lr=0.01)]), torch.randn(6, 4)
    before = copies(net.buffers())
    for factor in (1.0, math.inf):
        run.backward(run.forward(inputs * factor).float().pow(2).mean() / 2)
    said = run.step()
    return {"said": said, "kept": same(before, net.buffers()), "finite": finite(net.buffers())}


@record(
    "batchnorm-where-one-optimizer-steps",
    "two optimizers for two halves of one network; only the second overflows",
    today="right in value; nobody is told",
    right="told [True, False]; the batch counts: num_batches_tracked is 1 and the statistics are finite",
    check=lambda v: v["said"] == [True, False] and v["count"] == 1 and v["finite"],
)
def batchnorm_one_steps(library: Library) -> Any:
    norm = nn.BatchNorm1d(4)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(4, 4), norm, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x)).float().sum() + overflowing(self.second(x)).float().sum()  # type: ignore[no-any-return]

    net = Two()
    run = library.run(net, [SGD([*net.first.parameters(), *norm.parameters()], lr=0.01), SGD(net.second.parameters(), lr=0.01)])
    run.backward(run.forward(torch.randn(6, 4)) / 64)
    said = run.step()
    assert norm.num_batches_tracked is not None
    return {"said": said, "count": int(norm.num_batches_tracked), "finite": finite(net.buffers())}


@record(
    "evaluation-between-backward-and-step",
    "a forward pass in eval() between backward and step of a bad batch",
    today="the statistics of the bad batch stay",
    right="buffers as before the bad batch",
    check=lambda kept: kept,
)
def evaluation_between(library: Library) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run, inputs = library.run(net, [SGD(net.parameters(), lr=0.01)]), torch.randn(6, 4)
    before = copies(net.buffers())
    run.backward(run.forward(inputs * math.inf).float().pow(2).mean())
    net.eval()
    with torch.no_grad():
        run.forward(inputs)
    net.train()
    run.step()
    return same(before, net.buffers())


@record(
    "average-of-buffers-after-a-bad-batch",
    "AveragedModel(use_buffers=True) of a BatchNorm network, updated after each step; one batch has inf in it",
    today="the average takes over NaN statistics",
    right="the average is finite and was updated twice",
    check=lambda v: v["finite"] and v["count"] == 2,
)
def average_of_buffers(library: Library) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer, scaler, inputs = SGD(net.parameters(), lr=0.01), library.scaler(16.0), torch.randn(6, 4)
    average = AveragedModel(net, use_buffers=True)
    library.watch(scaler, net, optimizer)
    follow = library.after_step(scaler, optimizer, lambda: average.update_parameters(net))
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        with library.autocast(F16):
            out = net(inputs * factor)
        scaler.scale(out.float().pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        follow()
    return {"finite": finite([*average.module.buffers(), *average.module.parameters()]), "count": int(average.n_averaged)}


@record(
    "weight-norm-after-a-bad-batch",
    "weight_norm (which has parameters and no buffers); one batch has inf in it",
    today="the step is skipped; nobody is told",
    right="told [True, False, True], parameters finite",
    check=lambda v: v["said"] == [True, False, True] and v["eval"],
)
def weight_norm_bad_batch(library: Library) -> Any:
    return _batches(library, weight_norm(nn.Linear(4, 4)), F16, (1.0, math.inf, 1.0))


@record(
    "buffers-that-begin-to-move-late",
    "a codebook and a BatchNorm in eval() for twelve steps, then in train(); the second batch after that has inf in it",
    today="the statistics of the bad batch stay",
    right="told False for that batch; buffers finite and as before it",
    check=lambda v: v["said"] == [True] * 13 + [False, True] and v["kept"] and v["eval"],
    refs=("case 29",),
)
def late_buffers(library: Library) -> Any:
    book, norm = Codebook("in place"), nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), book, norm, nn.Linear(4, 1))
    run, inputs = library.run(net, [SGD(net.parameters(), lr=0.01)]), torch.randn(6, 4)
    said, kept = [], False
    for i in range(15):
        book.train(i >= 12)
        norm.train(i >= 12)
        before = copies(net.buffers())
        run.backward(run.forward(inputs * (math.inf if i == 13 else 1.0)).float().pow(2).mean())
        said += run.step()
        kept = same(before, net.buffers()) if i == 13 else kept
    return {"said": said, "kept": kept, "eval": finite(net.buffers())}
