"""Accelerators and trainers: what was asked for and what ran, and bad batches under a trainer (kinds N and F)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from conformance.adapter import Library, Record, collector
from conformance.tools import F16, F32, finite, near, read

RECORDS: list[Record] = []
record = collector(RECORDS, "N")
touched = collector(RECORDS, "F")
wrong = collector(RECORDS, "E")


class Regression(nn.Module):
    """A layer with a loss, in the form that trainers take. Keeps the dtype its layer ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layer(x)
        self.dtypes.add(out.dtype)
        return {"loss": (out.float().squeeze(-1) - labels).square().mean()}


def _rows(count: int, bad: Sequence[int] = ()) -> list[dict[str, Any]]:
    xs = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return [{"x": x * math.nan if i in bad else x, "labels": float(x.sum())} for i, x in enumerate(xs)]


# --- what was asked for, and what ran -------------------------------------------------------------------------------


@record(
    "fp16-accelerator-on-a-cpu",
    "Accelerator(mixed_precision='fp16') on a CPU",
    today="reports fp16 and runs fp32 without a scaler; nothing is said",
    right="fp16 in the layer and a loss scale, or a refusal",
    check=lambda v: v["dtypes"] == {F16} and v["scaled"],
    refused=("fp16",),
    refs=("F12", "case 66"),
    doors=("accelerator",),
)
def fp16_accelerator(library: Library) -> Any:
    net = Regression()
    accelerator = library.accelerator("fp16")
    model, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2), torch.ones(1))["loss"])
    scaler = getattr(accelerator, "scaler", None)
    optimizer.step()
    return {"dtypes": net.dtypes, "scaled": scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1}


@record(
    "autocast-of-an-fp16-accelerator-on-a-cpu",
    "accelerator.autocast() of the same",
    today="a block without effect",
    right="fp16 products, or a refusal",
    check=lambda dtype: dtype is F16,
    refused=("fp16",),
    refs=("case 66",),
    doors=("accelerator",),
)
def fp16_accelerator_block(library: Library) -> Any:
    with library.accelerator("fp16").autocast():
        return nn.Linear(4, 4)(torch.ones(1, 4)).dtype


@record(
    "fp16-trainer-on-a-cpu",
    "TrainingArguments(fp16=True, use_cpu=True)",
    today="fp32 training",
    right="fp16 in the layer, or a refusal",
    check=lambda v: v == {F16},
    refused=("fp16",),
    refs=("F12", "case 66"),
    doors=("trainer",),
)
def fp16_trainer(library: Library) -> Any:
    net = Regression()
    with tempfile.TemporaryDirectory() as folder:
        library.trainer(net, _rows(8), folder, max_steps=2, per_device_train_batch_size=2, fp16=True).train()
    return net.dtypes


# --- bad batches under a trainer ------------------------------------------------------------------------------------


def _fit(library: Library, rows: list[dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    net = Regression()
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 1, "logging_steps": 1, "learning_rate": 0.01, "lr_scheduler_type": "constant"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = library.trainer(net, rows, folder, **{**settings, **arguments})
        trainer.train()
        history = trainer.state.log_history
    losses = [float(r["loss"]) for r in history if "loss" in r and "train_runtime" not in r]
    return {"losses": losses, "finite": finite(net.parameters()), "steps": trainer.state.global_step}


def _trained_on_nan(precision: str) -> None:
    flags = {} if precision == "fp32" else {precision: True}

    @touched(
        f"one-nan-batch-under-a-trainer-{precision}",
        f"one of eight batches is NaN, {precision}",
        today="the log says 0.0, every weight is NaN, the run goes on",
        right="weights finite, seven steps, and the log holds a NaN and no 0.0",
        check=lambda v: v["finite"] and v["steps"] == 7 and 0.0 not in v["losses"] and any(map(math.isnan, v["losses"])),
        refs=("F11", "case 71"),
        doors=("trainer",),
    )
    def one_nan_batch(library: Library) -> Any:
        return _fit(library, _rows(8, (3,)), **flags)


for _precision in ("fp32", "bf16"):
    _trained_on_nan(_precision)


@touched(
    "nothing-but-nan-under-a-trainer",
    "60 batches of NaN",
    today="60 steps are taken, the log says 0.0 or the like, the weights are NaN",
    right="an error that names the loss, after a number of steps that it says",
    check=lambda v: False,
    refused=("loss", "steps"),
    refs=("F11",),
    doors=("trainer",),
)
def nothing_but_nan(library: Library) -> Any:
    return _fit(library, _rows(60, range(60)))


@touched(
    "nan-in-one-micro-batch-under-a-trainer",
    "windows of two micro-batches; one micro-batch of the second window is NaN",
    today="every weight is NaN",
    right="weights finite, three of four steps",
    check=lambda v: v["finite"] and v["steps"] == 3,
    refs=("F11",),
    doors=("trainer",),
)
def nan_micro_batch(library: Library) -> Any:
    return _fit(library, _rows(8, (3,)), gradient_accumulation_steps=2)


@touched(
    "full-16-bit-evaluation",
    "Trainer(bf16_full_eval=True): evaluate(), then train()",
    today="evaluation casts the model to bf16 and leaves it so: training runs on bf16 weights",
    right="fp32 weights in training, or the setting is refused",
    check=lambda dtype: dtype is F32,
    refused=("bf16_full_eval",),
    refs=("F10",),
    doors=("trainer",),
)
def full_evaluation(library: Library) -> Any:
    net = Regression()
    with tempfile.TemporaryDirectory() as folder:
        trainer = library.trainer(net, _rows(4), folder, max_steps=1, bf16=True, bf16_full_eval=True)
        trainer.evaluate()
        trainer.train()
    return net.layer.weight.dtype


@touched(
    "batchnorm-under-a-trainer",
    "a BatchNorm network; one of eight batches is NaN",
    today="running statistics and weights are NaN",
    right="statistics finite, seven batches counted",
    check=lambda v: v["finite"] and v["count"] == 7,
    refs=("F11", "case 29"),
    doors=("trainer",),
)
def batchnorm_under_trainer(library: Library) -> Any:
    net = Regression()
    norm = nn.BatchNorm1d(2)
    net.layer = nn.Sequential(norm, nn.Linear(2, 1))  # type: ignore[assignment]
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "learning_rate": 0.01, "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        library.trainer(net, _rows(16, (3,)), folder, **settings).train()
    assert norm.num_batches_tracked is not None
    return {"finite": finite([*net.parameters(), *net.buffers()]), "count": int(norm.num_batches_tracked)}


@touched(
    "schedule-under-a-trainer",
    "a linear schedule over six steps; one of six batches is NaN",
    today="the bad step uses up a step of the schedule (and ruins the weights)",
    right="six applied steps, whose logged rates fall by a sixth each; a refused one repeats its rate",
    check=lambda v: v["finite"] and v["steps"] == 6 and near(sorted(set(v["rates"]), reverse=True), [0.06 * (1 - n / 6) for n in range(6)], 1e-3),
    refs=("F11", "case 18"),
    doors=("trainer",),
)
def schedule_under_trainer(library: Library) -> Any:
    net = Regression()
    settings = {"max_steps": 6, "per_device_train_batch_size": 1, "learning_rate": 0.06, "lr_scheduler_type": "linear", "logging_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = library.trainer(net, _rows(6, (2,)), folder, **settings)
        trainer.train()
    rates = [float(r["learning_rate"]) for r in trainer.state.log_history if "learning_rate" in r]
    return {"finite": finite(net.parameters()), "steps": trainer.state.global_step, "rates": rates}


# --- orders that are wrong under an accelerator ---------------------------------------------------------------------


def _wrong_call(name: str, how: str, today: str, call: Any, word: str) -> None:
    @wrong(
        f"accelerator-{name}",
        f"{how}, in a loop around an fp16 accelerator",
        today=today,
        right="an update of 0.5, or a refusal that says what to call",
        check=lambda v: near(v, 0.5, 1e-3),
        refused=(word,),
        doors=("accelerator",),
        stock="right",
    )
    def wrong_call(library: Library) -> Any:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        accelerator, raw = library.accelerator("fp16"), SGD(layer.parameters(), lr=0.5)
        model, optimizer = accelerator.prepare(layer, raw)
        loss = model(torch.ones(1, 1)).float().sum()
        call(accelerator, model, optimizer, raw, loss)
        return read(layer.weight)[0]


def _plain_backward(accelerator: Any, model: Any, optimizer: Any, raw: Any, loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _raw_step(accelerator: Any, model: Any, optimizer: Any, raw: Any, loss: Tensor) -> None:
    accelerator.backward(loss)
    raw.step()


def _torchs_clip(accelerator: Any, model: Any, optimizer: Any, raw: Any, loss: Tensor) -> None:
    accelerator.backward(loss)
    clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()


IN_FP32 = "right, because Accelerate's fp16 is fp32 on a CPU; on a GPU it is wrong by the scale"
_wrong_call("backward-of-the-loss-itself", "loss.backward() instead of accelerator.backward(loss)", IN_FP32, _plain_backward, "backward")
_wrong_call("step-of-the-optimizer-inside", "step() of the optimizer that was given to prepare()", IN_FP32, _raw_step, "step")
_wrong_call("torchs-clip", "torch's clip_grad_norm_ instead of accelerator.clip_grad_norm_", IN_FP32, _torchs_clip, "clip")
